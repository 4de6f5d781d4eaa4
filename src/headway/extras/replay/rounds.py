"""Replay of collectives: a rank that ran out of memory joins its peers' collectives up to the next vote.

In a vote, all ranks report whether their batch has succeeded. A round is the interval between two votes.

::

    healthy rank    gather, gather, ...        gather, ..., reduce, vote       each is logged before it is entered
    failed rank     gather, gather, out of memory
                        reports it on the control plane; peers' threads publish their logs
                                               gather, ..., reduce, vote       with its own shards, zero gradients

This is needed if forward passes contain collectives. The control plane does not use collectives, and
`CollectiveReplayer` is a thread, so both work while the other ranks wait inside a collective. The thread reads the
control plane only while this rank makes no progress, so a run without failures sends nothing. If several ranks fail at
different places, each of them joins the collectives that any rank has entered. It skips those that no rank of its group
will enter. If a rank cannot join, it reports the reason, and the run ends on all ranks with this reason.

A round has these keys on the control plane, below `replay/NUMBER/`:

- `RANK/INDEX` for each collective that a rank has entered
- `failed/RANK` if the rank's memory ran out and its earlier collectives have been published
- `failed` if any rank's memory ran out
- `lost`, with the reason, if the round cannot be finished

The rank that set a key deletes it after the vote.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError

from headway.core.runtime import process
from headway.core.runtime.collective_log import CollectiveLog, RecordedCollective, is_vote, parse_record
from headway.core.runtime.control_plane import control
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.heartbeat import stop_before_shutdown
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.replay_protocol import ReplayStrategy
from headway.errors import CollectiveError, ControlPlaneError, HeadwayError, MemoryExhausted
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
        log_of_rank, last_position = self.collective_log, (-1, -1)
        while not self._is_stopped.wait(_CHECK_SECONDS):
            round_number, index = log_of_rank.number, log_of_rank.position
            is_waiting = log_of_rank.is_open and (round_number, index) == last_position
            last_position = round_number, index
            try:
                if log_of_rank.has_listener:
                    self._abort_if_lost(log_of_rank.number)
                elif is_waiting and self._control_plane.has_key(f"replay/{round_number}/failed"):
                    log_of_rank.add_listener(round_number, self.publish)
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
        """Publish that this rank enters a collective.

        Args:
            index: Index of the collective in the current round. A round is the interval between two votes of all ranks
                on whether the batch has succeeded.
            text: Serialized description of the collective.
        """
        self._set_key(f"{self.rank}/{index}", text)

    def publish_failure(self) -> None:
        """Publish the collectives that this rank has entered, then the fact that its memory ran out."""
        self.collective_log.add_listener(self.collective_log.number, self.publish)
        self._set_key(f"failed/{self.rank}")
        self._set_key("failed")

    def publish_abort(self, text: str) -> None:
        """Publish that the batch cannot be replayed, which ends the run on all ranks.

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
        key = f"replay/{self.collective_log.number}/{name}"
        self._own_keys.append(key)
        self._control_plane.set(key, text.encode())


_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.05
"""Seconds between two polls of a rank that replays collectives. They double from the first to the second value."""


