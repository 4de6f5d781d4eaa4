"""Trace RMSNorm on fake tensors as CUDA computes it: in a single kernel."""

from math import prod
from typing import Any

import torch

from headway.forecasting._torch import FakeTensor, suggest_memory_format


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
