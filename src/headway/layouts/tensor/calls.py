"""Hooks around the forward of split modules: they swap DTensor parameters for local tensors and shard activations.

Forward computes on local tensors, at the speed of plain tensors. Between calls the parameters are DTensors, which
optimizers, FSDP and checkpoints support.

In attention, each rank computes some of the heads. So attributes that count heads must contain the number of heads on
one rank.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.config.parallelism import TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import crossings, plans, styles
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG
from headway.layouts.tensor.plans import ModelSplit
from headway.layouts.tensor.styles import SEQUENCE_DIM, Colwise, SplitModule, change_activations

tensor = LazyModule("torch.distributed.tensor")


def is_lendable(value: Any) -> bool:
    """Whether the value is a DTensor whose local tensor can replace it in a forward.

    This is True on a one-dimensional mesh, and for distributed experts on the mesh axes (ep, tp). It is False for a
    parameter that FSDP has sharded along a further axis, except while the parameter is all-gathered.
    """
    return isinstance(value, tensor.DTensor) and (
        value.device_mesh.ndim == 1 or value.device_mesh.mesh_dim_names == ("ep", "tp")
    )


class LocalParameters:
    """Hooks that replace modules' DTensor parameters with local tensors during a forward.

    Args:
        modules: Modules whose parameters are replaced. Parameters of their submodules are not replaced.
        axis: Mesh axis of tensor or expert parallelism.
        is_partial: Whether gradients of replicated parameters are terms that must be summed over the ranks. Default:
            False.
        only_whole: Whether to replace only replicated parameters. Default: False.
        keeps_parameters: Whether frozen parameters are replaced with `Parameter` objects instead of plain tensors.
            PEFT adapts stacked parameters with torch's parametrizations, which accept only these. Default: False.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        axis: SplitAxis,
        is_partial: bool = False,
        only_whole: bool = False,
        keeps_parameters: bool = False,
    ) -> None:
        self._modules = modules
        self._axis = axis
        self._is_partial = is_partial
        self._only_whole = only_whole
        self._keeps_parameters = keeps_parameters
        self._lent: list[tuple[torch.nn.Module, str, Any, torch.Tensor]] = []

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace DTensor parameters with local tensors. Keep them if the forward gets DTensor arguments."""
        self.after_forward()
        if any(isinstance(value, tensor.DTensor) for value in (*args, *kwargs.values())):
            return
        for holder in self._modules:
            held: dict[str, Any] = holder._parameters
            for key, value in held.items():
                if value is not None and is_lendable(value):
                    is_whole = value.placements[-1].is_replicate()
                    if not self._only_whole or is_whole:
                        self._replace_with_local(holder, key, value, is_whole)

    def _replace_with_local(self, holder: torch.nn.Module, key: str, value: Any, is_whole: bool) -> None:
        # Not inlined: within a loop over the dict that changes, TorchDynamo would trace into `to_local` and break the graph.
        local = value.to_local()
        if is_whole and self._is_partial:
            local = crossings.copy_to_split_region(local, self._axis)
        elif self._keeps_parameters and not value.requires_grad:
            local = torch.nn.Parameter(local, requires_grad=False)
        self._lent.append((holder, key, value, local))
        holder._parameters[key] = local

    def after_forward(self, *_: Any) -> None:
        """Restore the DTensor parameters after a forward.

        The hook also runs if the forward raised an error. A parameter that the forward itself has assigned is kept.
        """
        while self._lent:
            holder, key, value, local = self._lent.pop()
            if holder._parameters.get(key) is local:
                holder._parameters[key] = value


class SplitCall:
    """Hooks that shard or gather the activations of one split module before and after its forward.

    Args:
        site: Split module, with its style.
        rng_states: RNG states for replicated and sharded activations. None: these hooks do not switch the RNG state,
            for example because `SequenceBlock` does.
        keeps_cut: Function of (module, output) that returns sharded logits as a DTensor. It is called in training in
            place of all-gathering the logits. None: the style converts the output. Default: None.
    """

    def __init__(
        self,
        site: SplitModule,
        rng_states: SplitRNG | None,
        keeps_cut: Callable[[torch.nn.Module, Any], Any] | None = None,
    ) -> None:
        self._site = site
        self._rng_states = rng_states
        self._keeps_cut = keeps_cut

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which the module's forward computes on local tensors.

        Before a module whose output is replicated again, also switch to the common RNG state.
        """
        if self._rng_states is not None and self._site.style.closes:
            self._rng_states.join()
        return self._site.style.convert_inputs(self._site, args, kwargs)

    def after_any(self, *_: Any) -> None:
        """Restore the attributes that the module's style replaced. This also happens if the forward raised an error."""
        self._site.style.restore_module(self._site)

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output in the layout that the caller of the split module expects: sharded or full.

        After a module whose output is sharded, also switch to this rank's RNG state in training.
        """
        if self._keeps_cut is not None and module.training:
            return self._keeps_cut(module, output)
        output = self._site.style.convert_output(self._site, output)
        if self._rng_states is not None and self._site.style.opens and module.training:
            self._rng_states.part()
        return output


class GatheredInput:
    """Forward pre-hook that gathers the sequence for a module whose caller has only a shard of it.

    Args:
        axis: Mesh axis of tensor parallelism.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the forward, with the activations all-gathered along the sequence dimension."""
        return change_activations(args, kwargs, lambda x: crossings.join_for_terms(x, self._axis, SEQUENCE_DIM))


class SequenceBlock:
    """Forward hooks of a block under sequence parallelism.

    Activations are sharded along the sequence between blocks.

    Args:
        axis: Mesh axis of tensor parallelism.
        rng_states: RNG states for replicated and sharded activations.
        is_first: Whether the block's input is the full sequence.
        is_last: Whether the block's output must be the full sequence.
    """

    def __init__(self, axis: SplitAxis, rng_states: SplitRNG, is_first: bool, is_last: bool) -> None:
        self._axis = axis
        self._rng_states = rng_states
        self._is_first = is_first
        self._is_last = is_last

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's arguments with this rank's sequence shard.

        In training, also switch to this rank's RNG state.
        """
        if self._is_first:

            def take_shard(x: torch.Tensor) -> torch.Tensor:
                crossings.check_divides(x, self._axis, SEQUENCE_DIM)
                return crossings.take_part(x, self._axis, SEQUENCE_DIM)

            args, kwargs = change_activations(args, kwargs, take_shard)
        if module.training:
            self._rng_states.part()
        named = next(iter(kwargs), "") if not args else ""
        named = "hidden_states" if named and "hidden_states" in kwargs else named
        args = (*args[:1], *(self._spread_states(each) for each in args[1:]))
        return args, {name: each if name == named else self._spread_states(each) for name, each in kwargs.items()}

    def _spread_states(self, given: Any) -> Any:
        """Return an argument of the block unchanged.

        If the argument might be the output of an encoder, backward sums the argument's gradient over the ranks. An
        encoder's output is replicated, but each rank's attention heads yield only one term of its gradient.
        """
        is_states = isinstance(given, torch.Tensor) and given.dim() == 3 and given.requires_grad
        return crossings.copy_to_split_region(given, self._axis) if is_states else given

    def after_any(self, *_: Any) -> None:
        """Switch back to the common RNG state of all ranks. The hook also runs if the forward raised an error."""
        self._rng_states.join()

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the block's output, gathered along the sequence if this is the last block."""
        if not self._is_last:
            return output
        if isinstance(output, tuple):
            return (crossings.join(output[0], self._axis, SEQUENCE_DIM), *output[1:])
        return crossings.join(output, self._axis, SEQUENCE_DIM)


