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
        name: Name of the module in the model.
        axis: Mesh axis of tensor parallelism.
        style: Style with which the module is split.
        crossing: Layout of activations at the module's input and output.
        facts: Values from the model's configuration that the style needs, by name.
        held: Values that the forward pre-hook saves for the forward hooks, by name.
    """

    module: torch.nn.Module
    name: str
    axis: SplitAxis
    style: "SplitStyle"
    crossing: BoundaryLayout = BoundaryLayout.PLAIN
    facts: dict[str, int] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""


class SplitStyle:
    """Base class of tensor-parallel styles. By itself, it replicates parameters and runs no collectives.

    Attributes:
        is_partial: Whether gradients of replicated parameters are terms that must be summed over the ranks.
        opens: Whether the output is sharded, so that random numbers drawn on it must differ between ranks.
        closes: Whether the output is replicated after a computation on sharded activations.
        is_transposed: Whether the module's weight has the shape (inputs, outputs).
        factor: Number of matrices packed along the split dimension. Each of them is split.
    """

    is_partial = False
    opens = False
    closes = False
    is_transposed = False

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

    factor = 1
    """Number of matrices packed along the split dimension. Each of them is split."""

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments for the module's forward, which computes on local tensors.

        Args:
            site: Module that is split.
            args: Positional arguments, in the layout that the module's caller uses.
            kwargs: Keyword arguments, in the layout that the module's caller uses.
        """
        return args, kwargs

    def lend_bias(self, site: SplitModule) -> None:
        """Replace the module's bias for the current call with the value from `get_call_bias`.

        Do nothing if the module has no bias. `restore_module` puts the bias back.
        """
        if (bias := site.module._parameters.get("bias")) is not None:
            site.held["bias"] = bias
            site.module._parameters["bias"] = self.get_call_bias(_get_local_bias(bias), site.axis)  # type: ignore[assignment]

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Return the tensor that a call uses in place of a replicated bias, or None if the call uses no bias.

        Args:
            bias: Replicated bias.
            axis: Mesh axis of tensor parallelism.
        """
        return bias

    def restore_module(self, site: SplitModule) -> None:
        """Restore the attributes of the module that `convert_inputs` replaced.

        This method is called before `convert_output`, and also if the forward raised an error.
        """
        if (bias := site.held.pop("bias", None)) is not None:
            site.module._parameters["bias"] = bias

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the module's output in the layout that the module's caller expects: sharded or full."""
        return output


def _get_local_bias(bias: torch.Tensor) -> torch.Tensor:
    return bias.to_local() if isinstance(bias, DTensor) else bias  # isinstance, which TorchDynamo can trace


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
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


class Colwise(SplitStyle):
    """Style that splits a linear layer by output features. Each rank computes some of them.

    Args:
        is_gathered: Whether the outputs are all-gathered. Default: False.
    """

    def __init__(self, is_gathered: bool = False) -> None:
        self.is_gathered = is_gathered
        self.opens = not is_gathered

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split by output features, or None if it can."""
        if self.is_gathered and is_transposed(module):
            return "it is a Conv1D, whose outputs cannot be gathered"
        return _linear_misfit(module, "out_features")

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the output dimension of a parameter, along which it is sharded."""
        is_last = self.is_transposed or parameter.dim() == 1 or key.endswith("bias")
        return parameter.dim() - (1 if is_last else 2)

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with replicated activations.

        Backward sums the gradients of the activations over the ranks. If the module gets a sequence shard, the sequence
        is all-gathered, and backward reduce-scatters. If an enclosing module has already gathered it, the arguments are
        returned unchanged.
        """
        if site.crossing is BoundaryLayout.GATHERED:
            return args, kwargs
        if site.crossing is BoundaryLayout.SEQUENCE:
            return change_activations(args, kwargs, lambda x: crossings.join_for_terms(x, site.axis, SEQUENCE_DIM))
        return change_activations(args, kwargs, lambda x: crossings.copy_to_split_region(x, site.axis))

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return this rank's output features or, if `is_gathered`, all output features."""
        return crossings.join(output, site.axis, -1, num_outputs(site.module)) if self.is_gathered else output


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
        if (found := super().describe_misfit(module, size)) is not None or num_outputs(module) % (
            self.factor * size
        ) == 0:
            return found
        return f"its {num_outputs(module)} outputs cannot be divided by {self.factor} x {size}"

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the output dimension of a parameter, along which it is sharded. None: the parameter is replicated.

        The bias of a transposed layer is replicated, because FSDP might shard it along its only dimension.
        """
        return None if self.is_transposed and key == "bias" else super().find_shard_dim(key, parameter)

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with replicated activations.

        Backward sums the gradients of the activations over the ranks. The bias of a transposed layer is replicated, and
        this rank's slice replaces it during the call.
        """
        if self.is_transposed:
            self.lend_bias(site)
        return super().convert_inputs(site, args, kwargs)

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Return this rank's slice of the bias of each packed matrix."""
        return crossings.take_part(bias.view(self.factor, -1), axis, 1).flatten()


