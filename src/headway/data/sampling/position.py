"""Where a loader stands: the epoch and the samples consumed in it, independent of ranks, workers and prefetching."""

import sys

from headway.data.feeds import State
from headway.data.sampling.shard import RankBatch
from headway.errors import StateError

NOTHING = RankBatch([], None, None, 0, False)
"""What is known before the first batch."""


class Position:
    """The epoch in progress (between two: the next one) and how many of its samples were handed out.

    A pass that was left (by `break`, by an `islice` or `zip` that ends first) stays where it is, as a state of the loader
    alone. For the run it is over, because this process goes on with the next epoch, and so must a run that is resumed from a
    checkpoint saved afterwards. While an exception is handled that came out of the loop, the pass is not over: who saves
    then wants to resume there.

    Attributes:
        epoch: its number.
        consumed: real samples of all ranks together that were yielded in it.
        previous: the same before the batch last yielded.
        share: what is known about the batch last yielded.
        is_running: a pass is in progress, or was left.
        num_passes: begun so far.
        num_over: so many of the next passes are empty: the run that is resumed has made them in its epoch.
        is_stopped: passes end after the batch in hand, and later ones are empty.
        is_at_end: a state was loaded that was saved with its epoch's last batch in hand.
        is_from_start: the next pass reads the loaded epoch from its first batch, unless it is told how many to skip.
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
        """Was the pass left for good?"""
        return bool(self._left_under) and self._left_under[0] is sys.exc_info()[1]

    @property
    def is_waiting(self) -> bool:
        """Was a state loaded in the middle of a pass that has not begun yet?"""
        return self._is_resuming and self.consumed > 0

    @property
    def following(self) -> int:
        """The epoch after this one."""
        return self.epoch + 1 if self._pinned is None else self._pinned

    def is_over_already(self) -> bool:
        """Was the pass that is to begin made before the run was resumed?"""
        is_over = self.num_over > 0
        self.num_over -= is_over
        return is_over

    def begin(self) -> int:
        """A pass begins, where the state was loaded, else at the start of an epoch; returns the pass's number."""
        if self.is_running:
            self.finish()
        self.is_running, self._is_resuming, self.share = True, False, NOTHING
        self.is_at_end = self.is_from_start = False
        self.num_passes += 1
        return self.num_passes

    def leave(self, number: int, handled: BaseException | None) -> None:
        """The pass of this number ends before its data does; nothing where it was stopped, or another has begun.

        Args:
            number: as `begin` returned it.
            handled: the exception that was being handled then; one that leaves the loop is not handled yet.
        """
        if self.is_running and number == self.num_passes and not self.is_stopped:
            self._left_under = [handled]

    def finish(self) -> None:
        """The epoch is over."""
        self.epoch = self.following
        self.consumed, self.is_running, self._pinned = 0, False, None
        self._is_resuming = self.is_from_start = False
        self._left_under.clear()

    def pin(self, epoch: int) -> bool:
        """The next pass is this epoch; one that is to be resumed stays where it is if it is the same.

        Returns:
            Does a loaded state still hold?
        """
        if self.is_running:
            self._pinned = epoch
        elif not (self._is_resuming and epoch == self.epoch):
            is_resuming, self._is_resuming = self._is_resuming, False
            self.epoch, self.consumed = epoch, 0
            return not is_resuming
        return True

    def state_dict(self) -> State:
        """`{"epoch", "consumed"}`, and with its last batch in hand `is_over`."""
        is_over = self.is_running and self.share.is_last
        return {"epoch": self.epoch, "consumed": self.consumed, **({"is_over": True} if is_over else {})}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            StateError: the state lacks one of the two numbers.
        """
        missing = [name for name in ("epoch", "consumed") if name not in state]
        if missing:
            raise StateError(
                f"a loader's state needs epoch and consumed, got {sorted(state)}; pass what its state_dict() returned"
            )
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        self.is_running, self._is_resuming, self._pinned = False, True, None
        self.is_at_end = state.get("is_over", False) is True
        self.is_stopped, self.is_from_start, self.num_over = False, False, 0
        self._left_under.clear()
