"""A call of a module whose parameters are split: local tensors in place of DTensors, and whole attention heads on each rank.

Forward computes on what a rank has, at the speed of plain tensors. Between calls the parameters are DTensors, which
optimizers, FSDP and checkpoints understand.

Attention heads under tensor parallelism: whole heads on each rank, and forwards that count what a rank has.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from headway.common.optional import Later
from headway.config.parallelism import TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.strategies.tensor import crossings, plans, styles
from headway.strategies.tensor.crossings import SplitAxis, SplitRNG
from headway.strategies.tensor.plans import ModelSplit
from headway.strategies.tensor.styles import SEQUENCE_DIM, Colwise, SplitModule, with_first

tensor = Later("torch.distributed.tensor")


def is_lendable(value: Any) -> bool:
    """Is it a parameter that this axis alone has cut or kept whole, or experts that are distributed? Under FSDP: one that is gathered
    at the moment.
    """
    return isinstance(value, tensor.DTensor) and (
        value.device_mesh.ndim == 1 or value.device_mesh.mesh_dim_names == ("ep", "tp")
    )


class LocalParameters:
    """Local tensors in the place of modules' DTensors.

    Args:
        modules: whose own parameters.
        axis: the ranks.
        is_partial: gradients of the whole ones are terms.
        only_whole: leave cut ones where they are.
    """

    def __init__(
        self, modules: list[torch.nn.Module], axis: SplitAxis, is_partial: bool = False, only_whole: bool = False
    ) -> None:
        self._modules, self._axis, self._is_partial, self._only_whole = modules, axis, is_partial, only_whole
        self._lent: list[tuple[torch.nn.Module, str, Any, torch.Tensor]] = []

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lend; a forward that is given DTensors computes with DTensors."""
        self.after()
        if any(isinstance(value, tensor.DTensor) for value in (*args, *kwargs.values())):
            return
        for holder in self._modules:
            held: dict[str, Any] = holder._parameters
            for key, value in held.items():
                if value is not None and is_lendable(value):
                    is_whole = value.placements[-1].is_replicate()
                    if not self._only_whole or is_whole:
                        self._lend(holder, key, value, is_whole)

    def _lend(self, holder: torch.nn.Module, key: str, value: Any, is_whole: bool) -> None:
        # A function of its own: in the loop, over a dict that it changes, TorchDynamo traces into `to_local` and breaks the graph.
        local = value.to_local()
        if is_whole and self._is_partial:
            local = crossings.spread(local, self._axis)
        self._lent.append((holder, key, value, local))
        holder._parameters[key] = local

    def after(self, *_: Any) -> None:
        """Put the DTensors where they were, however the forward has ended; what it has put there itself stays."""
        while self._lent:
            holder, key, value, local = self._lent.pop()
            if holder._parameters.get(key) is local:
                holder._parameters[key] = value


class SplitCall:
    """The crossings around a call of one cut module.

    Args:
        site: which.
        rng_states: of random numbers; None: sequence parallel looks after them.
        keeps_cut: makes the output of what the head gives while training: logits that stay cut.
    """

    def __init__(
        self,
        site: SplitModule,
        rng_states: SplitRNG | None,
        keeps_cut: Callable[[torch.nn.Module, Any], Any] | None = None,
    ) -> None:
        self._site, self._rng_states, self._keeps_cut = site, rng_states, keeps_cut

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whole to cut."""
        if self._rng_states is not None and self._site.style.closes:
            self._rng_states.join()
        return self._site.style.enter(self._site, args, kwargs)

    def after_any(self, *_: Any) -> None:
        """However the forward has ended."""
        self._site.style.restore(self._site)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cut to whole."""
        if self._keeps_cut is not None and module.training:
            return self._keeps_cut(module, output)
        output = self._site.style.leave(self._site, output)
        if self._rng_states is not None and self._site.style.opens and module.training:
            self._rng_states.part()
        return output