class Rounds:
    """Replay of collectives by a rank that ran out of memory, so that the other ranks do not hang.

    In a vote, all ranks report whether their batch has succeeded. The interval between two votes is called a round.

    Args:
        strategy: Strategy that takes part in collectives.
        runtime: Runtime of this process.
    """

    def __init__(self, strategy: ReplayStrategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._collective_log = runtime.scope.get_or_create(CollectiveLog)
        self._rank = runtime.rank
        self._timeout = runtime.timeout.total_seconds()

    @property
    def _replayer(self) -> CollectiveReplayer:
        return self._runtime.scope.get_or_create(CollectiveReplayer)

    # ---------------------------------------------------------------- begin and end

    def open_batch(self) -> None:
        """Start recording the collectives of a new batch, for other ranks that may fail. All ranks call it."""
        self._replayer.start()
        self._collective_log.begin_batch()

    def close_batch(self) -> None:
        """Stop recording the collectives of the batch."""
        self._collective_log.end_batch()

    def end_round(self) -> None:
        """End the current round, and delete the keys that this rank has published on the control plane.

        Called after a vote, in which all ranks report whether the batch has succeeded. A round is the interval between
        two votes.
        """
        self._replayer.end_round()

    # ---------------------------------------------------------------- a rank that has failed

    def join_remaining(self) -> None:
        """Take part in the collectives that other ranks still run for the batch, after this rank ran out of memory.

        Raises:
            MemoryExhausted: On all ranks, if this or another rank cannot take part in the collectives.
        """
        collective_log, start_time = self._collective_log, time.monotonic()
        try:
            if collective_log.is_in_collective:
                raise CollectiveError("it was inside an exchange, which cannot be entered twice")
            self._strategy.clean_up_failure()
            self._replayer.publish_failure()
            first_index = collective_log.position
            # This rank joins the collectives without making the calls that contain them. Checks of calls must not fail.
            with self._runtime.scope.get_or_create(Attendance).join_every_call():
                while (collective := self._find_next_collective()) is not None and not is_vote(collective):
                    self._join_or_skip(collective)
        except Exception as error:
            self.raise_if_lost(error)
            raise self._publish_abort(error) from error
        log.info(
            "took part in %d remaining collectives of the failed batch, %.2f s",
            collective_log.position - first_index,
            time.monotonic() - start_time,
            main_process_only=False,
        )

    def _join_or_skip(self, collective: RecordedCollective) -> None:
        """Take part in a collective if another rank of its process group has entered it. Otherwise skip it."""
        index = self._collective_log.position
        peers = [rank for rank in self._strategy.list_members(collective) if rank != self._rank]
        # Another process group can run a collective at the same index, so ask only the members of this rank's group.
        own_collective = self._find_collective(index, peers)
        if own_collective is None:
            self._collective_log.skip_collective()
        else:
            self._strategy.join_collective(own_collective)

    def _find_next_collective(self) -> RecordedCollective | None:
        """Return the next collective that any other rank has entered.

        Return None if all other ranks ran out of memory before they entered one.
        """
        other_ranks = [rank for rank in range(self._runtime.world_size) if rank != self._rank]
        return self._find_collective(self._collective_log.position, other_ranks)

    def _find_collective(self, index: int, ranks: Sequence[int]) -> RecordedCollective | None:
        """Return the collective with this index that one of the ranks has entered.

        Return None if all of these ranks ran out of memory before they entered it.

        Args:
            index: Index of the collective in the current round, which is the interval between two votes.
            ranks: Ranks to ask.

        Raises:
            ControlPlaneError: If a rank publishes nothing within the timeout.
        """
        replayer, deadline, pause = self._replayer, time.monotonic() + self._timeout, _FIRST_POLL_SECONDS
        remaining = list(ranks)
        while remaining:
            rank = remaining[0]
            # Check for failure first: a failed rank published its earlier collectives before its failure.
            has_failed = replayer.has_failed(rank)
            collective = replayer.read_collective(rank, index)
            if collective is not None:
                return collective
            if has_failed:
                remaining.pop(0)
                continue
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"rank {rank} did not publish its position within {self._timeout:g} s")
            self.raise_if_lost(None)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        # A failed rank may have replayed this collective since, because another rank had entered it.
        collectives = (replayer.read_collective(rank, index) for rank in ranks)
        return next((collective for collective in collectives if collective is not None), None)

    def _publish_abort(self, error: Exception) -> MemoryExhausted:
        """Publish that this rank cannot complete the collectives, and return the error to raise."""
        text = (
            f"memory ran out on rank {self._rank}, and it could not take part in what the others were still doing: {error}. "
            "End the run, and resume from a checkpoint with smaller batches"
        )
        self._replayer.publish_abort(text)
        return MemoryExhausted(text)

    def raise_if_lost(self, error: BaseException | None) -> None:
        """Raise an error if some rank is known to be unable to take part in the remaining collectives of the batch.

        Args:
            error: Error that this rank has caught, such as the error of a collective that was aborted for this reason.
                None: none was caught, so the control plane is not asked again. A MemoryExhausted is left to the caller.

        Raises:
            MemoryExhausted: If a rank cannot take part.
        """
        if error is not None and not self._collective_log.lost:
            # A rank that knew earlier may have closed the connection; it published the reason before that.
            with suppress(DistError, HeadwayError):
                self._replayer.read_failure_reason(self._collective_log.number)
        if self._collective_log.lost and not isinstance(error, MemoryExhausted):
            raise MemoryExhausted(self._collective_log.lost) from error
