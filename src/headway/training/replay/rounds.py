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

What a rank says on the control plane of its collectives, and the thread that says it while the rank itself waits in an exchange.

The keys of a round, below `replay/NUMBER/`: `RANK/INDEX` an exchange that a rank has entered; `failed/RANK` its memory ran out, and
what it had entered before has been told; `failed` some rank's did; `lost` the round cannot be finished, and why. Who set a key
takes it away after the vote.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError

from headway.errors import CollectiveError, ControlPlaneError, HeadwayError, MemoryExhausted
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.collective_log import CollectiveLog, Step, is_vote, read
from headway.runtime.control_plane import control
from headway.runtime.heartbeat import before_shutdown
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy

log = get_logger(__name__)

_LOOKS = 0.1
"""Seconds between two looks at this rank's progress."""
_ANSWER = timedelta(seconds=60)
"""How long the control plane may take to give what it has."""


class CollectiveReplayer:
    """One for each process runtime: it knows the log of collectives, and neither models nor strategies."""

    def __init__(self) -> None:
        runtime = process.current()
        self.collective_log = runtime.scope.own(CollectiveLog)
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self._channel = control.current()
        self._own: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-replayer", daemon=True)

    def start(self) -> None:
        """Answer from now on, until the runtime ends."""
        if not self._thread.is_alive() and not self._over.is_set():
            self._thread.start()
            before_shutdown(self.stop)
            process.at_end(self.stop)

    def stop(self) -> None:
        """Answer no longer."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        noted, before = self.collective_log, (-1, -1)
        while not self._over.wait(_LOOKS):
            now = (noted.number, noted.position)
            is_still, before = noted.is_open and now == before, now
            try:
                if noted.is_told:
                    self._look_for_the_end(noted.number)
                elif is_still and self._channel.has(f"replay/{now[0]}/failed"):
                    noted.tell(now[0], self.publish)
            except (DistError, HeadwayError) as error:
                log.debug("the control plane is lost: %s", error)
                return

    def _look_for_the_end(self, number: int) -> None:
        if not self.collective_log.lost and self.look_for_reason(number):
            process.abort_group()  # nothing else wakes a rank inside an exchange

    def look_for_reason(self, number: int) -> str:
        """Why the round cannot be finished on some rank; empty while it can."""
        key = f"replay/{number}/lost"
        if not self.collective_log.lost and self._channel.has(key):
            self.collective_log.lost = self._channel.get(key, _ANSWER).decode()
        return self.collective_log.lost

    # ---------------------------------------------------------------- saying and asking

    def publish(self, index: int, text: str) -> None:
        """This rank enters its exchange of that number."""
        self._set(f"{self.rank}/{index}", text)

    def say_failed(self) -> None:
        """This rank's memory ran out: its log of collectives, then the fact."""
        self.collective_log.tell(self.collective_log.number, self.publish)
        self._set(f"failed/{self.rank}")
        self._set("failed")

    def say_lost(self, text: str) -> None:
        """The round ends here, on all ranks."""
        self._set("lost", text)
        self._set("failed")

    def has_failed(self, rank: int) -> bool:
        """Has that rank's memory run out in this round?"""
        return self._channel.has(f"replay/{self.collective_log.number}/failed/{rank}")

    def step_of(self, rank: int, index: int) -> Step | None:
        """The exchange of that number which a rank has entered; None where it has not, as far as it has told."""
        key = f"replay/{self.collective_log.number}/{rank}/{index}"
        return read(self._channel.get(key, _ANSWER)) if self._channel.has(key) else None

    def voted(self) -> None:
        """The round is over: all ranks have come to its vote."""
        self.collective_log.turn()
        own, self._own = self._own, []
        for key in own:
            self._channel.delete(key)

    def _set(self, name: str, text: str = "") -> None:
        key = f"replay/{self.collective_log.number}/{name}"
        self._own.append(key)
        self._channel.set(key, text.encode())


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
        self._timeout = runtime.timeout.total_seconds()

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
        replayer, deadline, pause = self._replayer, time.monotonic() + self._timeout, _SOON
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
                raise ControlPlaneError(f"rank {rank} did not say where it is within {self._timeout:g} s")
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