class Rowwise(SplitStyle):
    """Style that splits a linear layer by input features. Each rank uses some of them, and the outputs are summed.

    Args:
        is_split: Whether the input is replicated, so that this style has to shard it. Default: False.
    """

    closes = True

    def __init__(self, is_split: bool = False) -> None:
        self.is_split = is_split

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split by input features, or None if it can."""
        return _linear_misfit(module, "in_features")

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return the input dimension of a weight, along which it is sharded. None for a bias, which is replicated."""
        return None if key.endswith("bias") else parameter.dim() - (2 if self.is_transposed else 1)

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with activations sharded along their features.

        Also replace the bias with the value from `get_call_bias` until the end of the call.
        """
        self.lend_bias(site)
        if self.is_split:
            return change_activations(args, kwargs, lambda x: crossings.take_part(x, site.axis, -1))
        return args, kwargs

    def get_call_bias(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Return None, because the bias must be added only once, after the sum over the ranks.

        A transposed layer cannot compute without a bias, so it gets zeros.
        """
        return torch.zeros_like(bias, requires_grad=False) if self.is_transposed else None

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the sum of the ranks' outputs plus the bias.

        Under sequence parallelism, return only this rank's sequence shard of the result.
        """
        if site.crossing is BoundaryLayout.PLAIN:
            output = crossings.sum_terms(output, site.axis)
        else:
            output = crossings.reduce_scatter_terms(output, site.axis, SEQUENCE_DIM)
        bias = site.module._parameters.get("bias")
        if bias is None:
            return output
        local = _get_local_bias(bias)
        if site.crossing is not BoundaryLayout.PLAIN:
            local = crossings.copy_to_split_region(local, site.axis)
        return output + local.to(output.dtype)


class PackedRowwise(Rowwise):
    """Style for a parameter with several matrices packed along its last dimension, each of which is split by inputs.

    It is only for parameters that a plan names directly, not for modules.
    """

    factor = 2

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
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
        found = _embedding_misfit(module)
        num_rows = int(getattr(module, "num_embeddings", 0))
        if found is None and num_rows <= -(-num_rows // size) * (size - 1):
            return f"its {num_rows} rows are too few for {size} ranks"
        return found

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return 0, the row dimension of the embedding's weight, along which it is sharded."""
        return 0

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with token IDs relative to this rank's first row.

        IDs whose rows are on other ranks become 0. An ID that the embedding does not have stays out of range, so that the
        lookup raises an error on all ranks, as on a single process.
        """
        module: Any = site.module
        step = -(-module.num_embeddings // site.axis.size)
        first = step * site.axis.rank
        last = min(first + step, module.num_embeddings)
        if (padding := module.padding_idx) is not None:
            site.held["padding"] = padding
            module.padding_idx = padding - first if first <= padding < last else None

        def make_ids_local(ids: torch.Tensor) -> torch.Tensor:
            before, after = (ids >= 0) & (ids < first), (ids >= last) & (ids < module.num_embeddings)
            elsewhere = site.held["elsewhere"] = before | after
            found: torch.Tensor = (ids - first).masked_fill(elsewhere, 0)
            return found

        return change_activations(args, kwargs, make_ids_local)

    def restore_module(self, site: SplitModule) -> None:
        """Restore the embedding's padding index, which `convert_inputs` has replaced."""
        if (padding := site.held.pop("padding", None)) is not None:
            site.module.padding_idx = padding

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the embeddings of all tokens, summed over the ranks.

        A rank contributes zeros for tokens whose embeddings other ranks hold.
        """
        return crossings.sum_terms(output.masked_fill(site.held.pop("elsewhere").unsqueeze(-1), 0), site.axis)


class EmbeddingColwise(SplitStyle):
    """Style that splits an embedding by columns of its weight.

    Each rank looks up some features of every token, and the results are concatenated.
    """

    def describe_misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Return the reason why the module cannot be split, or None if it is a plain embedding."""
        return _embedding_misfit(module)

    def find_shard_dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Return 1, the column dimension of the embedding's weight, along which it is sharded."""
        return 1

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the full embedding vectors, all-gathered over the ranks along the last dimension."""
        return crossings.join(output, site.axis, -1, int(site.module.embedding_dim))  # type: ignore[arg-type]


class PartialGradients(SplitStyle):
    """Style of a module whose replicated parameters act on a shard of the activations, such as a norm over each head.

    Gradients of the parameters are summed over the ranks.
    """

    is_partial = True


class Experts(SplitStyle):
    """Style of a module of experts. Each rank computes one term of the output, and the terms are summed over the ranks.

    Inputs and routing weights are replicated on all ranks.
    """

    closes = True

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments unchanged.

        Backward sums the gradients of all floating-point tensors among them over the ranks.
        """

        def spread_inputs(x: Any) -> Any:
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            return crossings.copy_to_split_region(x, site.axis) if is_float else x

        return tuple(spread_inputs(x) for x in args), {name: spread_inputs(x) for name, x in kwargs.items()}

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the sum of the experts' outputs over the ranks."""
        return None if output is None else crossings.sum_terms(output, site.axis)


