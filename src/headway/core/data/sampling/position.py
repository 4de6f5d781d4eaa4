"""Position of a loader: epoch and number of consumed samples, which do not depend on ranks, workers or prefetching."""

import sys

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.shard import RankBatch
from headway.errors import StateError

NOTHING = RankBatch([], None, None, 0, False)
"""`RankBatch` of a position before the first batch of a pass."""


class Position:
    """Position of a loader: its epoch and the number of samples that it has yielded in this epoch.

    A pass can be left early by `break`, or by an `islice` or `zip` that ends first. The loader's own state then
    keeps the position in that pass. For the run, however, the epoch is over. This process continues with the next
    epoch, and so does a run that resumes from a later checkpoint. While an exception from the loop is being handled,
    the pass is not over, because a checkpoint saved at that time is meant to resume in this pass.

    Attributes:
        epoch: Number of the current epoch. Between two passes, number of the next epoch.
        consumed: Number of the epoch's samples yielded so far on all ranks together, without padding.
        previous: Value of `consumed` before the latest batch.
        share: `RankBatch` of the latest batch, with its row counts.
        is_running: Whether a pass is in progress or was left early.
        num_passes: Number of passes started so far.
        num_over: Number of passes to make empty, starting with the next one. The run had finished them before it was
            saved.
        is_stopped: Whether passes end after the current batch and later ones are empty.
        is_at_end: Whether the loaded state was saved while the last batch of its epoch was being processed.
        is_from_start: Whether the next pass reads the loaded epoch from its first batch, unless batches are skipped
            explicitly.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.consumed = 0
        self.previous = 0
        self.is_stopped = False
        self.is_at_end = False
        self.is_from_start = False
        self.share = NOTHING
        self.is_running = False
        self._is_resuming = False
        self._pinned: int | None = None
        self.num_passes = 0
        self.num_over = 0
        self._left_under: list[BaseException | None] = []

    @property
    def is_left(self) -> bool:
        """Whether the latest pass was left early and will not be continued."""
        return bool(self._left_under) and self._left_under[0] is sys.exc_info()[1]

    @property
    def is_waiting(self) -> bool:
        """Whether a state from the middle of a pass was loaded, and the pass has not started yet."""
        return self._is_resuming and self.consumed > 0

    @property
    def next_epoch(self) -> int:
        """Number of the epoch after the current one. A number set with `pin_epoch` during the pass takes precedence."""
        return self.epoch + 1 if self._pinned is None else self._pinned

    def is_over_already(self) -> bool:
        """Whether the next pass was already finished before the run was resumed, so that it must be empty.

        Each call that returns True reduces `num_over` by 1.
        """
        is_over = self.num_over > 0
        self.num_over -= is_over
        return is_over

    def start_pass(self) -> int:
        """Start a pass at the loaded position, or else at the start of an epoch. Return the number of the pass, from 1.

        If the previous pass is unfinished, its epoch is ended first.
        """
        if self.is_running:
            self.end_epoch()
        self.is_running = True
        self._is_resuming = False
        self.share = NOTHING
        self.is_at_end = False
        self.is_from_start = False
        self.num_passes += 1
        return self.num_passes

    def record_exit(self, number: int, handled: BaseException | None) -> None:
        """Record that a pass was left before its data ended.

        This has no effect if the loader was stopped, or if another pass has started.

        Args:
            number: Number of the pass, as returned by `start_pass`.
            handled: Exception that was already being handled when the pass was left; None if there was none. An
                exception that is just leaving the loop is not included.
        """
        if self.is_running and number == self.num_passes and not self.is_stopped:
            self._left_under = [handled]

    def end_epoch(self) -> None:
        """End the epoch. The next pass reads the next epoch from its start."""
        self.epoch = self.next_epoch
        self.consumed = 0
        self.is_running = False
        self._pinned = None
        self._is_resuming = False
        self.is_from_start = False
        self._left_under.clear()

    def pin_epoch(self, epoch: int) -> bool:
        """Set the epoch of the next pass. A loaded position is kept only if it belongs to the given epoch.

        During a pass, the number is stored and takes effect when the current epoch ends.

        Args:
            epoch: Number of the epoch.

        Returns:
            False if a loaded position was discarded because it belongs to another epoch, else True.
        """
        if self.is_running:
            self._pinned = epoch
        elif not (self._is_resuming and epoch == self.epoch):
            is_resuming, self._is_resuming = self._is_resuming, False
            self.epoch = epoch
            self.consumed = 0
            return not is_resuming
        return True

    def state_dict(self) -> State:
        """Return the position as a dict with the keys "epoch" and "consumed".

        It also has the key "is_over", with the value True, if the current batch is the last of the epoch.
        """
        is_over = self.is_running and self.share.is_last
        return {"epoch": self.epoch, "consumed": self.consumed, **({"is_over": True} if is_over else {})}

    def load_state_dict(self, state: State) -> None:
        """Load a position that `state_dict` returned. The next pass resumes from it.

        Raises:
            StateError: If the state lacks `epoch` or `consumed`.
        """
        missing = [name for name in ("epoch", "consumed") if name not in state]
        if missing:
            raise StateError(
                f"a loader's state needs epoch and consumed, got {sorted(state)}; pass what its state_dict() returned"
            )
        self.epoch = int(state["epoch"])
        self.consumed = int(state["consumed"])
        self.is_running = False
        self._is_resuming = True
        self._pinned = None
        self.is_at_end = state.get("is_over", False) is True
        self.is_stopped = False
        self.is_from_start = False
        self.num_over = 0
        self._left_under.clear()
