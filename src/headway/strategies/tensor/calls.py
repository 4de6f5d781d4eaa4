"""A call of a module whose parameters are split: plain local tensors replace its DTensors while forward runs.

Forward computes on what a rank has, at the speed of plain tensors. Between calls the parameters are DTensors, which
optimizers, FSDP and checkpoints understand.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.common.optional import Later
from headway.strategies.tensor import crossings
from headway.strategies.tensor.crossings import SplitAxis
from headway.strategies.tensor.rng import SplitRNG
from headway.strategies.tensor.styles import SEQUENCE_DIM, SplitModule, with_first

tensor = Later("torch.distributed.tensor")


def is_lendable(value: Any) -> bool:
    """Is it a parameter that this axis alone has cut or kept whole? Under FSDP: one that is gathered at the moment."""
    return isinstance(value, tensor.DTensor) and value.device_mesh.ndim == 1


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
        self.give_back()
        if any(isinstance(value, tensor.DTensor) for value in (*args, *kwargs.values())):
            return
        for holder in self._modules:
            held: dict[str, Any] = holder._parameters
            for key, value in held.items():
                if value is not None and is_lendable(value):
                    is_whole = value.placements[0].is_replicate()
                    if not self._only_whole or is_whole:
                        self._lend(holder, key, value, is_whole)

    def _lend(self, holder: torch.nn.Module, key: str, value: Any, is_whole: bool) -> None:
        local = value.to_local()
        if is_whole and self._is_partial:
            local = crossings.spread(local, self._axis)
        self._lent.append((holder, key, value, local))
        holder._parameters[key] = local

    def after(self, *_: Any) -> None:
        """Take them back, however the forward has ended."""
        self.give_back()

    def give_back(self) -> None:
        """Put the DTensors where they were; what a forward itself has put there stays."""
        while self._lent:
            holder, key, value, local = self._lent.pop()
            if holder._parameters.get(key) is local:
                holder._parameters[key] = value


class SplitCall:
    """The crossings around a call of one cut module.

    Args:
        site: which.
        streams: of random numbers; None: sequence parallel looks after them.
        keeps_cut: makes the output of what the head gives while training: logits that stay cut.
    """

    def __init__(
        self,
        site: SplitModule,
        streams: SplitRNG | None,
        keeps_cut: Callable[[torch.nn.Module, Any], Any] | None = None,
    ) -> None:
        self._site, self._streams, self._keeps_cut = site, streams, keeps_cut

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whole to cut."""
        if self._streams is not None and self._site.style.closes:
            self._streams.join()
        return self._site.style.enter(self._site, args, kwargs)

    def after_any(self, *_: Any) -> None:
        """However the forward has ended."""
        self._site.style.restore(self._site)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cut to whole."""
        if self._keeps_cut is not None and module.training:
            return self._keeps_cut(module, output)
        output = self._site.style.leave(self._site, output)
        if self._streams is not None and self._site.style.opens and module.training:
            self._streams.part()
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
        streams: of random numbers.
        is_first: it is given the whole sequence.
        is_last: it gives back the whole sequence.
    """

    def __init__(self, axis: SplitAxis, streams: SplitRNG, is_first: bool, is_last: bool) -> None:
        self._axis, self._streams, self._is_first, self._is_last = axis, streams, is_first, is_last

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut what comes in first."""
        if self._is_first:

            def part(x: torch.Tensor) -> torch.Tensor:
                crossings.check_divides(x, self._axis, SEQUENCE_DIM)
                return crossings.part_of(x, self._axis, SEQUENCE_DIM)

            args, kwargs = with_first(args, kwargs, part)
        if module.training:
            self._streams.part()
        return args, kwargs

    def after_any(self, *_: Any) -> None:
        """However the forward has ended."""
        self._streams.join()

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Join what goes out last."""
        if not self._is_last:
            return output
        if isinstance(output, tuple):
            return (crossings.join(output[0], self._axis, SEQUENCE_DIM), *output[1:])
        return crossings.join(output, self._axis, SEQUENCE_DIM)
