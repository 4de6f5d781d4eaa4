"""Position of a loader: epoch and number of consumed samples, which do not depend on ranks, workers or prefetching."""

import sys

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.shard import RankBatch
from headway.errors import StateError

NO_BATCH = RankBatch([], None, None, 0, False)
"""`RankBatch` of a position before the first batch of a pass. Compare with `is`."""


class Position:
    """Position of a loader: its epoch and the number of samples that it has yielded in this epoch.

    A pass can be left early by `break`, or by an `islice` or `zip` that ends first. The loader's own state then
    keeps the position in that pass. For the run, however, the epoch is over. This process continues with the next
    epoch, and so does a run that resumes from a later checkpoint. While an exception from the loop is being handled,
    the pass is not over, because a checkpoint saved at that time is meant to resume in this pass.

    Attributes:
        epoch: Number of the current epoch. Between two passes, number of the next epoch.
        num_consumed: Number of the epoch's samples yielded so far on all ranks together, without padding.
        num_consumed_before: Value of `num_consumed` before the latest batch.
        rank_batch: `RankBatch` of the latest batch, with its row counts; `NO_BATCH` before the first batch of a pass.
        num_passes: Number of passes started so far.
        num_empty_passes: Number of passes to make empty, starting with the next one. The run had finished them before it
            was saved.
        is_running: Whether a pass is in progress or was left early.
        was_left_early: Whether the latest pass was left before its data ended, and no other pass has started since.
        is_stopped: Whether passes end after the current batch and later ones are empty.
        is_at_end: Whether the loaded state was saved while the last batch of its epoch was being processed.
        restarts_epoch: Whether the next pass reads the loaded epoch from its first batch, unless batches are skipped
            explicitly.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.num_consumed = 0
        self.num_consumed_before = 0
        self.is_stopped = False
        self.is_at_end = False
        self.restarts_epoch = False
        self.rank_batch = NO_BATCH
        self.is_running = False
        self._is_resuming = False  # whether the next pass continues a loaded position
        self._requested_next_epoch: int | None = None  # epoch that `set_epoch` has set for the next pass
        self.num_passes = 0
        self.num_empty_passes = 0
        self.was_left_early = False
        self._exception_at_exit: BaseException | None = None  # being handled when the latest pass was left early

    @property
    def is_abandoned(self) -> bool:
        """Whether the latest pass was left early and will not be continued.

        False while an exception is being handled that has ended the loop. A checkpoint that is saved by the handler
        then resumes in the pass.
        """
        return self.was_left_early and self._exception_at_exit is sys.exc_info()[1]

    @property
    def is_resume_pending(self) -> bool:
        """Whether a state from the middle of a pass was loaded, and the pass has not started yet."""
        return self._is_resuming and self.num_consumed > 0

    @property
    def next_epoch(self) -> int:
        """Number of the epoch after the current one. A number set by `set_next_epoch` during the pass has precedence."""
        return self.epoch + 1 if self._requested_next_epoch is None else self._requested_next_epoch

    def take_empty_pass(self) -> bool:
        """Return whether the next pass must be empty, and if so, reduce `num_empty_passes` by 1.

        Such a pass was already finished before the run was resumed.
        """
        if self.num_empty_passes == 0:
            return False
        self.num_empty_passes -= 1
        return True

    def start_pass(self) -> int:
        """Start a pass at the loaded position, or else at the start of an epoch. Return the number of the pass, from 1.

        If the previous pass is unfinished, its epoch is ended first.
        """
        if self.is_running:
            self.end_epoch()
        self.is_running = True
        self._is_resuming = False
        self.rank_batch = NO_BATCH
        self.is_at_end = False
        self.restarts_epoch = False
        self.num_passes += 1
        return self.num_passes

    def record_exit(self, pass_number: int, handled_exception: BaseException | None) -> None:
        """Record that a pass was left before its data ended.

        This has no effect if the loader was stopped, or if another pass has started.

        Args:
            pass_number: Number of the pass, as returned by `start_pass`.
            handled_exception: Exception that was already being handled when the pass was left; None if there was none. An
                exception that is just leaving the loop is not included.
        """
        if self.is_running and pass_number == self.num_passes and not self.is_stopped:
            self.was_left_early = True
            self._exception_at_exit = handled_exception

    def end_epoch(self) -> None:
        """End the epoch. The next pass reads the next epoch from its start."""
        self.epoch = self.next_epoch
        self.num_consumed = 0
        self.is_running = False
        self._requested_next_epoch = None
        self._is_resuming = False
        self.restarts_epoch = False
        self.was_left_early = False
        self._exception_at_exit = None

    def set_next_epoch(self, epoch: int) -> bool:
        """Set the epoch of the next pass. A loaded position is kept only if it belongs to the given epoch.

        During a pass, the number is stored and takes effect when the current epoch ends.

        Args:
            epoch: Number of the epoch.

        Returns:
            False if a loaded position was discarded because it belongs to another epoch, else True.
        """
        if self.is_running:
            self._requested_next_epoch = epoch
            return True
        if self._is_resuming and epoch == self.epoch:
            return True
        has_loaded_position = self._is_resuming
        self._is_resuming = False
        self.epoch = epoch
        self.num_consumed = 0
        return not has_loaded_position

    def state_dict(self) -> State:
        """Return the position as a dict with the keys "epoch" and "consumed".

        It also has the key "is_over", with the value True, if the current batch is the last of the epoch.
        """
        is_over = self.is_running and self.rank_batch.is_last
        return {"epoch": self.epoch, "consumed": self.num_consumed, **({"is_over": True} if is_over else {})}

    def load_state_dict(self, state: State) -> None:
        """Load a position that `state_dict` returned. The next pass resumes from it.

        Raises:
            StateError: If the state lacks `epoch` or `num_consumed`.
        """
        missing = [name for name in ("epoch", "consumed") if name not in state]
        if missing:
            raise StateError(
                f"a loader's state needs epoch and consumed, got {sorted(state)}; pass what its state_dict() returned"
            )
        self.epoch = int(state["epoch"])
        self.num_consumed = int(state["consumed"])
        self.is_running = False
        self._is_resuming = True
        self._requested_next_epoch = None
        self.is_at_end = state.get("is_over", False) is True
        self.is_stopped = False
        self.restarts_epoch = False
        self.num_empty_passes = 0
        self.was_left_early = False
        self._exception_at_exit = None