class GatheredInput:
    """A module whose input is a part of the sequence, and which computes with all of it."""

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The whole sequence, of the first argument."""
        return with_first(args, kwargs, lambda x: crossings.join_for_terms(x, self._axis, SEQUENCE_DIM))


class SequenceBlock:
    """One of the blocks between which the residual stream is cut along the sequence.

    Args:
        axis: the ranks.
        rng_states: of random numbers.
        is_first: it is given the whole sequence.
        is_last: it gives back the whole sequence.
    """

    def __init__(self, axis: SplitAxis, rng_states: SplitRNG, is_first: bool, is_last: bool) -> None:
        self._axis, self._rng_states, self._is_first, self._is_last = axis, rng_states, is_first, is_last

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut what comes in first."""
        if self._is_first:

            def part(x: torch.Tensor) -> torch.Tensor:
                crossings.check_divides(x, self._axis, SEQUENCE_DIM)
                return crossings.part_of(x, self._axis, SEQUENCE_DIM)

            args, kwargs = with_first(args, kwargs, part)
        if module.training:
            self._rng_states.part()
        named = next(iter(kwargs), "") if not args else ""
        named = "hidden_states" if named and "hidden_states" in kwargs else named
        args = (*args[:1], *(self._all_of_it(each) for each in args[1:]))
        return args, {name: each if name == named else self._all_of_it(each) for name, each in kwargs.items()}

    def _all_of_it(self, given: Any) -> Any:
        """What an encoder gives to a decoder's blocks is whole, and of its gradient each rank's heads make a term."""
        is_states = isinstance(given, torch.Tensor) and given.dim() == 3 and given.requires_grad
        return crossings.spread(given, self._axis) if is_states else given

    def after_any(self, *_: Any) -> None:
        """However the forward has ended."""
        self._rng_states.join()

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Join what goes out last."""
        if not self._is_last:
            return output
        if isinstance(output, tuple):
            return (crossings.join(output[0], self._axis, SEQUENCE_DIM), *output[1:])
        return crossings.join(output, self._axis, SEQUENCE_DIM)


COUNTS = re.compile(r"(num|n)?_?(local_|attention_|key_value_|query_|kv_|q_|k_|v_)*n?heads?")
"""Names of attributes that count heads."""
_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")


def check(model: torch.nn.Module, cuts: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Each rank must get whole heads, and the module's own count of them must be one that forward may use.

    Raises:
        PrepareError: heads that would be cut in two, or a count that would be that of all ranks.
        ConfigError: a pattern of `divide` or `keep` that names nothing, or a count that does not divide.
    """
    _check_names(model, size, options)
    for site in cuts.sites.values():
        if not isinstance(site.style, Colwise) or site.style.is_gathered:
            continue
        name = site.name  # of the layer, if it has adapters
        parent_name = name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        _check_whole(name, parent, styles.num_outputs(site.module), size)
        if not type(parent).__module__.startswith("transformers."):
            _check_counts(parent_name, parent, size, options)


def divide(model: torch.nn.Module, cuts: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Make the counts that `divide` names those of a rank, and a Conv1D's own of its outputs."""
    for site in cuts.sites.values():
        if isinstance(site.style, Colwise) and site.style.is_transposed:
            site.module.nf = styles.num_outputs(site.module) // size  # type: ignore[assignment]
    for _name, module, key in _named(model, options.divide):
        setattr(module, key, int(getattr(module, key)) // size)


def _check_whole(name: str, parent: torch.nn.Module, outputs: int, size: int) -> None:
    for key in _SIZES:
        width = getattr(parent, key, None)
        if isinstance(width, int) and width > 1 and outputs % width == 0 and outputs // width % size:
            raise PrepareError(
                f"{name!r} has {outputs // width} heads, which cannot be divided among {size} ranks of tensor parallelism; use a "
                "number of ranks that divides them, or leave the attention out of the plan"
            )
    config = getattr(parent, "config", None)
    leaf = name.rpartition(".")[2]
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
    count = getattr(config, counts.get(leaf, ""), None)
    if isinstance(count, int) and count % size:
        raise PrepareError(
            f"{name!r} has {counts[leaf]}={count}, which cannot be divided among {size} ranks of tensor parallelism; use a number of "
            "ranks that divides it, or leave the attention out of the plan"
        )


def _check_counts(name: str, parent: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    for key, value in vars(parent).items():
        path = f"{name}.{key}" if name else key
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 1 and COUNTS.fullmatch(key)
        if is_count and not any(plans.fits(pattern, path) for pattern in (*options.divide, *options.keep)):
            raise PrepareError(
                f"{name or type(parent).__name__!r} has {key}={value}, but each rank has {value}/{size} of them once its matrices "
                f"are split. If its forward uses this number (in view or reshape), have it divided: divide=({path!r},), with '*' for "
                f"the parts that differ between blocks; if not (view(..., -1, head_dim)), say so: keep=({path!r},)"
            )


def _check_names(model: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    for pattern in (*options.divide, *options.keep):
        found = list(_named(model, (pattern,)))
        if not found:
            raise ConfigError(
                f"divide or keep names {pattern!r}, but {type(model).__name__} has no such integer attribute"
            )
        for name, module, key in found:
            if pattern in options.divide and getattr(module, key) % size:
                raise ConfigError(
                    f"{name!r} is {getattr(module, key)}, which cannot be divided among {size} ranks of tensor parallelism; use a "
                    "number of ranks that divides it"
                )


def _named(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, torch.nn.Module, str]]:
    return [
        (path, module, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
        for path in [f"{name}.{key}" if name else key]
        if any(plans.fits(pattern, path) for pattern in patterns)
    ]
