"""Hooks around the forward of split modules: they swap DTensor parameters for local tensors and shard activations.

Forward computes on local tensors, at the speed of plain tensors. Between calls the parameters are DTensors, which
optimizers, FSDP and checkpoints support.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.layouts.tensor import crossings
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG
from headway.layouts.tensor.styles import (
    SEQUENCE_DIM,
    SplitModule,
    SplitStyle,
    change_activations,
    omit_activations,
)

tensor = LazyModule("torch.distributed.tensor")


def has_local_replacement(value: Any) -> bool:
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
        only_replicated: Whether to replace only replicated parameters. Default: False.
        keeps_parameters: Whether frozen parameters are replaced with `Parameter` objects instead of plain tensors.
            PEFT adapts stacked parameters with torch's parametrizations, which accept only these. Default: False.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        axis: SplitAxis,
        is_partial: bool = False,
        only_replicated: bool = False,
        keeps_parameters: bool = False,
    ) -> None:
        self._modules = modules
        self._axis = axis
        self._is_partial = is_partial
        self._only_replicated = only_replicated
        self._keeps_parameters = keeps_parameters
        # Replaced parameters: (module, name of the parameter, DTensor, local tensor that replaces it).
        self._replaced: list[tuple[torch.nn.Module, str, Any, torch.Tensor]] = []
        # TorchDynamo would compile this function again for each parameter, up to its limit of recompilations. Not as a
        # decorator, which would run at import time: `torch.compiler.disable` imports more than torch itself. Not bound to
        # this object, because a deep copy of a model would keep the binding.
        self._replace: Callable[..., None] = torch.compiler.disable(LocalParameters._replace_with_local)  # type: ignore[no-untyped-call]

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace DTensor parameters with local tensors. Keep them if the forward gets DTensor arguments."""
        self.after_forward()  # an earlier forward may have ended without its hooks
        if any(isinstance(value, tensor.DTensor) for value in (*args, *kwargs.values())):
            return
        for holder in self._modules:
            parameters: dict[str, Any] = holder._parameters
            for key, value in parameters.items():
                if value is not None and has_local_replacement(value):
                    is_replicated = value.placements[-1].is_replicate()
                    if not self._only_replicated or is_replicated:
                        self._replace(self, holder, key, value, is_replicated)

    def _replace_with_local(self, holder: torch.nn.Module, key: str, value: Any, is_replicated: bool) -> None:
        """Replace a parameter of a module with its local tensor.

        Args:
            holder: Module.
            key: Name of the parameter in the module.
            value: DTensor parameter.
            is_replicated: Whether all ranks of the axis have the full parameter.
        """
        # Not inlined: within a loop over the dict that changes, TorchDynamo would trace into `to_local` and break the graph.
        local = value.to_local()
        if is_replicated and self._is_partial:
            local = crossings.copy_to_split_region(local, self._axis)
        elif self._keeps_parameters and not value.requires_grad:
            local = torch.nn.Parameter(local, requires_grad=False)
        self._replaced.append((holder, key, value, local))
        holder._parameters[key] = local

    def after_forward(self, *_: Any) -> None:
        """Restore the DTensor parameters after a forward.

        The hook also runs if the forward raised an error. A parameter that the forward itself has assigned is kept.
        """
        while self._replaced:
            holder, key, value, local = self._replaced.pop()
            if holder._parameters.get(key) is local:
                holder._parameters[key] = value


