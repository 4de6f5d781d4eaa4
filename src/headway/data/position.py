"""Where a loader stands: the epoch and the samples consumed in it, independent of ranks, workers and prefetching."""

from typing import Any

from headway.data.shard import Share
from headway.errors import StateError

NOTHING = Share([], None, None, 0, False)
"""What is known before the first batch."""


class Position:
    """The epoch in progress (between two: the next one) and how many of its samples were handed out.

    A pass that is broken off stays where it is, so that a checkpoint taken then resumes there; the next pass of the
    same process begins the next epoch.

    Attributes:
        epoch: its number.
        consumed: real samples of all ranks together that were yielded in it.
        previous: the same before the batch last yielded.
        is_running: a pass is in progress or was broken off.
        share: what is known about the batch last yielded.
        is_stopped: passes end after the batch in hand, and later ones are empty.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.consumed = 0
        self.previous = 0
        self.is_running = False
        self.is_stopped = False
        self.share = NOTHING
        self._is_resuming = False
        self._pinned: int | None = None

    def begin(self) -> None:
        """A pass begins: where the state was loaded, else at the start of an epoch."""
        if self.is_running:
            self.finish()
        self.is_running, self._is_resuming, self.share = True, False, NOTHING

    def finish(self) -> None:
        """The epoch is over."""
        self.epoch = self.epoch + 1 if self._pinned is None else self._pinned
        self.consumed, self.is_running, self._pinned = 0, False, None

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

    def state_dict(self) -> dict[str, Any]:
        """`{"epoch", "consumed"}`."""
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        self.is_stopped = False
