"""Publish which collectives this rank has entered, for a rank that ran out of memory and must join them.

In a vote, all ranks report whether their batch has succeeded. A round is the interval between two votes. The keys of a
round on the control plane are below `replay/NUMBER/`:

- `RANK/INDEX` for each collective that a rank has entered
- `failed/RANK` if the rank's memory ran out and its earlier collectives have been published
- `failed` if any rank's memory ran out
- `lost`, with the reason, if the round cannot be finished

The rank that set a key deletes it after the vote.
"""

import threading
from datetime import timedelta

from torch.distributed import DistError

from headway.core.runtime import process
from headway.core.runtime.collective_log import CollectiveLog, RecordedCollective, parse_record
from headway.core.runtime.control_plane import control
from headway.core.runtime.heartbeat import stop_before_shutdown
from headway.errors import HeadwayError
from headway.log import get_logger

log = get_logger(__name__)

_CHECK_SECONDS = 0.1
"""Seconds between two checks of whether this rank makes progress."""
_READ_TIMEOUT = timedelta(seconds=60)
"""Timeout for reading a value from the control plane."""


class CollectiveReplayer:
    """Thread that publishes which collectives this rank has entered, even while the rank waits in a collective.

    A rank that ran out of memory reads from the control plane which collectives the other ranks have entered, and joins
    them. Each process runtime has one replayer. It uses neither models nor strategies.

    Attributes:
        collective_log: Log of the collectives that this rank has entered.
        rank: Global rank of this process.
    """

    def __init__(self) -> None:
        runtime = process.current()
        self.collective_log = runtime.scope.get_or_create(CollectiveLog)
        self.rank = runtime.rank
        self._control_plane = control.current()
        self._own_keys: list[str] = []  # keys that this rank has set in the current round
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._publish_while_waiting, name="headway-replayer", daemon=True)

    def start(self) -> None:
        """Start the background thread. It runs until `stop` is called, or the process runtime ends."""
        if not self._thread.is_alive() and not self._is_stopped.is_set():
            self._thread.start()
            stop_before_shutdown(self.stop)
            process.release_at_end(self.stop)

    def stop(self) -> None:
        """Stop the thread, and wait up to five seconds for its end. It cannot be started again."""
        self._is_stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _publish_while_waiting(self) -> None:
        """Watch the collectives of this rank in a thread, until it is stopped.

        While the rank waits in a collective, and another rank has run out of memory, start to publish this rank's
        collectives, so that the other rank can join them.
        """
        own_log = self.collective_log
        last_position = (-1, -1)
        while not self._is_stopped.wait(_CHECK_SECONDS):
            round_number = own_log.number
            position = (round_number, own_log.position)
            is_waiting = own_log.is_open and position == last_position
            last_position = position
            try:
                if own_log.has_listener:  # this rank already publishes its collectives
                    self._abort_if_lost(own_log.number)
                elif is_waiting and self._control_plane.has_key(f"replay/{round_number}/failed"):
                    own_log.add_listener(round_number, self.publish)
            except (DistError, HeadwayError) as error:
                log.debug("the control plane is lost: %s", error)
                return

    def _abort_if_lost(self, number: int) -> None:
        """Abort the process groups of this rank if some rank cannot join the remaining collectives of a round."""
        if not self.collective_log.lost and self.read_failure_reason(number):
            process.abort_group()  # nothing else wakes a rank that waits inside a collective

    def read_failure_reason(self, number: int) -> str:
        """Return the reason why some rank cannot join the batch's remaining collectives, or "" if there is none.

        Args:
            number: Number of the round. A round is the interval between two votes of all ranks on the batch's success.
        """
        key = f"replay/{number}/lost"
        if not self.collective_log.lost and self._control_plane.has_key(key):
            self.collective_log.lost = self._control_plane.get(key, _READ_TIMEOUT).decode()
        return self.collective_log.lost

    # ---------------------------------------------------------------- messages

    def publish(self, index: int, text: str) -> None:
        """Publish on the control plane that this rank enters a collective.

        Args:
            index: Index of the collective in the current round. A round is the interval between two votes of all ranks
                on whether the batch has succeeded.
            text: Serialized description of the collective.
        """
        self._set_key(f"{self.rank}/{index}", text)

    def publish_failure(self) -> None:
        """Publish on the control plane which collectives this rank has entered, then that its memory ran out."""
        self.collective_log.add_listener(self.collective_log.number, self.publish)
        self._set_key(f"failed/{self.rank}")
        self._set_key("failed")

    def publish_abort(self, text: str) -> None:
        """Publish on the control plane that the batch cannot be replayed, which ends the run on all ranks.

        Args:
            text: Reason, which the error on all ranks contains.
        """
        self._set_key("lost", text)
        self._set_key("failed")

    def has_failed(self, rank: int) -> bool:
        """Whether the given rank has run out of memory in the current round.

        A round is the interval between two votes, in which ranks report whether their batch has succeeded.
        """
        return self._control_plane.has_key(f"replay/{self.collective_log.number}/failed/{rank}")

    def read_collective(self, rank: int, index: int) -> RecordedCollective | None:
        """Return the collective with this index that a rank has entered, or None if the rank has not published it.

        Args:
            rank: Rank that has entered the collective.
            index: Index of the collective in the current round, which is the interval between two votes.
        """
        key = f"replay/{self.collective_log.number}/{rank}/{index}"
        return parse_record(self._control_plane.get(key, _READ_TIMEOUT)) if self._control_plane.has_key(key) else None

    def end_round(self) -> None:
        """Delete this rank's log of collectives from the control plane, and start a new log.

        Called after all ranks have voted on whether the batch has succeeded.
        """
        self.collective_log.begin_round()
        own_keys, self._own_keys = self._own_keys, []
        for key in own_keys:
            self._control_plane.delete(key)

    def _set_key(self, name: str, text: str = "") -> None:
        """Set a key of the current round on the control plane. `end_round` deletes it."""
        key = f"replay/{self.collective_log.number}/{name}"
        self._own_keys.append(key)
        self._control_plane.set(key, text.encode())
