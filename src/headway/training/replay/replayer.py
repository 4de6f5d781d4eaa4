"""What a rank says on the control plane of its collectives, and the thread that says it while the rank itself waits in an exchange.

The keys of a round, below `replay/NUMBER/`: `RANK/INDEX` an exchange that a rank has entered; `failed/RANK` its memory ran out, and
what it had entered before has been told; `failed` some rank's did; `lost` the round cannot be finished, and why. Who set a key
takes it away after the vote.
"""

import threading
from datetime import timedelta

from torch.distributed import DistError

from headway.errors import HeadwayError
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.collective_log import CollectiveLog, Step, read
from headway.runtime.control_plane import control
from headway.runtime.heartbeat.thread import before_shutdown

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
