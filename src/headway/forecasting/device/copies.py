"""Compute the scratch memory of the copies that CUDA kernels make of arguments that are not contiguous.

Most kernels accept any strides. Norms, softmax, pooling and some others first copy an argument that is not contiguous,
such as the gradient of a transposed tensor (`expect_contiguous()` and `contiguous()` in `aten/src/ATen/native`). The
memory history that torch's allocator can record shows which arguments are copied, and whether before or after the
results are allocated.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.forecasting._torch import suggest_memory_format

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


def make_copy_rule(*indices: int, like: int | None = None) -> Sizes:
    """Return a rule for the sizes of the copies that an operation makes of arguments with unsuitable strides.

    Args:
        indices: Indices of the arguments that are copied if their strides are unsuitable.
        like: Index of the argument whose memory format the copied arguments must have: contiguous or channels last.
            None (the default): the arguments must be contiguous.
    """

    def list_copy_sizes(args: tuple[Any, ...]) -> list[int]:
        memory_format = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        return [args[each].nbytes for each in indices if not args[each].is_contiguous(memory_format=memory_format)]

    return list_copy_sizes


COPIES_BEFORE: dict[str, Sizes] = {
    "aten::native_layer_norm": make_copy_rule(0),
    "aten::native_layer_norm_backward": make_copy_rule(1),
    "aten::native_group_norm_backward": make_copy_rule(0, 1),
    "aten::_cdist_forward": make_copy_rule(0, 1),
    "aten::_cdist_backward": make_copy_rule(1, 2),
    "aten::_adaptive_avg_pool2d": make_copy_rule(0, like=0),
    **dict.fromkeys(("aten::_adaptive_avg_pool3d", "aten::median"), make_copy_rule(0)),
    "aten::roll": lambda args: (
        [args[0].nbytes] if len(args) < 3 or len(args[2]) > 1 else make_copy_rule(0)(args)
    ),  # several dimensions are rolled one after the other
}
"""Rules for the argument copies that an operation allocates before its results, by operation."""


COPIES_AFTER: dict[str, Sizes] = {
    **{f"aten::{name}": make_copy_rule(0) for name in _COPIED_AFTER},
    **{f"aten::upsample_{each}2d_backward": make_copy_rule(0, like=0) for each in ("nearest", "bilinear", "bicubic")},
    **{
        f"aten::{each}": make_copy_rule(0, like=0)
        for each in ("upsample_nearest2d", "max_pool2d_with_indices", "avg_pool2d")
    },
    **{f"aten::{each}_backward": make_copy_rule(1, 0, like=1) for each in ("max_pool2d_with_indices", "avg_pool2d")},
    "aten::_adaptive_avg_pool2d_backward": make_copy_rule(0, like=0),
}
"""Rules for the argument copies that an operation allocates after its results, by operation."""
