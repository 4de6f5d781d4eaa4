"""Warnings in a run without `on_non_finite`: the first non-finite loss, and updates that fp16's gradient scaler skips.

They only report, so training does not wait for them: a loss on a device is read one update later. The guard that
prevents such updates is in `finite.py`.
"""

import math
from collections import deque
from itertools import count

import torch

from headway.common import scope
from headway.core.runtime import events, process
from headway.core.runtime.control_plane import control
from headway.core.runtime.process import ProcessRuntime
from headway.core.runtime.readback import Readback
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.windows import AccumulationWindow, AccumulationWindows, UpdateClock
from headway.log import get_logger

log = get_logger(__name__)

_NUM_HOPELESS = 20
"""Number of halvings after which fp16's initial loss scale, 65536, is below 1.

If gradients overflow even then, the scale is not the cause.
"""
_GOES_ON = (
    "Training goes on with it, and nothing after it is likely to be of use: Accelerator(on_non_finite='skip'), 'stop' or 'raise' "
    "leaves such an update out on all ranks, and names gradients too"
)
_LEFT_OUT = (
    "In fp16 an update whose gradients are not finite is left out on all ranks: weights stay as they were, and the loss scale is "
    "lowered. A run with many such losses learns little: Accelerator(on_non_finite='raise') ends it at the first one, and 'explain' "
    "says where the value arose"
)


class NonFiniteNotice:
    """Warning about the first loss that is not finite, given once and on one rank.

    Args:
        windows: Accumulation windows of the run.
        clock: Update clock of the run.
        runtime: Runtime of this process.
        is_left_out: Whether updates with non-finite gradients are skipped anyway, for example by fp16's gradient
            scaler.
    """

    def __init__(
        self, windows: AccumulationWindows, clock: UpdateClock, runtime: ProcessRuntime, is_left_out: bool = False
    ) -> None:
        self._is_left_out = is_left_out
        self._windows = windows
        self._clock = clock
        self._runtime = runtime
        self._key = f"non_finite/{next(scope.get_or_create(_count_notices))}"
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=4096)
        self._asked: deque[tuple[int, list[int], Readback]] = deque()
        self._is_told = False
        process.release_at_end(self._read_all)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Warn of a non-finite loss on the CPU, or record a loss on a device, which is read later.

        Do nothing after the first warning.

        Args:
            loss: Loss of the current micro-batch. A loss on the CPU must be one that is not finite.
        """
        if not self._is_told:
            micro_batch, plain = self._windows.current.num_done, get_local_shard(loss.detach())
            if plain.device.type == "cpu":
                self._warn_of_loss(self._clock.num_updates + 1, micro_batch, plain.item())
            else:
                self._losses.append((micro_batch, plain))

    def check_arrived_losses(self) -> None:
        """Check earlier updates' losses that have arrived on the host, and start to copy those of this update."""
        while self._asked and self._asked[0][-1].is_ready:
            self._read_losses()
        if self._losses:
            numbers, losses = zip(*self._losses)
            self._losses.clear()
            together = losses[0].reshape(1) if len(losses) == 1 else torch.stack(losses)
            self._asked.append((self._clock.num_updates + 1, list(numbers), Readback(together)))

    def _read_all(self) -> None:
        while self._asked:
            self._read_losses()

    def _read_losses(self) -> None:
        update, numbers, asked = self._asked.popleft()
        for micro_batch, loss in zip(numbers, asked.read().tolist()):
            if not math.isfinite(loss) and not self._is_told:
                self._warn_of_loss(update, micro_batch, loss)

    def _warn_of_loss(self, update: int, micro_batch: int, loss: float) -> None:
        """Warn about a loss that is not finite, on the first rank that finds one.

        Other ranks log nothing, because their losses follow from the first one: a non-finite gradient makes the
        weights of all ranks non-finite. Listeners of the process are notified in any case.
        """
        self._is_told = True
        rank = self._runtime.rank
        told = {str(rank): f"{loss} in micro-batch {micro_batch}"}
        events.notify_listeners("non_finite", source=self._clock, update=update, action="none", losses=told)
        if control.current().set_once(self._key, str(rank).encode()) != str(rank).encode():
            return
        cause = f", or a gradient of update {update - 1} was not finite" if update > 1 and not self._is_left_out else ""
        log.warning(
            "update %d: the loss of micro-batch %d was %s on rank %d%s. %s (docs/non_finite.md)",
            update,
            micro_batch,
            loss,
            rank,
            cause,
            _LEFT_OUT if self._is_left_out else _GOES_ON,
            main_process_only=False,
        )


class SkippedUpdates:
    """Counter of the updates that fp16's gradient scaler skips, shown in progress bars.

    Args:
        clock: Update clock that keeps the count.
    """

    def __init__(self, clock: UpdateClock) -> None:
        self._clock = clock

    def record_skip(self, window: AccumulationWindow) -> None:
        """Record that an optimizer skipped its step on the gradients of a closed accumulation window."""
        clock = self._clock
        if not clock.count_skip(window.number):
            return
        events.notify_listeners("skipped_update", source=clock, num_skipped=clock.num_skipped)
        if self._format_skipped not in events.get_progress_texts():
            events.get_progress_texts().append(self._format_skipped)
            process.release_at_end(self._leave_bars)
        if clock.num_skipped == _NUM_HOPELESS and not clock.num_updates:
            log.warning(
                "fp16 has skipped all of the first %d updates: nothing was learned. Gradients overflow at every "
                "loss scale, so losses "
                "or weights are not finite, or values in the model exceed 65504, float16's largest (a mask of -1e9, a large norm). "
                "mixed_precision='bf16' has float32's range; on_non_finite='raise' says whether it is the loss",
                clock.num_skipped,
            )

    def _format_skipped(self) -> str:
        return f"{self._clock.num_skipped} updates skipped"

    def _leave_bars(self) -> None:
        if self._format_skipped in events.get_progress_texts():
            events.get_progress_texts().remove(self._format_skipped)


def _count_notices() -> "count[int]":
    """Return the counter that numbers the `NonFiniteNotice` objects of this process.

    Every rank creates them in the same order, so a number identifies the same notice on all ranks.
    """
    return count()
