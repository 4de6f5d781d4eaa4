"""Warnings in a run without `on_non_finite`: the first non-finite loss, and updates that fp16's gradient scaler skips.

They only report, so training does not wait for them: a loss on a device is read one update later. The guard that
prevents such updates is in `finite.py`.
"""

import math
from collections import deque
from itertools import count
from typing import NamedTuple

import torch

from headway.common import scope
from headway.core.runtime import events, process
from headway.core.runtime.control_plane import control
from headway.core.runtime.process import ProcessRuntime
from headway.core.runtime.readback import Readback
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.update_clock import UpdateClock
from headway.core.training.windows import AccumulationWindow, AccumulationWindows
from headway.log import get_logger

log = get_logger(__name__)

_NUM_SKIPS_TO_WARN = 20
"""Number of skipped updates after which a run that has made no update gets a warning.

Each of them halves fp16's loss scale, which begins at 65536. After 17 halvings it is below 1. If gradients overflow even
then, the scale is not the cause.
"""
_UPDATE_IS_MADE = (
    "Training continues with it, and later updates are unlikely to be useful: Accelerator(on_non_finite='skip'), 'stop' or 'raise' "
    "leaves such an update out on all ranks, and names gradients too"
)
_UPDATE_IS_SKIPPED = (
    "In fp16 an update whose gradients are not finite is left out on all ranks: weights stay as they were, and the loss scale is "
    "lowered. A run with many such losses learns little: Accelerator(on_non_finite='raise') ends it at the first one, and 'explain' "
    "reports where the value arose"
)