COUNTS = re.compile(r"(num|n)?_?(local_|attention_|key_value_|query_|kv_|q_|k_|v_)*n?heads?")
"""Regular expression for names of attributes that count attention heads."""
_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")
"""Names of attributes that contain the number of features of one attention head."""


def check_heads(model: torch.nn.Module, cuts: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Raise an error if a plan splits an attention head, or if the options omit an attribute that counts heads.

    Args:
        model: Model to split.
        cuts: Modules that the plan splits.
        size: Number of ranks.
        options: Options with the patterns `divide` and `keep`, which match names of attributes.

    Raises:
        PrepareError: If a head would be split, or if neither `divide` nor `keep` matches an attribute that counts
            heads.
        ConfigError: If a pattern of `divide` or `keep` matches nothing, or if the value of an attribute that `divide`
            matches is not a multiple of `size`.
    """
    _check_names(model, size, options)
    for site in cuts.sites.values():
        if not isinstance(site.style, Colwise) or site.style.is_gathered:
            continue
        name = site.name  # for a layer with adapters, the name of the wrapper
        parent_name = name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        _check_whole(name, parent, styles.num_outputs(site.module), size)
        if not type(parent).__module__.startswith("transformers."):
            _check_counts(parent_name, parent, size, options)


def divide_counts(model: torch.nn.Module, cuts: ModelSplit, size: int, options: TensorParallelOptions) -> None:
    """Divide the attributes that match `options.divide`, such as head counts, by the number of ranks.

    For each `Conv1D` that is split by columns, its stored number of outputs (`nf`) is divided, too.

    Args:
        model: Model to split.
        cuts: Modules that the plan splits.
        size: Number of ranks.
        options: Options with the patterns `divide`, which match names of attributes.
    """
    for site in cuts.sites.values():
        if isinstance(site.style, Colwise) and site.style.is_transposed:
            site.module.nf = styles.num_outputs(site.module) // size  # type: ignore[assignment]
    for _name, module, key in _find_named_integers(model, options.divide):
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
        if is_count and not any(plans.is_match(pattern, path) for pattern in (*options.divide, *options.keep)):
            raise PrepareError(
                f"{name or type(parent).__name__!r} has {key}={value}, but each rank has {value}/{size} of them once its matrices "
                f"are split. If its forward uses this number (in view or reshape), pass divide=({path!r},), with '*' for the parts "
                f"of the name that differ between blocks. If not (view(..., -1, head_dim)), pass keep=({path!r},)"
            )


def _check_names(model: torch.nn.Module, size: int, options: TensorParallelOptions) -> None:
    for pattern in (*options.divide, *options.keep):
        found = list(_find_named_integers(model, (pattern,)))
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


def _find_named_integers(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, torch.nn.Module, str]]:
    return [
        (path, module, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
        for path in [f"{name}.{key}" if name else key]
        if any(plans.is_match(pattern, path) for pattern in patterns)
    ]
