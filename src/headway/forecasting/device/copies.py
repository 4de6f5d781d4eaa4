"""Compute the scratch memory of copies that CUDA kernels make of non-contiguous arguments and in slow convolutions.

Most kernels accept any strides. Norms, softmax, pooling and some others first copy an argument that is not contiguous,
such as the gradient of a transposed tensor (`expect_contiguous()` and `contiguous()` in `aten/src/ATen/native`). The
memory history that torch's allocator can record shows which arguments are copied, and whether before or after the
results are allocated.

RMSNorm is also traced here, because it is a single kernel on CUDA.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor, suggest_memory_format

Sizes = Callable[[tuple[Any, ...]], list[int]]
"""Rule that computes the bytes of each scratch tensor from an operation's arguments, in the order of the requests."""

_COPIED_AFTER = (
    "_softmax", "_log_softmax", "_log_softmax_backward_data", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "topk",
    "native_group_norm", "native_layer_norm_backward", "im2col", "col2im", "reflection_pad1d", "reflection_pad1d_backward",
    "reflection_pad2d", "reflection_pad2d_backward", "upsample_nearest1d_backward", "upsample_linear1d_backward",
    "upsample_nearest3d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "avg_pool3d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward",
)  # fmt: skip
"""Operations that allocate their results first, and then copy their first argument if it is not contiguous."""
_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Index of the `input` argument of each convolution operation.

The weight, the bias or its size, the strides, paddings and dilations, whether the convolution is transposed, the output
paddings and the number of groups follow it.
"""


def _make_copy_rule(*places: int, like: int | None = None) -> Sizes:
    """Return a rule for the sizes of the copies that an operation makes of arguments with unsuitable strides.

    Args:
        places: Indices of the arguments that are copied if their strides are unsuitable.
        like: Index of the argument whose memory format the copied arguments must have: contiguous or channels last.
            None (the default): the arguments must be contiguous.
    """

    def list_copy_sizes(args: tuple[Any, ...]) -> list[int]:
        wanted = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        return [args[each].nbytes for each in places if not args[each].is_contiguous(memory_format=wanted)]

    return list_copy_sizes


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
    ),  # several dimensions are rolled one after the other
}
"""Rules for the argument copies that an operation allocates before its results, by operation."""


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
"""Rules for the argument copies that an operation allocates after its results, by operation."""


def is_slow_convolution(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a bfloat16 convolution is computed as a matrix product on devices below compute capability 8.0.

    cuDNN has no bfloat16 convolution for such devices. The result is False for grouped and depthwise convolutions.
    Depthwise convolutions have separate kernels (`select_conv_backend` in `aten/src/ATen/native/Convolution.cpp`).

    Args:
        name: Name of the operation. For operations other than convolutions, the result is False.
        args: Arguments of the operation.
    """
    if name not in _CONVOLUTIONS:
        return False
    input_index = _CONVOLUTIONS[name]
    inputs, groups = args[input_index], args[input_index + 8]
    return inputs.dtype is torch.bfloat16 and bool(groups == 1)


def _make_slow_rules(name: str) -> tuple[Sizes, Sizes]:
    """Return two functions that compute the scratch memory of a convolution that is computed as a matrix product.

    The first computes the memory that is allocated before the results: copies of arguments that are not contiguous. The
    second computes the memory that is allocated after the results: the unfolded columns of one sample (im2col).

    Args:
        name: Name of the convolution operation.
    """
    input_index = _CONVOLUTIONS[name]
    is_forward = input_index == 0

    def list_column_sizes(args: tuple[Any, ...]) -> list[int]:
        inputs, weight, _, strides, paddings, dilations, is_transposed = args[input_index : input_index + 7]
        kernel_sizes, column_sizes = weight.shape[2:], inputs.shape[2:]
        # The forward of a pointwise convolution is a matrix product of the inputs themselves.
        is_pointwise = prod((*kernel_sizes, *strides)) == 1 and not any(paddings)
        if not is_slow_convolution(name, args) or (is_forward and is_pointwise):
            return []
        if not is_transposed:
            # The columns of a plain convolution belong to the positions of its outputs.
            column_sizes = [
                (size + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
                for size, kernel_size, stride, padding, dilation in zip(
                    column_sizes, kernel_sizes, strides, paddings, dilations
                )
            ]
        return [weight.numel() // len(weight) * prod(column_sizes) * 2]  # 2 bytes per element in bfloat16

    return (
        lambda args: _make_copy_rule(*range(input_index + 1))(args) if is_slow_convolution(name, args) else [],
        list_column_sizes,
    )


SLOW_BEFORE, SLOW_AFTER = ({name: _make_slow_rules(name)[index] for name in _CONVOLUTIONS} for index in (0, 1))
"""Rules for the scratch memory that slow convolutions allocate before and after their results, by operation."""


class _RMSNorm(torch.autograd.Function):
    """Autograd function that allocates for fake tensors the memory that `_fused_rms_norm` allocates and keeps on CUDA.

    It is needed because the fake tensors are on a CPU, which has no such kernel.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Allocate the normalized result, and the reciprocal roots in float32 that are saved for backward.

        Args:
            ctx: Context of the autograd function.
            inputs: Tensor to normalize.
            weight: Weight of the norm, or None.
            dims: Number of trailing dimensions to normalize over.
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
        input_grad = torch.empty_like(rows)
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        gradients[0].contiguous()  # allocates the copy, if the gradient is not contiguous
        return input_grad, weight_grad, None  # `dims` has no gradient


def apply_rms_norm(
    inputs: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Apply RMSNorm to fake tensors as a single kernel if torch would do so on CUDA.

    torch uses a single kernel unless the dtypes of weight and inputs differ, or the inputs are in channels-last format.
    Real tensors are computed as usual. The arguments are those of `torch.rms_norm`.
    """
    is_plain = suggest_memory_format(inputs) == torch.contiguous_format
    if isinstance(inputs, FakeTensor) and is_plain and (weight is None or weight.dtype == inputs.dtype):
        return _RMSNorm.apply(inputs, weight, len(shape))  # type: ignore[no-untyped-call]
    return torch.ops.aten.rms_norm.default.decompose(inputs, shape, weight, eps)
