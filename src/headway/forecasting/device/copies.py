"""Compute the scratch memory of copies on CUDA: of arguments that are not contiguous, and of slow convolutions.

Most kernels accept any strides. Norms, softmax, pooling and some others first copy an argument that is not contiguous,
such as a gradient from a transpose (`expect_contiguous()` and `contiguous()` in `aten/src/ATen/native`). The history of
torch's allocator shows which arguments are copied, and whether before or after the results are allocated. RMSNorm is a
single kernel on CUDA.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor, suggest_memory_format

Sizes = Callable[[tuple[Any, ...]], list[int]]
"""Rule that computes scratch sizes in bytes from an operation's arguments, in the order of the requests."""

_COPIED_AFTER = (
    "_softmax", "_log_softmax", "_log_softmax_backward_data", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "topk",
    "native_group_norm", "native_layer_norm_backward", "im2col", "col2im", "reflection_pad1d", "reflection_pad1d_backward",
    "reflection_pad2d", "reflection_pad2d_backward", "upsample_nearest1d_backward", "upsample_linear1d_backward",
    "upsample_nearest3d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "avg_pool3d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward",
)  # fmt: skip
"""Operations that copy their first argument after their results are allocated, if it is not contiguous."""
_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Index of the inputs among the arguments of each convolution operation.

The weights, the bias or its size, strides and paddings follow the inputs.
"""


def _make_copy_rule(*places: int, like: int | None = None) -> Sizes:
    """Return a rule for the sizes of the copies that an operation makes of arguments with unsuitable strides.

    Args:
        places: Indices of the arguments that may be copied.
        like: Index of the argument whose memory format (channels last or not) images must have. With None, arguments
            must be contiguous. Default: None.
    """

    def sizes(args: tuple[Any, ...]) -> list[int]:
        wanted = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        return [args[each].nbytes for each in places if not args[each].is_contiguous(memory_format=wanted)]

    return sizes


COPIES_BEFORE: dict[str, Sizes] = {
    "aten::native_layer_norm": _make_copy_rule(0),
    "aten::native_layer_norm_backward": _make_copy_rule(1),
    "aten::native_group_norm_backward": _make_copy_rule(0, 1),
    "aten::_cdist_forward": _make_copy_rule(0, 1),
    "aten::_cdist_backward": _make_copy_rule(1, 2),
    "aten::_adaptive_avg_pool2d": _make_copy_rule(0, like=0),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::median"), _make_copy_rule(0)),
    "aten::roll": lambda args: (
        [args[0].nbytes] if len(args) < 3 or len(args[2]) > 1 else _make_copy_rule(0)(args)
    ),  # one by one
}
"""Rules for copies of arguments that an operation allocates before its results, by operation."""


COPIES_AFTER: dict[str, Sizes] = {
    **{f"aten::{name}": _make_copy_rule(0) for name in _COPIED_AFTER},
    **{f"aten::upsample_{each}2d_backward": _make_copy_rule(0, like=0) for each in ("nearest", "bilinear", "bicubic")},
    **{
        f"aten::{each}": _make_copy_rule(0, like=0)
        for each in ("upsample_nearest2d", "max_pool2d_with_indices", "avg_pool2d")
    },
    **{f"aten::{each}_backward": _make_copy_rule(1, 0, like=1) for each in ("max_pool2d_with_indices", "avg_pool2d")},
    "aten::_adaptive_avg_pool2d_backward": _make_copy_rule(0, like=0),
}
"""Rules for copies of arguments that an operation allocates after its results, by operation."""


def is_slow_convolution(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a convolution in bfloat16 is computed as a matrix product on devices below compute capability 8.0.

    On such devices cuDNN has no bfloat16 convolution. Depthwise convolutions are excluded, because they have
    separate kernels (`select_conv_backend` in `aten/src/ATen/native/Convolution.cpp`).

    Args:
        name: Name of the operation.
        args: Arguments of the operation.
    """
    given = args[_CONVOLUTIONS[name] :] if name in _CONVOLUTIONS else ()
    return bool(given) and given[0].dtype is torch.bfloat16 and given[8] == 1


def _make_slow_rules(name: str) -> tuple[Sizes, Sizes]:
    """Return two functions that compute the scratch memory of a convolution that is computed as a matrix product.

    The first is for memory allocated before the results: copies of arguments that are not contiguous. The second is for
    memory allocated after them: the columns of one sample (im2col).
    """
    first = _CONVOLUTIONS[name]

    def columns(args: tuple[Any, ...]) -> list[int]:
        inputs, weight, _, strides, paddings, dilations, is_transposed = args[first : first + 7]
        widths, places = weight.shape[2:], inputs.shape[2:]
        if not is_slow_convolution(name, args) or (not first and prod((*widths, *strides)) == 1 and not any(paddings)):
            return []
        if not is_transposed:
            each = zip(places, widths, strides, paddings, dilations)
            places = [(size + 2 * pad - apart * (wide - 1) - 1) // step + 1 for size, wide, step, pad, apart in each]
        return [weight.numel() // len(weight) * prod(places) * 2]

    return lambda args: _make_copy_rule(*range(first + 1))(args) if is_slow_convolution(name, args) else [], columns


SLOW_BEFORE, SLOW_AFTER = ({name: _make_slow_rules(name)[index] for name in _CONVOLUTIONS} for index in (0, 1))
"""Rules for the scratch memory of slow convolutions, by operation: allocated before their results (`SLOW_BEFORE`) or
after them (`SLOW_AFTER`).
"""


class _RMSNorm(torch.autograd.Function):
    """Autograd function that allocates for fake tensors the memory that `_fused_rms_norm` allocates and keeps on CUDA.

    A CPU has no such kernel.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Allocate the normalized result, and the reciprocal roots in float32 that are saved for backward.

        Args:
            ctx: Context of the autograd function.
            inputs: Tensor to normalize.
            weight: Weight of the norm, or None.
            dims: Number of last dimensions that are normalized.
        """
        rows = inputs.contiguous()
        result = torch.empty_like(rows)
        roots = rows.new_empty(prod(rows.shape[:-dims]), dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, roots)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Allocate the gradients of the inputs and the weight.

        If the incoming gradient is not contiguous, also allocate a copy.
        """
        inputs, weight, _ = ctx.saved_tensors
        rows = inputs.contiguous()
        found = torch.empty_like(rows), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None
        gradients[0].contiguous()
        return found


def apply_rms_norm(
    inputs: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Apply RMSNorm to fake tensors as one kernel if torch's `rms_norm` does so on CUDA.

    torch does so unless the weight has another dtype than the inputs, or the inputs have channels last.
    """
    is_plain = suggest_memory_format(inputs) == torch.contiguous_format
    if isinstance(inputs, FakeTensor) and is_plain and (weight is None or weight.dtype == inputs.dtype):
        return _RMSNorm.apply(inputs, weight, len(shape))  # type: ignore[no-untyped-call]
    return torch.ops.aten.rms_norm.default.decompose(inputs, shape, weight, eps)
