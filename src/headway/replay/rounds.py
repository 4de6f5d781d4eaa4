"""Where forwards are exchanges: how a rank whose memory ran out comes to the vote at which the others will learn of it.

::

    healthy rank    gather, gather, ...        gather, ..., reduce, vote       each noted in its trail before it is entered
    failed rank     gather, gather, out of memory
                        says so on the control plane; the others' answerers tell their trails
                                               gather, ..., reduce, vote       stands in: its own parts, gradients of zero

The control plane is apart from the exchanges, and an answerer is a thread: both work while the others wait inside one. It
looks there only while this rank makes no progress, so that a run in which nothing happens sends nothing. Ranks may fail
together, at different places: each does what somebody has entered, and leaves out what nobody of its group ever will.
A rank that cannot even stand in says that, and the run ends on all ranks with its reason.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError

from headway.errors import CollectiveError, ControlPlaneError, HeadwayError, MemoryExhausted
from headway.log import get_logger
from headway.runtime import control, process
from headway.runtime.heartbeat import before_shutdown
from headway.runtime.process import ProcessRuntime
from headway.runtime.trail import Step, Trail, is_vote, read
from headway.strategies.base import Strategy

log = get_logger(__name__)

_LOOKS = 0.1
"""Seconds between two looks of an answerer at this rank's progress."""
_ANSWER = timedelta(seconds=60)
"""How long the control plane may take to give what it has."""
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
        self._trail = runtime.scope.own(Trail)
        self._rank, self._world_size = runtime.rank, runtime.world_size
        self._patience = runtime.patience.total_seconds()
        self._control: control.Control | None = None
        self._has_failed = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- begin and end

    def open(self) -> None:
        """A batch begins, on all ranks."""
        if self._thread is None:
            self._control = control.current()
            self._thread = threading.Thread(target=self._answer, name="headway-answerer", daemon=True)
            self._thread.start()
            before_shutdown(self.stop)
            process.at_end(self.stop)
        self._trail.open()

    def close(self) -> None:
        """No batch is in hand."""
        self._trail.close()

    def voted(self) -> None:
        """All ranks have come to the vote; nobody needs what this rank has told."""
        number = self._trail.number
        names = [f"{self._rank}/{index}" for index in self._trail.turn()]
        if self._has_failed:
            self._has_failed = False
            names += ["failed", f"failed/{self._rank}"]
        for name in names:
            self._channel.delete(f"replay/{number}/{name}")

    def stop(self) -> None:
        """Answer no longer."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    # ---------------------------------------------------------------- a rank that has failed

    def catch_up(self) -> None:
        """Go through what the others have ahead of them, up to their vote.

        Raises:
            MemoryExhausted: this rank cannot, or another one could not; all ranks raise it.
        """
        trail, started = self._trail, time.monotonic()
        self._has_failed = True
        try:
            if trail.is_inside:
                raise CollectiveError("it was inside an exchange, which cannot be entered twice")
            self._strategy.break_off()
            trail.tell(trail.number, self._publish)
            self._set(f"failed/{self._rank}")
            self._set("failed")
            before = trail.position
            while (step := self._next()) is not None and not is_vote(step):
                self._go_through(step)
        except Exception as error:
            self.check(error)
            raise self._give_up(error) from error
        log.info(
            "stood in for itself in %d exchanges, %.2f s",
            trail.position - before,
            time.monotonic() - started,
            main_process_only=False,
        )

    def _go_through(self, step: Step) -> None:
        """Take part where anybody does."""
        index = self._trail.position
        peers = [rank for rank in self._strategy.members(step) if rank != self._rank]
        found = self._found(index, peers)
        if found is None:
            self._trail.skip()
        else:
            self._strategy.stand_in(found)

    def _next(self) -> Step | None:
        """The step at this place on any rank; None: all have failed before it."""
        return self._found(self._trail.position, [rank for rank in range(self._world_size) if rank != self._rank])

    def _found(self, index: int, ranks: Sequence[int]) -> Step | None:
        """What one of these ranks has entered as its exchange `index`; None where all of them have failed before it.

        Raises:
            ControlPlaneError: they do not come.
        """
        channel, deadline, pause = self._channel, time.monotonic() + self._patience, _SOON
        waiting = list(ranks)
        while waiting:
            rank = waiting[0]
            # Whether it has failed is asked first: what it did before that is told by then.
            has_failed = channel.has(f"replay/{self._trail.number}/failed/{rank}")
            if channel.has(self._key(rank, index)):
                return self._read(rank, index)
            if has_failed:
                waiting.pop(0)
                continue
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"rank {rank} did not say where it is within {self._patience:g} s")
            self.check(None)
            time.sleep(pause)
            pause = min(2 * pause, _SELDOM)
        # A rank that failed may have stood in for itself since, because another one had entered it.
        for rank in ranks:
            if channel.has(self._key(rank, index)):
                return self._read(rank, index)
        return None

    def _read(self, rank: int, index: int) -> Step:
        return read(self._channel.get(self._key(rank, index), _ANSWER))

    def _give_up(self, error: Exception) -> MemoryExhausted:
        """Nobody can go on: tell all."""
        text = (
            f"memory ran out on rank {self._rank}, and it could not take part in what the others were still doing: {error}. "
            "End the run, and resume from a checkpoint with smaller batches"
        )
        self._set("lost", text)
        self._set("failed")
        return MemoryExhausted(text)

    def check(self, error: BaseException | None) -> None:
        """See whether this round can still be finished everywhere.

        Args:
            error: what was caught meanwhile, such as an exchange that was ended for that reason.

        Raises:
            MemoryExhausted: it cannot.
        """
        if self._trail.lost and not isinstance(error, MemoryExhausted):
            raise MemoryExhausted(self._trail.lost) from error

    # ---------------------------------------------------------------- the answerer

    def _answer(self) -> None:
        """Tell this rank's trail where another one asks."""
        trail, before = self._trail, (-1, -1)
        while not self._over.wait(_LOOKS):
            now = (trail.number, trail.position)
            is_still, before = trail.is_open and now == before, now
            try:
                if trail.is_told:
                    self._look_for_the_end(trail.number)
                elif is_still and self._channel.has(f"replay/{now[0]}/failed"):
                    trail.tell(now[0], self._publish)
            except (DistError, HeadwayError) as error:
                log.debug("the control plane is lost: %s", error)
                return

    def _look_for_the_end(self, number: int) -> None:
        key = f"replay/{number}/lost"
        if not self._trail.lost and self._channel.has(key):
            self._trail.lost = self._channel.get(key, _ANSWER).decode()
            process.abort_group()

    def _publish(self, index: int, text: str) -> None:
        self._channel.set(self._key(self._rank, index), text.encode())

    def _key(self, rank: int, index: int) -> str:
        return f"replay/{self._trail.number}/{rank}/{index}"

    def _set(self, name: str, text: str = "") -> None:
        self._channel.set(f"replay/{self._trail.number}/{name}", text.encode())

    @property
    def _channel(self) -> control.Control:
        assert self._control is not None
        return self._control
