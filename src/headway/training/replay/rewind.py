"""Undoes several updates: copies of a run's state in host memory, one every n updates; the last two are kept.

A copy is made between two updates, before the next batch is asked for, and holds what the updates after it change: parameters,
optimizer state, buffers, schedules, RNG states, counters, registered objects. The position in the data is not among them: after
going back, the loop reads on, so that the batches since the copy are left out. The state is then bit for bit that of a run whose
data never had them. A pass over the data draws its order when it begins, which going back would draw again; so the copies of an
earlier pass are dropped.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headway.data.loader import PreparedLoader
from headway.runtime.device import Hardware
from headway.training.prepared.objects import PreparedObjects
from headway.training.replay.snapshot import BatchSnapshot, Rewindable, StepUndo
from headway.training.windows import AccumulationWindows, UpdateClock


class StateHolder(Protocol):
    """A schedule, or an object that is registered for checkpoints."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state up."""


class RunCopy:
    """The state of a run between two updates.

    Args:
        prepared: models, optimizers, schedules.
        windows: of the run.
        counters: what else knows itself how to go back.
        hardware: whose generator belongs to the state.
        others: registered objects.
        num_updates: so many were made.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        windows: AccumulationWindows,
        counters: Sequence[Rewindable],
        hardware: Hardware,
        others: Sequence[StateHolder],
        num_updates: int,
    ) -> None:
        self.num_updates = num_updates
        self._schedules = list(prepared.schedulers)
        self._windows = windows
        self._weights = windows.snapshot()
        holders: list[StateHolder] = [*(each.scheduler for each in self._schedules), *others]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._optimizers = [StepUndo(each.optimizer) for each in prepared.optimizers]
        self._rest = BatchSnapshot(prepared, counters, hardware)
        self._rest.take()
        self._rest.give_back()

    def restore(self) -> None:
        """Go back; the copy stays good."""
        self._rest.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for holder, state in self._states:
            holder.load_state_dict(copy.deepcopy(state))
        self._windows.restore_weights(self._weights)
        for schedule in self._schedules:
            schedule.catch_up()


class Rewind:
    """Copies the state every `distance` updates, and goes back.

    Args:
        distance: in updates.
        prepared, windows, clock, hardware: of the run.
        counters: what goes back beside the clock and the prepared optimizers.
        others: the objects that are registered for checkpoints.
    """

    def __init__(
        self,
        distance: int,
        prepared: PreparedObjects,
        windows: AccumulationWindows,
        clock: UpdateClock,
        hardware: Hardware,
        counters: Sequence[Rewindable],
        others: Callable[[], Sequence[StateHolder]],
    ) -> None:
        self._distance = distance
        self._prepared, self._windows, self._clock, self._hardware = prepared, windows, clock, hardware
        self._counters, self._others = (clock, *counters), others
        self._copies: list[RunCopy] = []
        self._pass: tuple[int, int] | None = None

    def before_fetch(self, loader: PreparedLoader) -> None:
        """A loader is about to read: is a copy due?"""
        windows = self._windows
        if windows.is_unfinished or windows.num_read:
            return
        if not windows.trained_on or any(each.seed == loader.seed for each in windows.trained_on):
            now = loader.seed, loader.num_passes
            if now != self._pass:
                self._pass = now
                self._copies.clear()
        self._copy_if_due()

    def before_learning(self) -> None:
        """A micro-batch is about to begin, of a loop without a prepared loader perhaps."""
        if not self._windows.active and not self._windows.is_unfinished:
            self._copy_if_due()

    def _copy_if_due(self) -> None:
        num = self._clock.num_updates
        if self._prepared.optimizers and (not self._copies or num - self._copies[-1].num_updates >= self._distance):
            parts = self._prepared, self._windows, self._counters, self._hardware, self._others(), num
            self._copies = [*self._copies[-1:], RunCopy(*parts)]

    def go_back(self) -> int | None:
        """Go back `distance` to twice `distance` updates, or to the first copy of the pass; returns how many updates that leaves."""
        if not self._copies:
            return None
        del self._copies[1:]
        self._copies[0].restore()
        return self._copies[0].num_updates

    def forget(self) -> None:
        """The run goes on from elsewhere."""
        self._copies, self._pass = [], None
