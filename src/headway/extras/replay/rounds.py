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
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import DistError

from headway.core.runtime.collective_log import CollectiveLog, RecordedCollective, is_vote
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.replay_protocol import ReplayStrategy
from headway.errors import CollectiveError, ControlPlaneError, HeadwayError, MemoryExhausted
from headway.extras.replay.collective_replayer import CollectiveReplayer
from headway.log import get_logger

log = get_logger(__name__)

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
            MemoryExhausted: On all ranks, if this or another rank cannot take part in the collectives. The cause is the
                error that prevented it, such as a `CollectiveError`.
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
