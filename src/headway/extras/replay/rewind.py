"""Undo several updates of a run, by going back to an earlier copy of its state in host memory.

A run's state is copied every n updates, and the last two copies are kept. A copy is made between two updates, before
the next batch is requested. It contains what later updates change: parameters, optimizer state, buffers, schedules, RNG
states, counters and registered objects. The position in the data is not included. After going back, the loop continues
to read, so that the batches since the copy are left out. The state then equals, bit for bit, that of a run whose data
never contained them. The order of the data is chosen when a pass over it begins. Copies from an earlier pass are
dropped, because going back to them would choose the order again.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.core.data.loader import PreparedLoader
from headway.core.training.run import Run
from headway.extras.moving_average import holds_averages
from headway.extras.replay.snapshot import BatchSnapshot, Rewindable
from headway.extras.replay.step_undo import StepUndo


class StateHolder(Protocol):
    """Interface of an object with a state dict, such as a scheduler or an object registered for checkpoints."""

    def state_dict(self) -> Any:
        """Return the state that `load_state_dict` accepts."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a state that `state_dict` returned."""


class RunCopy:
    """Copy of a run's state between two updates, to which `RewindCopies` goes back.

    Parameters and optimizer states are copied to host memory, and buffers on their own device. Gradients are not copied.

    Args:
        run: Run of the Accelerator.
        counters: Objects with `snapshot` and `restore`, in addition to the update clock.
        registered: Objects registered for checkpoints.

    Attributes:
        num_updates: Number of updates made at the time of the copy.
    """

    def __init__(self, run: Run, counters: Sequence[Rewindable], registered: Sequence[StateHolder]) -> None:
        prepared = run.prepared
        self.num_updates = run.clock.num_updates
        self._schedulers = list(prepared.schedulers)
        self._windows = run.windows
        self._windows_state = run.windows.snapshot()
        holders: list[StateHolder] = [*(each.scheduler for each in self._schedulers), *registered]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._optimizer_copies = [StepUndo(each.optimizer) for each in prepared.optimizers]
        self._snapshot = BatchSnapshot(prepared, (run.clock, *counters), run.runtime.hardware)
        self._snapshot.save_state()
        self._snapshot.restore_gradients()  # `save_state` has moved them into the snapshot

    def restore(self) -> None:
        """Restore the run's state from the copy. The copy can be restored more than once."""
        self._snapshot.restore()
        for optimizer_copy in self._optimizer_copies:
            optimizer_copy.restore()
        for holder, state in self._states:
            holder.load_state_dict(copy.deepcopy(state))
        self._windows.restore_weights(self._windows_state)
        for scheduler in self._schedulers:
            scheduler.catch_up()


@dataclass(eq=False)
class RewindCopies:
    """Periodic copies of the run's state, with which several updates can be undone.

    Args:
        distance: Number of updates between copies.
        run: Run of the Accelerator.
        counters: Objects to restore in addition to the clock and the prepared optimizers.
        list_registered: Function that returns the objects registered for checkpoints.
    """

    distance: int
    run: Run
    counters: Sequence[Rewindable]
    list_registered: Callable[[], Sequence[StateHolder]]
    _copies: list[RunCopy] = field(default_factory=list, init=False)  # at most two, the older one first
    _pass_key: tuple[int, int] | None = field(default=None, init=False)  # seed of the loader, and its number of passes

    def before_fetch(self, loader: PreparedLoader) -> None:
        """Copy the state if a copy is due, before a loader reads the first batch of an accumulation window.

        When a training loader begins a new pass, drop the copies of earlier passes first.
        """
        windows = self.run.windows
        if windows.is_unfinished or windows.reads.num_unused_reads:
            return
        # Before the first update, it is not known which loaders are for training.
        is_for_training = not windows.reads.trained_on or any(
            each.seed == loader.seed for each in windows.reads.trained_on
        )
        pass_key = loader.seed, loader.num_passes
        if is_for_training and pass_key != self._pass_key:
            self._pass_key = pass_key
            self._copies.clear()
        self._copy_if_due()

    def before_learning(self) -> None:
        """Copy the state before a micro-batch if a copy is due and the loop uses no prepared loader."""
        windows = self.run.windows
        if not windows.reads.active_loaders and not windows.is_unfinished:
            self._copy_if_due()

    def _copy_if_due(self) -> None:
        """Copy the run's state if `distance` updates have passed since the last copy. Keep the two newest copies."""
        run, num_updates = self.run, self.run.clock.num_updates
        if holds_averages(run):  # the copy would hold averaged weights in place of the trained ones
            return
        is_due = not self._copies or num_updates - self._copies[-1].num_updates >= self.distance
        if is_due and run.prepared.optimizers:
            self._copies = [*self._copies[-1:], RunCopy(run, self.counters, self.list_registered())]

    def undo_updates(self) -> int | None:
        """Restore the older of the two kept copies of the run's state.

        This undoes between `distance` and twice `distance` updates, or fewer if the current pass over the data began
        more recently.

        Returns:
            Number of updates of the restored state, or None if there is no copy.
        """
        if not self._copies:
            return None
        del self._copies[1:]
        self._copies[0].restore()
        return self._copies[0].num_updates

    def drop_copies(self) -> None:
        """Drop all copies, because the run continues from another state, such as a loaded checkpoint."""
        self._copies, self._pass_key = [], None