class IdentityExpert(SplitStyle):
    """Style of an expert that returns its input unchanged.

    Outputs are summed over the ranks, so the input is divided by the number of ranks.
    """

    def convert_inputs(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with the activations divided by the number of ranks, whose outputs are summed later."""
        return change_activations(args, kwargs, lambda x: x / site.axis.size)


class LatentKeys(SplitStyle):
    """Style of DeepSeek's joint key-value projection, whose output has a rotary part that all heads of all ranks use.

    Only the other part of the output passes through the next projection.
    """

    def convert_output(self, site: SplitModule, output: Any) -> Any:
        """Return the output with its values unchanged.

        Backward sums the gradient of the output's rotary part over the ranks.
        """
        rotary = site.facts["qk_rope_head_dim"]
        latent, keys = output.split([output.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([latent, crossings.copy_to_split_region(keys, site.axis)], dim=-1)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether the module is transformers' `Conv1D`, a linear layer whose weight has the shape (inputs, outputs).

    GPT-2 uses such layers.
    """
    return isinstance(getattr(module, "nf", None), int) and isinstance(getattr(module, "nx", None), int)


def num_outputs(module: torch.nn.Module) -> int:
    """Return the number of output features of a linear layer."""
    return int(module.nf if is_transposed(module) else module.out_features)  # type: ignore[arg-type]


def num_inputs(module: torch.nn.Module) -> int:
    """Return the number of input features of a linear layer."""
    return int(module.nx if is_transposed(module) else module.in_features)  # type: ignore[arg-type]


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether the weight of a layer is quantized, by bitsandbytes or torchao."""
    weight = module._parameters.get("weight")
    if weight is None or is_fake(weight) or isinstance(weight, DTensor):
        return False
    is_bitsandbytes = type(weight).__module__.partition(".")[0] == "bitsandbytes"
    return is_bitsandbytes or is_traceable_wrapper_subclass(weight)


def _linear_misfit(module: torch.nn.Module, size: str) -> str | None:
    if not is_transposed(module) and not isinstance(getattr(module, size, None), int):
        return f"it is not a linear layer ({size} is missing)"
    if not isinstance(module._parameters.get("weight"), torch.nn.Parameter):
        return "its weight is not a parameter (it is computed, or quantized)"
    return None


def _embedding_misfit(module: torch.nn.Module) -> str | None:
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
    known: dict[str, Callable[[], SplitStyle]] = {
        "colwise": Colwise,
        "colwise_gather_output": lambda: Colwise(is_gathered=True),
        "colwise_rep": lambda: Colwise(is_gathered=True),
        "rowwise": Rowwise,
        "rowwise_split_input": lambda: Rowwise(is_split=True),
        "rowwise_rep": lambda: Rowwise(is_split=True),
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
    made = known[name]()
    made.is_transposed = module is not None and is_transposed(module)
    return made
