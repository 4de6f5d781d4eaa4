"""The ways to split one module: which dimension of its parameters, and which collectives run at its input and output.

All compute on plain local tensors. Sequence parallel changes two crossings: see `BoundaryLayout`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from headway.strategies.tensor import crossings
from headway.strategies.tensor.crossings import SplitAxis

SEQUENCE_DIM = 1
"""(batch, sequence, features), as transformers and torch's batch_first have it."""


class BoundaryLayout(Enum):
    """What a cut module's input and output are outside of it, where sequence parallel has changed that.

    PLAIN: whole activations on all ranks.
    SEQUENCE: each rank has its part of the sequence.
    GATHERED: a module around this one has gathered the sequence, and its gradient sums terms.
    """

    PLAIN = "plain"
    SEQUENCE = "sequence"
    GATHERED = "gathered"


@dataclass
class SplitModule:
    """One module that is cut, and what a call of it leaves for its end.

    Attributes:
        module: which.
        name: its name in the model.
        axis: the ranks.
        style: how.
        crossing: what its input is.
        facts: numbers from the model's configuration that the style needs.
    """

    module: torch.nn.Module
    name: str
    axis: SplitAxis
    style: "SplitStyle"
    crossing: BoundaryLayout = BoundaryLayout.PLAIN
    facts: dict[str, int] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SplitStyle:
    """The base: parameters stay whole, and nothing crosses.

    Attributes:
        is_partial: the gradients of whole parameters are terms, which have to be summed.
        opens: its output is cut, so that what is drawn on it must differ from rank to rank.
        closes: its output is whole again.
        is_transposed: the module's weight is (inputs, outputs).
    """

    is_partial = False
    opens = False
    closes = False
    is_transposed = False

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """Why this module cannot be cut so; None: it can."""
        return None

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """Along which dimension a parameter is cut; None: not at all."""
        return None

    factor = 1
    """How many matrices lie packed along that dimension, each of which is cut."""

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of the module's forward."""
        return args, kwargs

    def lend_bias(self, site: SplitModule) -> None:
        """Put into the bias's place what a call needs there."""
        if (bias := site.module._parameters.get("bias")) is not None:
            site.held["bias"] = bias
            site.module._parameters["bias"] = self.bias_within(_local(bias), site.axis)  # type: ignore[assignment]

    def bias_within(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """What a call needs of a bias that is not cut."""
        return bias

    def restore(self, site: SplitModule) -> None:
        """Give the module back what `enter` took from it; called however the forward ends, and before `leave`."""
        if (bias := site.held.pop("bias", None)) is not None:
            site.module._parameters["bias"] = bias

    def leave(self, site: SplitModule, output: Any) -> Any:
        """The output of the module."""
        return output


def _local(bias: torch.Tensor) -> torch.Tensor:
    return bias.to_local() if isinstance(bias, DTensor) else bias  # which dynamo can tell; attributes it cannot


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments:
    """The arguments with the activations changed: the first one, or `hidden_states` where all have names."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


class Colwise(SplitStyle):
    """Each rank computes some of the outputs.

    Args:
        is_gathered: all ranks get all of them.
    """

    def __init__(self, is_gathered: bool = False) -> None:
        self.is_gathered = is_gathered
        self.opens = not is_gathered

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """A linear layer is needed."""
        if self.is_gathered and is_transposed(module):
            return "it is a Conv1D, whose outputs cannot be gathered"
        return _linear_misfit(module, "out_features")

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """The outputs'."""
        is_last = self.is_transposed or parameter.dim() == 1 or key.endswith("bias")
        return parameter.dim() - (1 if is_last else 2)

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Its gradient comes in terms."""
        if site.crossing is BoundaryLayout.GATHERED:
            return args, kwargs
        if site.crossing is BoundaryLayout.SEQUENCE:
            return with_first(args, kwargs, lambda x: crossings.join_for_terms(x, site.axis, SEQUENCE_DIM))
        return with_first(args, kwargs, lambda x: crossings.spread(x, site.axis))

    def leave(self, site: SplitModule, output: Any) -> Any:
        """Cut, or gathered."""
        return crossings.join(output, site.axis, -1, num_outputs(site.module)) if self.is_gathered else output


class PackedColwise(Colwise):
    """Several matrices in one, such as gate and up: each rank computes some of the outputs of each.

    Args:
        factor: how many.
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """A linear layer whose outputs divide."""
        if (found := super().misfit(module, size)) is not None or num_outputs(module) % (self.factor * size) == 0:
            return found
        return f"its {num_outputs(module)} outputs cannot be divided by {self.factor} x {size}"

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """The outputs'; a transposed layer's bias stays whole, for it may be sharded along its one dimension."""
        return None if self.is_transposed and key == "bias" else super().dim(key, parameter)

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """As any, with its part of a bias that is whole."""
        if self.is_transposed:
            self.lend_bias(site)
        return super().enter(site, args, kwargs)

    def bias_within(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Its part of each matrix's."""
        return crossings.part_of(bias.view(self.factor, -1), axis, 1).flatten()


class Rowwise(SplitStyle):
    """Each rank computes with some of the inputs; what they get is summed.

    Args:
        is_split: the inputs are whole and are cut here.
    """

    closes = True

    def __init__(self, is_split: bool = False) -> None:
        self.is_split = is_split

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """A linear layer is needed."""
        return _linear_misfit(module, "in_features")

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """The inputs'."""
        return None if key.endswith("bias") else parameter.dim() - (2 if self.is_transposed else 1)

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Its part."""
        self.lend_bias(site)
        if self.is_split:
            return with_first(args, kwargs, lambda x: crossings.part_of(x, site.axis, -1))
        return args, kwargs

    def bias_within(self, bias: torch.Tensor, axis: SplitAxis) -> torch.Tensor | None:
        """Nothing: it is added once, to the sum. A transposed layer always adds one."""
        return torch.zeros_like(bias, requires_grad=False) if self.is_transposed else None

    def leave(self, site: SplitModule, output: Any) -> Any:
        """The sum, and the bias once."""
        if site.crossing is BoundaryLayout.PLAIN:
            output = crossings.total(output, site.axis)
        else:
            output = crossings.part_of_total(output, site.axis, SEQUENCE_DIM)
        bias = site.module._parameters.get("bias")
        if bias is None:
            return output
        local = _local(bias)
        if site.crossing is not BoundaryLayout.PLAIN:
            local = crossings.spread(local, site.axis)
        return output + local.to(output.dtype)


class PackedRowwise(Rowwise):
    """Several matrices in one along the last dimension: only of bare parameters."""

    factor = 2

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """It names parameters of an experts' module."""
        return "it is for a packed parameter, not for a module"


class EmbeddingRowwise(SplitStyle):
    """Each rank has some of the rows; what they look up is summed."""

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """A plain embedding is needed, with rows for all."""
        found = _embedding_misfit(module)
        num_rows = int(getattr(module, "num_embeddings", 0))
        if found is None and num_rows <= -(-num_rows // size) * (size - 1):
            return f"its {num_rows} rows are too few for {size} ranks"
        return found

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """The rows'."""
        return 0

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Row numbers within this rank's part."""
        module: Any = site.module
        step = -(-module.num_embeddings // site.axis.size)
        first = step * site.axis.rank
        last = min(first + step, module.num_embeddings)
        if (padding := module.padding_idx) is not None:
            site.held["padding"] = padding
            module.padding_idx = padding - first if first <= padding < last else None

        def local(ids: torch.Tensor) -> torch.Tensor:
            elsewhere = site.held["elsewhere"] = (ids < first) | (ids >= last)
            found: torch.Tensor = (ids - first).masked_fill(elsewhere, 0)
            return found

        return with_first(args, kwargs, local)

    def restore(self, site: SplitModule) -> None:
        """Its number of the padding's row."""
        if (padding := site.held.pop("padding", None)) is not None:
            site.module.padding_idx = padding

    def leave(self, site: SplitModule, output: Any) -> Any:
        """Zero for rows elsewhere, and the sum."""
        return crossings.total(output.masked_fill(site.held.pop("elsewhere").unsqueeze(-1), 0), site.axis)


class EmbeddingColwise(SplitStyle):
    """Each rank has some of the columns; what they look up is joined."""

    def misfit(self, module: torch.nn.Module, size: int) -> str | None:
        """A plain embedding is needed."""
        return _embedding_misfit(module)

    def dim(self, key: str, parameter: torch.Tensor) -> int | None:
        """The columns'."""
        return 1

    def leave(self, site: SplitModule, output: Any) -> Any:
        """All columns."""
        return crossings.join(output, site.axis, -1, int(site.module.embedding_dim))  # type: ignore[arg-type]


class PartialGradients(SplitStyle):
    """Whole parameters that see a part of the activations: a norm over a head, or over a part of the sequence."""

    is_partial = True


class Experts(SplitStyle):
    """Each rank has a part of what is computed: inputs (and routing weights) are whole, outputs are terms."""

    closes = True

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The gradients of all floating-point arguments come in terms."""

        def change(x: Any) -> Any:
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            return crossings.spread(x, site.axis) if is_float else x

        return tuple(change(x) for x in args), {name: change(x) for name, x in kwargs.items()}

    def leave(self, site: SplitModule, output: Any) -> Any:
        """Their sum."""
        return None if output is None else crossings.total(output, site.axis)


class IdentityExpert(SplitStyle):
    """An expert that gives back its input, within experts whose outputs are summed over the ranks."""

    def enter(self, site: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Its share."""
        return with_first(args, kwargs, lambda x: x / site.axis.size)


class LatentKeys(SplitStyle):
    """The joint projection of DeepSeek's attention: its rotary part goes to all heads past the next projection."""

    def leave(self, site: SplitModule, output: Any) -> Any:
        """The rotary part's gradient comes in terms."""
        rotary = site.facts["qk_rope_head_dim"]
        latent, keys = output.split([output.shape[-1] - rotary, rotary], dim=-1)
        return torch.cat([latent, crossings.spread(keys, site.axis)], dim=-1)


def is_transposed(module: torch.nn.Module) -> bool:
    """Is it transformers' Conv1D, the linear layer of GPT-2, whose weight is (inputs, outputs)?"""
    return isinstance(getattr(module, "nf", None), int) and isinstance(getattr(module, "nx", None), int)


def num_outputs(module: torch.nn.Module) -> int:
    """How many outputs a linear layer has."""
    return int(module.nf if is_transposed(module) else module.out_features)  # type: ignore[arg-type]


def num_inputs(module: torch.nn.Module) -> int:
    """How many inputs a linear layer has."""
    return int(module.nx if is_transposed(module) else module.in_features)  # type: ignore[arg-type]


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


def make(name: str, module: torch.nn.Module | None = None) -> SplitStyle:
    """The style of this name, for a module; `config.parallelism.STYLES` has the names."""
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