class SplitCall:
    """Hooks that shard or gather the activations of one split module before and after its forward.

    Args:
        split_module: Split module, with its style.
        rng_states: RNG states for replicated and sharded activations. None: these hooks do not switch the RNG state,
            for example because `SequenceBlock` does.
        wrap_logits: Function of (module, output) that returns sharded logits as a DTensor. It is called in training in
            place of all-gathering the logits. None (the default): the style converts the output.
    """

    def __init__(
        self,
        split_module: SplitModule,
        rng_states: SplitRNG | None,
        wrap_logits: Callable[[torch.nn.Module, Any], Any] | None = None,
    ) -> None:
        self._split_module = split_module
        self._rng_states = rng_states
        self._wrap_logits = wrap_logits

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which the module's forward computes on local tensors.

        Before a module whose output is replicated again, also switch to the common RNG state.
        """
        if self._rng_states is not None and self._split_module.style.ends_split_region:
            self._rng_states.use_common_state()
        return self._split_module.style.convert_inputs(self._split_module, args, kwargs)

    def after_any(self, *_: Any) -> None:
        """Restore the attributes that the module's style replaced. This also happens if the forward raised an error."""
        self._split_module.style.restore_module(self._split_module)

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output in the layout that the caller of the split module expects: sharded or full.

        After a module whose output is sharded, also switch to this rank's RNG state in training.
        """
        if self._wrap_logits is not None and module.training:
            return self._wrap_logits(module, output)
        output = self._split_module.style.convert_output(self._split_module, output)
        if self._rng_states is not None and self._split_module.style.begins_split_region and module.training:
            self._rng_states.use_rank_state()
        return output


class AdaptedCall:
    """Forward hooks that switch RNG states before and after the forward of a split layer with adapters.

    Args:
        style: Style of the layer.
        rng_states: RNG states for replicated and sharded activations.
    """

    def __init__(self, style: SplitStyle, rng_states: SplitRNG) -> None:
        self._style = style
        self._rng_states = rng_states

    def before_forward(self, *_: Any) -> None:
        """Switch to the common RNG state of all ranks if the layer's input is replicated."""
        if self._style.begins_split_region:
            self._rng_states.use_common_state()

    def after_any(self, module: torch.nn.Module, *_: Any) -> None:
        """Switch to the RNG state that fits the layer's output, which is either sharded or replicated.

        In evaluation mode, the state for sharded outputs is not used. The hook also runs if the forward raised an
        error.
        """
        if self._style.ends_split_region:
            self._rng_states.use_common_state()
        elif self._style.begins_split_region and module.training:
            self._rng_states.use_rank_state()


class GatheredInput:
    """Forward pre-hook that gathers the sequence for a module whose caller has only a shard of it.

    Args:
        axis: Mesh axis of tensor parallelism.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the forward, with the activations all-gathered along the sequence dimension."""
        return change_activations(
            args, kwargs, lambda x: crossings.gather_for_split_region(x, self._axis, SEQUENCE_DIM)
        )


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
        """Return the block's arguments with this rank's sequence shard, as (args, kwargs).

        Backward sums the gradients of those other arguments that might be the output of an encoder. In training, also
        switch to this rank's RNG state.
        """
        if self._is_first:

            def take_shard(x: torch.Tensor) -> torch.Tensor:
                crossings.check_divides(x, self._axis, SEQUENCE_DIM)
                return crossings.take_shard(x, self._axis, SEQUENCE_DIM)

            args, kwargs = change_activations(args, kwargs, take_shard)
        if module.training:
            self._rng_states.use_rank_state()
        # All arguments except the activations.
        other_args = tuple(self._sum_gradient_of(value) for value in args[1:])
        other_kwargs = dict(kwargs) if args else omit_activations(kwargs)
        summed_kwargs = {name: self._sum_gradient_of(value) for name, value in other_kwargs.items()}
        return (*args[:1], *other_args), {**kwargs, **summed_kwargs}

    def _sum_gradient_of(self, value: Any) -> Any:
        """Return the argument, and make backward sum its gradient over the ranks if it might be an encoder's output.

        An encoder's output is replicated, but each rank's attention heads yield only one term of its gradient.
        """
        is_states = isinstance(value, torch.Tensor) and value.dim() == 3 and value.requires_grad
        return crossings.copy_to_split_region(value, self._axis) if is_states else value

    def after_any(self, *_: Any) -> None:
        """Switch back to the common RNG state of all ranks. The hook also runs if the forward raised an error."""
        self._rng_states.use_common_state()

    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the block's output, gathered along the sequence if this is the last block."""
        if not self._is_last:
            return output
        if isinstance(output, tuple):
            return (crossings.gather_shards(output[0], self._axis, SEQUENCE_DIM), *output[1:])
        return crossings.gather_shards(output, self._axis, SEQUENCE_DIM)
