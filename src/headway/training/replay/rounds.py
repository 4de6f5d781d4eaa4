"""Where forwards are exchanges: how a rank whose memory ran out comes to the vote at which the others will learn of it.

::

    healthy rank    gather, gather, ...        gather, ..., reduce, vote       each noted in its log before it is entered
    failed rank     gather, gather, out of memory
                        says so on the control plane; the others' answerers tell their trails
                                               gather, ..., reduce, vote       stands in: its own parts, gradients of zero

The control plane is apart from the exchanges, and an replayer is a thread: both work while the others wait inside one. It
looks there only while this rank makes no progress, so that a run in which nothing happens sends nothing. Ranks may fail
together, at different places: each does what somebody has entered, and leaves out what nobody of its group ever will.
A rank that cannot even stand in says that, and the run ends on all ranks with its reason.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import DistError

from headway.errors import CollectiveError, ControlPlaneError, HeadwayError, MemoryExhausted
from headway.log import get_logger
from headway.runtime.collective_log import CollectiveLog, Step, is_vote
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.training.replay.replayer import CollectiveReplayer

log = get_logger(__name__)

_SOON, _SELDOM = 0.002, 0.05
"""Seconds between two looks of a rank that stands in, at first and later."""


class Rounds:
    """The rounds of batches on this rank: each ends with a vote.

    Args:
        strategy: takes part in exchanges.
        runtime: this process.
    """

    def __init__(self, strategy: Strategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._collective_log = runtime.scope.own(CollectiveLog)
        self._rank = runtime.rank
        self._patience = runtime.patience.total_seconds()

    @property
    def _replayer(self) -> CollectiveReplayer:
        return self._runtime.scope.own(CollectiveReplayer)

    # ---------------------------------------------------------------- begin and end

    def open(self) -> None:
        """A batch begins, on all ranks."""
        self._replayer.start()
        self._collective_log.open()

    def close(self) -> None:
        """No batch is in hand."""
        self._collective_log.close()

    def voted(self) -> None:
        """All ranks have come to the vote; nobody needs what this rank has told."""
        self._replayer.voted()

    # ---------------------------------------------------------------- a rank that has failed

    def catch_up(self) -> None:
        """Go through what the others have ahead of them, up to their vote.

        Raises:
            MemoryExhausted: this rank cannot, or another one could not; all ranks raise it.
        """
        noted, started = self._collective_log, time.monotonic()
        try:
            if noted.is_inside:
                raise CollectiveError("it was inside an exchange, which cannot be entered twice")
            self._strategy.break_off()
            self._replayer.say_failed()
            before = noted.position
            while (step := self._next()) is not None and not is_vote(step):
                self._go_through(step)
        except Exception as error:
            self.check(error)
            raise self._give_up(error) from error
        log.info(
            "stood in for itself in %d exchanges, %.2f s",
            noted.position - before,
            time.monotonic() - started,
            main_process_only=False,
        )

    def _go_through(self, step: Step) -> None:
        """Take part where anybody does."""
        index = self._collective_log.position
        peers = [rank for rank in self._strategy.members(step) if rank != self._rank]
        found = self._found(index, peers)
        if found is None:
            self._collective_log.skip()
        else:
            self._strategy.stand_in(found)

    def _next(self) -> Step | None:
        """The step at this place on any rank; None: all have failed before it."""
        others = [rank for rank in range(self._runtime.world_size) if rank != self._rank]
        return self._found(self._collective_log.position, others)

    def _found(self, index: int, ranks: Sequence[int]) -> Step | None:
        """What one of these ranks has entered as its exchange `index`; None where all of them have failed before it.

        Raises:
            ControlPlaneError: they do not come.
        """
        replayer, deadline, pause = self._replayer, time.monotonic() + self._patience, _SOON
        waiting = list(ranks)
        while waiting:
            rank = waiting[0]
            # Whether it has failed is asked first: what it did before that is told by then.
            has_failed = replayer.has_failed(rank)
            step = replayer.step_of(rank, index)
            if step is not None:
                return step
            if has_failed:
                waiting.pop(0)
                continue
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"rank {rank} did not say where it is within {self._patience:g} s")
            self.check(None)
            time.sleep(pause)
            pause = min(2 * pause, _SELDOM)
        # One that failed may have stood in for itself since, because another one had entered it.
        return next((step for rank in ranks if (step := replayer.step_of(rank, index)) is not None), None)

    def _give_up(self, error: Exception) -> MemoryExhausted:
        """Nobody can go on: tell all."""
        text = (
            f"memory ran out on rank {self._rank}, and it could not take part in what the others were still doing: {error}. "
            "End the run, and resume from a checkpoint with smaller batches"
        )
        self._replayer.say_lost(text)
        return MemoryExhausted(text)

    def check(self, error: BaseException | None) -> None:
        """See whether this round can still be finished everywhere.

        Args:
            error: what was caught meanwhile, such as an exchange that was ended for that reason.

        Raises:
            MemoryExhausted: it cannot.
        """
        if error is not None and not self._collective_log.lost:
            # The connection may have been closed by a rank that knew it earlier; the reason was told before that.
            with suppress(DistError, HeadwayError):
                self._replayer.look_for_reason(self._collective_log.number)
        if self._collective_log.lost and not isinstance(error, MemoryExhausted):
            raise MemoryExhausted(self._collective_log.lost) from error
