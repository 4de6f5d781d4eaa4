"""Tensor-parallel styles: how a module's parameters are split, and the collectives around its forward.

A style determines the dimension along which parameters are split. All styles compute on plain local tensors. Sequence
parallelism changes the collectives at the module's input and output: see `BoundaryLayout`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from headway.layouts.tensor import crossings
from headway.layouts.tensor._torch import is_fake, is_traceable_wrapper_subclass
from headway.layouts.tensor.crossings import SplitAxis

SEQUENCE_DIM = 1
"""Sequence dimension of activations with shape (batch, sequence, features), as in transformers."""


class BoundaryLayout(Enum):
    """Layout of the activations at a split module's input and output.

    Attributes:
        PLAIN: Activations are replicated on all ranks.
        SEQUENCE: Each rank has its sequence shard.
        GATHERED: A module that contains this one has all-gathered the sequence, and sums the ranks' gradients in
            backward.
    """

    PLAIN = "plain"
    SEQUENCE = "sequence"
    GATHERED = "gathered"


@dataclass
class SplitModule:
    """Module that is split by tensor parallelism, with the state that its forward hooks share.

    Attributes:
        module: Module that is split.
        name: Name of the module in the model. For a part of a layer with adapters, the name of that layer.
        axis: Mesh axis of tensor parallelism.
        style: Style with which the module is split.
        boundary: Layout of activations at the module's input and output.
        config_values: Values from the model's configuration that the style needs, by name.
        saved_values: Values that the forward pre-hook saves for the forward hooks, by name.
    """

    module: torch.nn.Module
    name: str
    axis: SplitAxis
    style: "SplitStyle"
    boundary: BoundaryLayout = BoundaryLayout.PLAIN
    config_values: dict[str, int] = field(default_factory=dict)
    saved_values: dict[str, Any] = field(default_factory=dict)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""


class SplitStyle:
    """Base class of tensor-parallel styles. By itself, it replicates parameters and runs no collectives.

    Attributes:
        is_partial: Whether gradients of replicated parameters are terms that must be summed over the ranks.
        begins_split_region: Whether the output is sharded, so that random numbers drawn on it must differ between
            ranks.
        ends_split_region: Whether the output is replicated after a computation on sharded activations.
        is_transposed: Whether the module's weight has the shape (inputs, outputs).
        factor: Number of matrices packed along the split dimension. Each of them is split.
    """

    is_partial = False
    begins_split_region = False
    ends_split_region = False
    is_transposed = False
    factor = 1

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why this style cannot split the module across `size` ranks, or None if it can."""
        return None

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the dimension along which a parameter is sharded, or None if it is replicated.

        Args:
            key: Name of the parameter in its module.
            parameter: Parameter, of which only the number of dimensions is used.
        """
        return None

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments for the module's forward, which computes on local tensors.

        Args:
            split_module: Module that is split.
            args: Positional arguments, in the layout that the module's caller uses.
            kwargs: Keyword arguments, in the layout that the module's caller uses.
        """
        return args, kwargs

    def replace_bias(self, split_module: SplitModule) -> None:
        """Replace the module's bias for the current call with the value from `get_call_bias`.

        Do nothing if the module has no bias. `restore_module` restores the bias.
        """
        if (bias := split_module.module._parameters.get("bias")) is not None:
            split_module.saved_values["bias"] = bias
            split_module.module._parameters["bias"] = self.get_call_bias(_get_local_bias(bias), split_module.axis)  # type: ignore[assignment]

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Return the tensor that a call uses in place of a replicated bias, or None if the call uses no bias.

        Args:
            bias: Replicated bias.
            axis: Mesh axis of tensor parallelism.
        """
        return bias

    def restore_module(self, split_module: SplitModule) -> None:
        """Restore the attributes of the module that `convert_inputs` replaced.

        This method is called before `convert_output`, and also if the forward raised an error.
        """
        if (bias := split_module.saved_values.pop("bias", None)) is not None:
            split_module.module._parameters["bias"] = bias

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the module's output in the layout that the module's caller expects: sharded or full."""
        return output


