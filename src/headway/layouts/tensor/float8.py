"""Float8 linear layers of torchao whose matrices are split across ranks, with scales of full tensors.

A scale is the largest value of float8 divided by the largest absolute value of a tensor, or of one of its rows. If the
ranks have parts of that tensor or row, the largest absolute value is all-reduced before the scale is computed. All
ranks then round their parts as one process would round the full matrix. The difference that remains is that of tensor
parallelism in bfloat16: ranks add rounded terms of a matrix product.

The computation is that of torchao's `Float8Linear`, which has no hook for such a reduction. This module imports torchao,
so it must be imported only in runs with float8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from headway.layouts.tensor._torch import functional_collectives

FIRST, LAST = 0, -1
"""Dimensions of a matrix, as torchao numbers them."""


@dataclass(frozen=True)
class LayerSplit:
    """How a linear layer's matrix is split across the ranks of tensor parallelism.

    Attributes:
        dim: Dimension of the weight that is split. 0: each rank has some outputs. 1: each rank has some inputs.
        size: Number of ranks.
        group: Name of the ranks' process group.
    """

    dim: int
    size: int
    group: str

    def explain_misfit(self, layer: torch.nn.Linear, multiple: int) -> str | None:
        """Return the reason why a rank cannot multiply its part of the matrix in float8, or None if it can.

        Args:
            layer: Linear layer with its full matrix.
            multiple: Number that must divide the sizes of a matrix in float8.
        """
        is_even = layer.weight.shape[self.dim] % (multiple * self.size) == 0
        return None if is_even else f"sizes per rank that are no multiples of {multiple}"


class SplitFloat8Linear(Float8Linear):
    """torchao's float8 linear layer, for a rank that has a part of the matrix.

    Attributes:
        split: How the matrix is split.
    """

    split: LayerSplit

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in torch.nn.Linear
        """Return this rank's outputs, or partial sums of all outputs if the matrix is split along its inputs.

        Args:
            input: Tensor of shape (..., inputs), with only this rank's inputs if the matrix is split along them.
        """
        if torch.is_autocast_enabled(input.device.type):
            inputs = input.to(torch.get_autocast_dtype(input.device.type))
        else:
            inputs = input
        output: torch.Tensor = _SplitMatmul.apply(  # type: ignore[no-untyped-call]
            inputs, self.weight.t(), self.linear_mm_config, self.config, self.split.dim, self.split.group
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def split_layer(layer: torch.nn.Module, split: LayerSplit) -> None:
    """Change a converted layer in place, so that it computes scales over the full tensors whose shards it has.

    Args:
        layer: torchao's `Float8Linear`.
        split: How the layer's matrix is split, or will be split.
    """
    layer.__class__ = SplitFloat8Linear
    layer.split = split  # type: ignore[assignment]


@torch.compiler.allow_in_graph
class _SplitMatmul(torch.autograd.Function):
    """Product of inputs and a transposed weight in float8, as torchao's `matmul_with_hp_or_float8_args` computes it."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight_t: torch.Tensor, products: Any, config: Any, split_dim: int, group: str
    ) -> torch.Tensor:
        """Return the product of inputs and weight, computed in float8. Scales are equal on all ranks.

        Args:
            ctx: Context of torch's autograd.
            inputs: Inputs of shape (..., features), on this rank.
            weight_t: This rank's shard of the transposed weight, of shape (inputs, outputs).
            products: torchao's configuration of the three matrix products.
            config: torchao's configuration of float8.
            split_dim: Dimension along which the weight is split: 0 (output features) or 1 (input features).
            group: Name of the process group of tensor parallelism.
        """
        ctx.products, ctx.config, ctx.split_dim, ctx.group = products, config, split_dim, group
        rounding = _Rounding(config, products, group)
        flat = inputs.reshape(-1, inputs.shape[-1])
        # The dimension along which ranks have parts of each tensor, or None. The weight is transposed: (inputs, outputs).
        input_split, weight_split = (None, LAST) if split_dim == 0 else (LAST, FIRST)
        # Names that end with 8 are in float8. `..._largest` is the largest absolute value of the full tensor.
        flat8, input_largest = rounding.convert(flat, config.cast_config_input, GemmInputRole.INPUT, LAST, input_split)
        weight8, weight_largest = rounding.convert(
            weight_t, config.cast_config_weight, GemmInputRole.WEIGHT, FIRST, weight_split
        )
        # Backward converts the same tensors again. With the largest values, it needs no second reduction of them.
        ctx.save_for_backward(inputs, weight_t, input_largest, weight_largest)
        output = torch.mm(flat8, weight8)
        return output.reshape(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradients of inputs and transposed weight, computed in float8.

        Args:
            ctx: Context of torch's autograd.
            grad_output: Gradient of the output.
        """
        inputs, weight_t, input_largest, weight_largest = ctx.saved_tensors
        config, roles = ctx.config, GemmInputRole
        rounding = _Rounding(config, ctx.products, ctx.group)
        input_split, weight_split, grad_split = (None, LAST, LAST) if ctx.split_dim == 0 else (LAST, FIRST, None)
        flat, grad = inputs.reshape(-1, inputs.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])

        grad8, grad_largest = rounding.convert(
            grad, config.cast_config_grad_output, roles.GRAD_OUTPUT, LAST, grad_split
        )
        weight8, _ = rounding.convert(
            weight_t, config.cast_config_weight_for_grad_input, roles.WEIGHT, LAST, weight_split, weight_largest
        )
        grad_input = torch.mm(grad8, weight8.t()).reshape(*grad_output.shape[:-1], -1)

        grad8, _ = rounding.convert(
            grad, config.cast_config_grad_output_for_grad_weight, roles.GRAD_OUTPUT, FIRST, grad_split, grad_largest
        )
        flat8, _ = rounding.convert(
            flat, config.cast_config_input_for_grad_weight, roles.INPUT, FIRST, input_split, input_largest
        )
        grad_weight = torch.mm(grad8.t(), flat8)
        return grad_input, grad_weight.t(), None, None, None, None


@dataclass(frozen=True)
class _Rounding:
    """Conversion of matrices to float8, with scales that all ranks of a group share.

    Attributes:
        config: torchao's configuration of the layer.
        products: torchao's configuration of the layer's three matrix products.
        group: Name of the ranks' process group.
    """

    config: Any
    products: Any
    group: str

    def convert(
        self,
        tensor: torch.Tensor,
        cast: Any,
        role: Any,
        dim: int,
        split: int | None,
        largest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convert a matrix to float8, and return it with its largest absolute value.

        The second value is None if each row has its own scale. A matrix that is already in float8, or whose conversion
        is disabled, is returned unchanged with None.

        Args:
            tensor: This rank's part of a matrix, or the full matrix.
            cast: torchao's configuration of the conversion.
            role: Role of the matrix in the layer's matrix products.
            dim: Dimension along which values share a scale, if each row has its own scale.
            split: Dimension along which ranks have parts of the matrix, or None if all have the full matrix.
            largest: Largest absolute value that an earlier conversion of the matrix returned. None: it is computed.
        """
        if tensor_already_casted_to_fp8(tensor) or cast.scaling_type is ScalingType.DISABLED:
            return tensor, None
        is_tensorwise = cast.scaling_granularity is ScalingGranularity.TENSORWISE
        row_dim = None if is_tensorwise else dim
        if largest is None or not is_tensorwise:
            # Rows are split only if the matrix is split along the dimension over which a row extends.
            is_split = split is not None and (is_tensorwise or split == dim)
            largest = self._find_largest(tensor, cast, row_dim, is_split)
        scale = amax_to_scale(largest, cast.target_dtype, self.config.round_scales_to_power_of_2)
        converted = hp_tensor_and_scale_to_float8(tensor, scale, cast.target_dtype, self.products, role, row_dim)
        return converted, largest if is_tensorwise else None

    def _find_largest(self, tensor: torch.Tensor, cast: Any, row_dim: int | None, is_split: bool) -> torch.Tensor:
        """Return the largest absolute value of a matrix, or of each of its rows.

        Args:
            tensor: This rank's part of a matrix, or the full matrix.
            cast: torchao's configuration of the conversion to float8.
            row_dim: Dimension over which a row extends. None: return one value for the full matrix.
            is_split: Whether ranks have parts of the matrix, or of each row, so that the values must be reduced.
        """
        largest: torch.Tensor = tensor_to_amax(
            tensor, scaling_granularity=cast.scaling_granularity, axiswise_dim=row_dim
        )
        if is_split:
            largest = functional_collectives.all_reduce(largest.contiguous(), "max", self.group)
            largest = functional_collectives.wait_tensor(largest)
        return largest
