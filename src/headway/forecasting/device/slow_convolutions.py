"""Compute the scratch memory of convolutions that CUDA computes as matrix products, because cuDNN has no kernel for them."""

from math import prod
from typing import Any

import torch

from headway.forecasting.device.copies import Sizes, make_copy_rule

_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Index of the `input` argument of each convolution operation.

The weight, the bias or its size, the strides, paddings and dilations, whether the convolution is transposed, the output
paddings and the number of groups follow it.
"""


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
        lambda args: make_copy_rule(*range(input_index + 1))(args) if is_slow_convolution(name, args) else [],
        list_column_sizes,
    )


SLOW_BEFORE, SLOW_AFTER = ({name: _make_slow_rules(name)[index] for name in _CONVOLUTIONS} for index in (0, 1))
"""Rules for the scratch memory that slow convolutions allocate before and after their results, by operation."""