def _get_local_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor of a replicated bias.

    The bias is a DTensor, or already a local tensor if `calls.py` has replaced it for this forward.
    """
    return bias.to_local() if isinstance(bias, DTensor) else bias


def change_activations(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments:
    """Return the arguments of a forward, with a function applied to the activations among them.

    The activations are the first positional argument. If there are only keyword arguments, they are `hidden_states`
    or, if that is missing, the first one.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        change: Function to apply to the activations.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _name_activations(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def omit_activations(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a forward without the activations. The forward has no positional arguments."""
    name = _name_activations(kwargs)
    return {key: value for key, value in kwargs.items() if key != name}


def _name_activations(kwargs: dict[str, Any]) -> str:
    """Return the name of the keyword argument that is the activations, or "" if there are no arguments."""
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")


class Colwise(SplitStyle):
    """Style that splits a linear layer by output features. Each rank computes some of them.

    Args:
        gathers_output: Whether the outputs are all-gathered. Default: False.
    """

    def __init__(self, gathers_output: bool = False) -> None:
        self.gathers_output = gathers_output
        self.begins_split_region = not gathers_output

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split by output features, or None if it can."""
        if self.gathers_output and is_transposed(module):
            return "it is a Conv1D, whose outputs cannot be gathered"
        return _describe_linear_misfit(module, "out_features")

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the output dimension of a parameter, along which it is sharded. No parameter is replicated (None)."""
        is_last = self.is_transposed or parameter.dim() == 1 or key.endswith("bias")
        return parameter.dim() - (1 if is_last else 2)

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with replicated activations.

        Backward sums the gradients of the activations over the ranks. If the module gets a sequence shard, the sequence
        is all-gathered, and backward reduce-scatters. If an enclosing module has already gathered it, the arguments are
        returned unchanged.
        """
        if split_module.boundary is BoundaryLayout.GATHERED:
            return args, kwargs
        if split_module.boundary is BoundaryLayout.SEQUENCE:
            return change_activations(
                args, kwargs, lambda x: crossings.gather_for_split_region(x, split_module.axis, SEQUENCE_DIM)
            )
        return change_activations(args, kwargs, lambda x: crossings.copy_to_split_region(x, split_module.axis))

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return this rank's output features or, if `gathers_output`, all output features."""
        if not self.gathers_output:
            return output
        return crossings.gather_shards(output, split_module.axis, -1, num_outputs(split_module.module))


class PackedColwise(Colwise):
    """Style for a layer that contains several packed matrices. Each matrix is split by output features.

    An example is a layer that contains the gate and up projections of an MLP.

    Args:
        factor: Number of packed matrices. Default: 2.
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the packed matrices cannot be split by output features, or None if they can."""
        if (reason := super().describe_misfit(module, size)) is not None:
            return reason
        if num_outputs(module) % (self.factor * size):
            return f"its {num_outputs(module)} outputs cannot be divided by {self.factor} x {size}"
        return None

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the output dimension of a parameter, along which it is sharded. None: the parameter is replicated.

        The bias of a transposed layer is replicated, because FSDP might shard it along its only dimension.
        """
        return None if self.is_transposed and key == "bias" else super().find_shard_dim(key, parameter)

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with replicated activations.

        Backward sums the gradients of the activations over the ranks. The bias of a transposed layer is replicated, and
        this rank's slice replaces it during the call.
        """
        if self.is_transposed:
            self.replace_bias(split_module)
        return super().convert_inputs(split_module, args, kwargs)

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
        """Return this rank's slice of the bias of each packed matrix."""
        return crossings.take_shard(bias.view(self.factor, -1), axis, 1).flatten()


class Rowwise(SplitStyle):
    """Style that splits a linear layer by input features. Each rank uses some of them, and the outputs are summed.

    Args:
        shards_input: Whether the input is replicated, so that this style has to shard it. Default: False.
    """

    ends_split_region = True

    def __init__(self, shards_input: bool = False) -> None:
        self.shards_input = shards_input

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split by input features, or None if it can."""
        return _describe_linear_misfit(module, "in_features")

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the input dimension of a weight, along which it is sharded. None for a bias, which is replicated."""
        return None if key.endswith("bias") else parameter.dim() - (2 if self.is_transposed else 1)

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with activations sharded along their features.

        Also replace the bias with the value from `get_call_bias` until the end of the call.
        """
        self.replace_bias(split_module)
        if self.shards_input:
            return change_activations(args, kwargs, lambda x: crossings.take_shard(x, split_module.axis, -1))
        return args, kwargs

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Return None, because the bias must be added only once, after the sum over the ranks.

        A transposed layer cannot compute without a bias, so it gets zeros.
        """
        return torch.zeros_like(bias, requires_grad=False) if self.is_transposed else None

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the sum of the ranks' outputs plus the bias.

        Under sequence parallelism, return only this rank's sequence shard of the result. Each rank then adds the bias
        to its shard, so backward sums the gradients of the bias over the ranks.
        """
        if split_module.boundary is BoundaryLayout.PLAIN:
            output = crossings.sum_terms(output, split_module.axis)
        else:
            output = crossings.reduce_scatter_terms(output, split_module.axis, SEQUENCE_DIM)
        bias = split_module.module._parameters.get("bias")
        if bias is None:
            return output
        local_bias = _get_local_bias(bias)
        if split_module.boundary is not BoundaryLayout.PLAIN:
            # The bias is replicated, but the output is a sequence shard. So each rank's gradient of the bias is only a term.
            local_bias = crossings.copy_to_split_region(local_bias, split_module.axis)
        return output + local_bias.to(output.dtype)


class PackedRowwise(Rowwise):
    """Style for a parameter with several matrices packed along its last dimension, each of which is split by inputs.

    It is only for parameters that a plan names directly, not for modules.
    """

    factor = 2

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str:
        """Return the reason why this style cannot split a module: it applies only to packed parameters."""
        return "it is for a packed parameter, not for a module"


class EmbeddingRowwise(SplitStyle):
    """Style that splits an embedding by rows of its weight.

    Each rank looks up the rows that it holds, and the results are summed over the ranks.
    """

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split, or None if it can.

        Only a plain embedding that has enough rows for all ranks can be split.
        """
        if (reason := _describe_embedding_misfit(module)) is not None:
            return reason
        num_rows = int(getattr(module, "num_embeddings", 0))
        rows_per_rank = -(-num_rows // size)
        if num_rows <= rows_per_rank * (size - 1):  # the last rank would have no row
            return f"its {num_rows} rows are too few for {size} ranks"
        return None

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int:
        """Return 0, the row dimension of the embedding's weight, along which it is sharded."""
        return 0

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with token IDs relative to this rank's first row.

        IDs whose rows are on other ranks become 0. An ID that the embedding does not have stays out of range, so that the
        lookup raises an error on all ranks, as on a single process.
        """
        module: Any = split_module.module
        rows_per_rank = -(-module.num_embeddings // split_module.axis.size)
        start = rows_per_rank * split_module.axis.rank
        stop = min(start + rows_per_rank, module.num_embeddings)
        if (padding := module.padding_idx) is not None:
            split_module.saved_values["padding"] = padding
            module.padding_idx = padding - start if start <= padding < stop else None

        def make_ids_local(ids: torch.Tensor) -> torch.Tensor:
            is_before, is_after = (ids >= 0) & (ids < start), (ids >= stop) & (ids < module.num_embeddings)
            is_elsewhere = is_before | is_after
            split_module.saved_values["is_elsewhere"] = is_elsewhere
            local_ids: torch.Tensor = (ids - start).masked_fill(is_elsewhere, 0)
            return local_ids

        return change_activations(args, kwargs, make_ids_local)

    def restore_module(self, split_module: SplitModule) -> None:
        """Restore the embedding's padding index, which `convert_inputs` has replaced."""
        if (padding := split_module.saved_values.pop("padding", None)) is not None:
            split_module.module.padding_idx = padding

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the embeddings of all tokens, summed over the ranks.

        A rank contributes zeros for tokens whose embeddings other ranks hold.
        """
        is_elsewhere = split_module.saved_values.pop("is_elsewhere")
        term = output.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return crossings.sum_terms(term, split_module.axis)


class EmbeddingColwise(SplitStyle):
    """Style that splits an embedding by columns of its weight.

    Each rank looks up some features of every token, and the results are concatenated.
    """

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split, or None if it is a plain embedding."""
        return _describe_embedding_misfit(module)

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int:
        """Return 1, the column dimension of the embedding's weight, along which it is sharded."""
        return 1

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the full embedding vectors, all-gathered over the ranks along the last dimension."""
        return crossings.gather_shards(output, split_module.axis, -1, int(split_module.module.embedding_dim))  # type: ignore[arg-type]


class PartialGradients(SplitStyle):
    """Style of a module whose replicated parameters act on a shard of the activations, such as a norm over each head.

    Gradients of the parameters are summed over the ranks.
    """

    is_partial = True


class Experts(SplitStyle):
    """Style of a module of experts. Each rank computes one term of the output, and the terms are summed over the ranks.

    Inputs and routing weights are replicated on all ranks.
    """

    ends_split_region = True

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments unchanged.

        Backward sums the gradients of all floating-point tensors among them over the ranks.
        """

        def sum_gradient_of(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return crossings.copy_to_split_region(value, split_module.axis) if is_float else value

        return (
            tuple(sum_gradient_of(value) for value in args),
            {name: sum_gradient_of(value) for name, value in kwargs.items()},
        )

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the sum of the experts' outputs over the ranks."""
        return None if output is None else crossings.sum_terms(output, split_module.axis)


class IdentityExpert(SplitStyle):
    """Style of an expert that returns its input unchanged.

    Outputs are summed over the ranks, so the input is divided by the number of ranks.
    """

    def convert_inputs(self, split_module: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with the activations divided by the number of ranks, whose outputs are summed later."""
        return change_activations(args, kwargs, lambda x: x / split_module.axis.size)


class LatentKeys(SplitStyle):
    """Style of DeepSeek's joint key-value projection, whose output has a rotary part that all heads of all ranks use.

    Only the other part of the output passes through the next projection.
    """

    def convert_output(self, split_module: SplitModule, output: Any) -> Any:
        """Return the output with its values unchanged.

        Backward sums the gradient of the output's rotary part over the ranks.
        """
        num_rotary = split_module.config_values["qk_rope_head_dim"]
        latent, rotary_keys = output.split([output.shape[-1] - num_rotary, num_rotary], dim=-1)
        return torch.cat([latent, crossings.copy_to_split_region(rotary_keys, split_module.axis)], dim=-1)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether the module is transformers' `Conv1D`, a linear layer whose weight has the shape (inputs, outputs).

    GPT-2 uses such layers.
    """
    return isinstance(getattr(module, "nf", None), int) and isinstance(getattr(module, "nx", None), int)


def num_outputs(module: torch.nn.Module) -> int:
    """Return the number of output features of a linear layer, or of a transposed one (`Conv1D`)."""
    return int(module.nf if is_transposed(module) else module.out_features)  # type: ignore[arg-type]


def num_inputs(module: torch.nn.Module) -> int:
    """Return the number of input features of a linear layer, or of a transposed one (`Conv1D`)."""
    return int(module.nx if is_transposed(module) else module.in_features)  # type: ignore[arg-type]


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether the weight of a layer is quantized, by bitsandbytes or torchao. False for DTensors and fake tensors."""
    weight = module._parameters.get("weight")
    if weight is None or is_fake(weight) or isinstance(weight, DTensor):
        return False
    is_bitsandbytes = type(weight).__module__.partition(".")[0] == "bitsandbytes"
    return is_bitsandbytes or is_traceable_wrapper_subclass(weight)


def _describe_linear_misfit(module: torch.nn.Module, size_attribute: str) -> str | None:
    """Return the reason why a module is not a linear layer that can be split, or None if it is.

    Args:
        module: Module to split.
        size_attribute: "in_features" or "out_features", whichever is split.
    """
    if not is_transposed(module) and not isinstance(getattr(module, size_attribute, None), int):
        return f"it is not a linear layer ({size_attribute} is missing)"
    if not isinstance(module._parameters.get("weight"), torch.nn.Parameter):
        return "its weight is not a parameter (it is computed, or quantized)"
    return None


def _describe_embedding_misfit(module: torch.nn.Module) -> str | None:
    """Return the reason why a module is not a plain embedding, or None if it is."""
    if not isinstance(module, torch.nn.Embedding):
        return "it is not a torch.nn.Embedding"
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            return f"it has {option}={getattr(module, option)!r}, which needs all rows"
    return None


def make_style(name: str, module: torch.nn.Module | None = None) -> SplitStyle:
    """Return a new style object for a module.

    Args:
        name: Name of the style, one of `config.parallelism.STYLES`.
        module: Module to split; None for a parameter that the plan names directly. Default: None.
    """
    factories: dict[str, Callable[[], SplitStyle]] = {
        "colwise": Colwise,
        "colwise_gather_output": lambda: Colwise(gathers_output=True),
        "colwise_rep": lambda: Colwise(gathers_output=True),
        "rowwise": Rowwise,
        "rowwise_split_input": lambda: Rowwise(shards_input=True),
        "rowwise_rep": lambda: Rowwise(shards_input=True),
        "embedding_rowwise": EmbeddingRowwise,
        "embedding_colwise": EmbeddingColwise,
        "packed_colwise": PackedColwise,
        "packed_qkv_colwise": lambda: PackedColwise(factor=3),
        "packed_rowwise": PackedRowwise,
        "sequence_parallel": PartialGradients,
        "replicated_with_grad_allreduce": PartialGradients,
        "mla_kv_a_proj": LatentKeys,
        "all_reduce": Experts,
        "moe_tp_experts": Experts,
        "moe_identity_expert": IdentityExpert,
        "local_params": SplitStyle,
        "replicate": SplitStyle,
    }
    style = factories[name]()
    style.is_transposed = module is not None and is_transposed(module)
    return style
