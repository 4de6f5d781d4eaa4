"""Copies that CUDA's kernels make of what does not lie as they read it, while they run; and RMSNorm, which is one kernel there.

Most kernels take any strides. Norms, softmax, pooling and some others first copy an argument that is not contiguous, such as a
gradient that comes through a transpose: `expect_contiguous()` and `contiguous()` in `aten/src/ATen/native`. Which arguments, and
whether before or after the results, was read from the history of torch's allocator.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

Sizes = Callable[[tuple[Any, ...]], list[int]]


def _copies(*places: int, like: int | None = None) -> Sizes:
    """Bytes of those of these arguments that are not contiguous.

    Args:
        places: of the arguments.
        like: of the argument in whose memory format images are to lie, channels last or not; None: contiguous, whatever they are.
    """

    def sizes(args: tuple[Any, ...]) -> list[int]:
        wanted = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        return [args[each].nbytes for each in places if not args[each].is_contiguous(memory_format=wanted)]

    return sizes


COPIES_BEFORE: dict[str, Sizes] = {
    "aten::native_layer_norm": _copies(0),
    "aten::native_layer_norm_backward": _copies(1),
    "aten::native_group_norm_backward": _copies(0, 1),
    "aten::_cdist_forward": _copies(0, 1),
    "aten::_cdist_backward": _copies(1, 2),
    "aten::_adaptive_avg_pool2d": _copies(0, like=0),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::median"), _copies(0)),
    "aten::roll": lambda args: (
        [args[0].nbytes] if len(args) < 3 or len(args[2]) > 1 else _copies(0)(args)
    ),  # one by one
}
"""Bytes asked for before the results, by operation."""

COPIES_AFTER: dict[str, Sizes] = {
    **{f"aten::{name}": _copies(0) for name in ("_softmax", "_log_softmax", "_log_softmax_backward_data")},
    **{f"aten::{name}": _copies(0) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "topk")},
    **{f"aten::{name}": _copies(0) for name in ("native_group_norm", "native_layer_norm_backward", "im2col", "col2im")},
    **{f"aten::reflection_pad{dims}d{way}": _copies(0) for dims in (1, 2) for way in ("", "_backward")},
    **{f"aten::upsample_{each}_backward": _copies(0) for each in ("nearest1d", "linear1d", "nearest3d", "trilinear3d")},
    **{
        f"aten::_upsample_{each}2d_aa{way}": _copies(0) for each in ("bilinear", "bicubic") for way in ("", "_backward")
    },
    **{f"aten::{name}_pool3d_backward": _copies(0) for name in ("avg", "_adaptive_avg")},
    **{f"aten::{name}": _copies(0) for name in ("adaptive_max_pool2d", "adaptive_max_pool2d_backward")},
    "aten::max_pool3d_with_indices_backward": _copies(0),
    **{f"aten::upsample_{each}2d_backward": _copies(0, like=0) for each in ("nearest", "bilinear", "bicubic")},
    **{f"aten::{each}": _copies(0, like=0) for each in ("upsample_nearest2d", "max_pool2d_with_indices", "avg_pool2d")},
    **{f"aten::{each}_backward": _copies(1, 0, like=1) for each in ("max_pool2d_with_indices", "avg_pool2d")},
    "aten::_adaptive_avg_pool2d_backward": _copies(0, like=0),
}
"""Bytes asked for after the results, by operation."""


_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Where their inputs are among their arguments: weights, a bias or its size, strides, paddings and the rest follow."""


def is_slow(name: str, args: tuple[Any, ...]) -> bool:
    """Is it a convolution in bfloat16 that torch computes as a product of matrices, below capability 8.0 as cuDNN has none there?

    Depthwise ones have kernels of their own (`select_conv_backend` in `aten/src/ATen/native/Convolution.cpp`).
    """
    given = args[_CONVOLUTIONS[name] :] if name in _CONVOLUTIONS else ()
    return bool(given) and given[0].dtype is torch.bfloat16 and given[8] == 1


def _slow(name: str) -> tuple[Sizes, Sizes]:
    """Before its results, copies of what is not contiguous; after them, all that one sample's places are made of (im2col)."""
    first = _CONVOLUTIONS[name]

    def columns(args: tuple[Any, ...]) -> list[int]:
        inputs, weight, _, strides, paddings, dilations, is_transposed = args[first : first + 7]
        widths, places = weight.shape[2:], inputs.shape[2:]
        if not is_slow(name, args) or (not first and prod((*widths, *strides)) == 1 and not any(paddings)):
            return []
        if not is_transposed:
            each = zip(places, widths, strides, paddings, dilations)
            places = [(size + 2 * pad - apart * (wide - 1) - 1) // step + 1 for size, wide, step, pad, apart in each]
        return [weight.numel() // len(weight) * prod(places) * 2]

    return lambda args: _copies(*range(first + 1))(args) if is_slow(name, args) else [], columns


SLOW_BEFORE, SLOW_AFTER = ({name: _slow(name)[index] for name in _CONVOLUTIONS} for index in (0, 1))
"""The same of convolutions below capability 8.0."""


class _RMSNorm(torch.autograd.Function):
    """What `_fused_rms_norm` of fake tensors asks for and keeps; a CPU has no such kernel."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Of so many last dimensions; the roots are kept in float32."""
        rows = inputs.contiguous()
        result = torch.empty_like(rows)
        roots = rows.new_empty(prod(rows.shape[:-dims]), dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, roots)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients of inputs and weight."""
        inputs, weight, _ = ctx.saved_tensors
        rows = inputs.contiguous()
        found = torch.empty_like(rows), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None
        gradients[0].contiguous()
        return found


def rms_norm(
    inputs: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """One kernel where torch's `rms_norm` takes it on CUDA: weights of the inputs' dtype, and no channels that come last."""
    is_plain = suggest_memory_format(inputs) == torch.contiguous_format
    if isinstance(inputs, FakeTensor) and is_plain and (weight is None or weight.dtype == inputs.dtype):
        return _RMSNorm.apply(inputs, weight, len(shape))  # type: ignore[no-untyped-call]
    return torch.ops.aten.rms_norm.default.decompose(inputs, shape, weight, eps)