class NonFiniteNotice:
    """Warning about the first loss that is not finite, given once and on one rank.

    Args:
        windows: Accumulation windows of the run.
        clock: Update clock of the run.
        runtime: Runtime of this process.
        are_updates_skipped: Whether updates with non-finite gradients are skipped anyway, for example by fp16's
            gradient scaler. Default: False.
    """

    def __init__(
        self,
        windows: AccumulationWindows,
        clock: UpdateClock,
        runtime: ProcessRuntime,
        are_updates_skipped: bool = False,
    ) -> None:
        self._are_updates_skipped = are_updates_skipped
        self._windows = windows
        self._clock = clock
        self._runtime = runtime
        self._key = f"non_finite/{next(scope.get_or_create(_count_notices))}"  # key on the control plane
        # Losses of the current update, as pairs of (micro-batch, loss on a device).
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=4096)
        # Losses of earlier updates that are being copied to the host.
        self._pending_losses: deque[_PendingLosses] = deque()
        self._has_warned = False
        process.release_at_end(self._read_all)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Warn of a non-finite loss on the CPU, or record a loss on a device, which is read later.

        Do nothing after the first warning.

        Args:
            loss: Loss of the current micro-batch. A loss on the CPU must be one that is not finite.
        """
        if not self._has_warned:
            micro_batch, detached = self._windows.current.num_done, get_local_shard(loss.detach())
            if detached.device.type == "cpu":
                self._warn_of_loss(self._clock.num_updates + 1, micro_batch, detached.item())
            else:
                self._losses.append((micro_batch, detached))

    def check_arrived_losses(self) -> None:
        """Check earlier updates' losses that have arrived on the host, and start to copy those of this update.

        The host does not wait for the device.
        """
        while self._pending_losses and self._pending_losses[0].values.is_ready:
            self._read_losses()
        if self._losses:
            micro_batches, losses = zip(*self._losses)
            self._losses.clear()
            stacked = losses[0].reshape(1) if len(losses) == 1 else torch.stack(losses)
            self._pending_losses.append(_PendingLosses(self._clock.num_updates + 1, micro_batches, Readback(stacked)))

    def _read_all(self) -> None:
        """Read all losses whose copies from the device are pending."""
        while self._pending_losses:
            self._read_losses()

    def _read_losses(self) -> None:
        """Read the losses of the earliest update whose losses were not read yet. Wait for them if necessary."""
        pending = self._pending_losses.popleft()
        for micro_batch, loss in zip(pending.micro_batches, pending.values.read().tolist()):
            if not math.isfinite(loss) and not self._has_warned:
                self._warn_of_loss(pending.update, micro_batch, loss)

    def _warn_of_loss(self, update: int, micro_batch: int, loss: float) -> None:
        """Warn about a loss that is not finite, on the first rank that finds one.

        Other ranks log nothing, because their losses follow from the first one: a non-finite gradient makes the
        weights of all ranks non-finite. Listeners of the process are notified in any case.

        Args:
            update: Number of the update, from 1.
            micro_batch: Number of the micro-batch in its accumulation window, from 1.
            loss: The loss.
        """
        self._has_warned = True
        rank = self._runtime.rank
        losses = {str(rank): f"{loss} in micro-batch {micro_batch}"}
        events.notify_listeners("non_finite", source=self._clock, update=update, action="none", losses=losses)
        if control.current().set_once(self._key, str(rank).encode()) != str(rank).encode():
            return  # another rank has already logged the warning
        # If the update before was made, its gradients may have made the weights non-finite.
        is_earlier_possible = update > 1 and not self._are_updates_skipped
        cause = f", or a gradient of update {update - 1} was not finite" if is_earlier_possible else ""
        log.warning(
            "update %d: the loss of micro-batch %d was %s on rank %d%s. %s (docs/non_finite.md)",
            update,
            micro_batch,
            loss,
            rank,
            cause,
            _UPDATE_IS_SKIPPED if self._are_updates_skipped else _UPDATE_IS_MADE,
            main_process_only=False,
        )


class _PendingLosses(NamedTuple):
    """Losses of one update that are being copied from the device to the host.

    Attributes:
        update: Number of the update, from 1.
        micro_batches: Number of each loss's micro-batch in its accumulation window, from 1.
        values: The losses, one for each micro-batch number.
    """

    update: int
    micro_batches: tuple[int, ...]
    values: Readback


class SkippedUpdates:
    """Counter of the updates that fp16's gradient scaler skips, shown in progress bars.

    Args:
        clock: Update clock that keeps the count.
    """

    def __init__(self, clock: UpdateClock) -> None:
        self._clock = clock

    def record_skip(self, window: AccumulationWindow) -> None:
        """Record that an optimizer skipped its step on the gradients of a closed accumulation window.

        Several optimizers that skip their steps on one window count as one skipped update. If all of the first 20
        updates were skipped, log a warning.
        """
        clock = self._clock
        if not clock.count_skip(window.number):
            return
        events.notify_listeners("skipped_update", source=clock, num_skipped=clock.num_skipped)
        if self._format_skipped not in events.get_progress_texts():
            events.get_progress_texts().append(self._format_skipped)
            process.release_at_end(self._remove_from_bars)
        if clock.num_skipped == _NUM_SKIPS_TO_WARN and not clock.num_updates:
            log.warning(
                "fp16 has skipped all of the first %d updates: nothing was learned. Gradients overflow at every "
                "loss scale, so losses "
                "or weights are not finite, or values in the model exceed 65504, float16's largest (a mask of -1e9, a large norm). "
                "mixed_precision='bf16' has float32's range; on_non_finite='raise' says whether it is the loss",
                clock.num_skipped,
            )

    def _format_skipped(self) -> str:
        """Return the text that progress bars show."""
        return f"{self._clock.num_skipped} updates skipped"

    def _remove_from_bars(self) -> None:
        """Remove the number of skipped updates from the progress bars."""
        if self._format_skipped in events.get_progress_texts():
            events.get_progress_texts().remove(self._format_skipped)


def _count_notices() -> "count[int]":
    """Return the counter that numbers the `NonFiniteNotice` objects of this process.

    Every rank creates them in the same order, so a number identifies the same notice on all ranks.
    """
    return count()
