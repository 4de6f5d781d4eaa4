"""Waiting for the other machines: says at once who waits for whom and until when, and who holds a taken port."""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from headway.errors import LaunchError
from headway.runtime.control_plane.store import SealedStore

T = TypeVar("T")

FIRST = 2.0
"""Seconds of waiting in silence: machines that are started together come together."""

AGAIN = (30.0, 120.0, 300.0)
"""Seconds of waiting after which it is said again; then every five minutes."""

_LOOK = 0.2
_KEY = "headway/here"


class RendezvousWait:
    """One wait, with its deadline and what has been said of it.

    Args:
        say: prints a line.
        seconds: until it is given up; infinite: never.
        setting: what says so, "--timeout".
        is_quiet: say nothing: another process on the same screen does.
    """

    def __init__(self, say: Callable[[str], None], seconds: float, setting: str, is_quiet: bool = False) -> None:
        self._say = say
        self.seconds = seconds
        self.setting = setting
        self._is_quiet = is_quiet
        self._begun = time.monotonic()
        self._due = FIRST
        self.has_told = False

    @property
    def is_over(self) -> bool:
        """Has the deadline passed?"""
        return time.monotonic() - self._begun > self.seconds

    def tell(self, what: str) -> None:
        """Say what is waited for where that is due; call it as often as you like."""
        waited = time.monotonic() - self._begun
        if self._is_quiet or waited < self._due:
            return
        self._due = next((seconds for seconds in AGAIN if seconds > waited), waited + AGAIN[-1])
        self.has_told = True
        self._say(f"headway: {what}, {self._until(waited)}")

    def _until(self, waited: float) -> str:
        if math.isinf(self.seconds):
            return f"for as long as it takes ({self.setting})"
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() + self.seconds - waited))
        return f"until {clock} ({self.seconds:g} s: {self.setting})"

    def limit(self) -> str:
        """The deadline as part of an error."""
        return f"within {self.seconds:g} s ({self.setting} allows more)"

    def end(self, what: str) -> None:
        """Say that it is over, where it was said that it began."""
        if self.has_told:
            self._say(f"headway: {what}")


def knock(host: str, port: int, waiting: RendezvousWait, me: str, unit: str = "machine") -> None:
    """Wait until something listens where the machines meet.

    Raises:
        LaunchError: nothing does before the deadline.
    """
    while True:
        try:
            with socket.create_connection((host, port), timeout=3):
                return
        except OSError as error:
            why = str(error.strerror or error).lower()
        waiting.tell(f"{me} waits for {unit} 0 to open {host}:{port} ({why} so far)")
        if waiting.is_over:
            raise LaunchError(
                f"{unit} 0 did not open {host}:{port} {waiting.limit()}: {why}. Start the launcher there with --machine_rank 0 and "
                "the same address and port, and see that no firewall is in between (`headway doctor`)"
            )
        time.sleep(_LOOK)


def in_time(make: Callable[[], T], waiting: RendezvousWait, what: str, on_late: str) -> T:
    """Call `make` on a thread, as a call into an engine can neither be interrupted nor be given up.

    Args:
        what: said where it takes long.
        on_late: the error where it takes until the deadline.

    Raises:
        LaunchError: it takes until the deadline.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive():
            waiting.tell(what)
            if waiting.is_over:
                raise LaunchError(on_late)
    if errors:
        raise errors[0]
    return result[0]


def arrive(store: SealedStore, machine: int) -> None:
    """Say at the meeting that this machine has come."""
    store.set(f"{_KEY}/{machine}", socket.gethostname().encode())


def missing(store: SealedStore, machines: Sequence[int]) -> list[int]:
    """Which of these machines have not come yet."""
    return [machine for machine in machines if store.find(f"{_KEY}/{machine}") is None]


def named(machines: Sequence[int], unit: str = "machine") -> str:
    """[1, 3] -> "machines 1, 3"."""
    return f"{unit}{'s' if len(machines) > 1 else ''} {', '.join(map(str, machines))}"


def wait_for_all(
    store: SealedStore, machine: int, num_machines: int, waiting: RendezvousWait, where: str, unit: str
) -> None:
    """Come to the meeting, and wait until all machines have.

    Raises:
        LaunchError: some have not before the deadline; they are named.
    """
    arrive(store, machine)
    absent: Sequence[int] = range(num_machines)
    while absent := missing(store, absent):
        waiting.tell(f"{unit} {machine} of {num_machines} waits at {where} for {named(absent, unit)}")
        if waiting.is_over:
            raise LaunchError(late(absent, num_machines, waiting, where, unit))
        time.sleep(_LOOK)
    waiting.end(f"all {num_machines} {unit}s are there")


def late(absent: Sequence[int], num_machines: int, waiting: RendezvousWait, where: str, unit: str) -> str:
    """The error of a meeting that not all have come to; `absent` is empty where all have come and yet did not begin."""
    who = f"{named(absent, unit)} did not come" if absent else f"not all {unit}s began"
    return (
        f"the {num_machines} {unit}s did not meet at {where}: {who} {waiting.limit()}. Start the launcher there with its own "
        "command; `headway launch` without --machine_rank prints the commands"
    )


class RendezvousWatch:
    """Says on a thread who is missing, while an engine's own rendezvous waits."""

    def __init__(
        self,
        connect: Callable[[], SealedStore],
        machine: int,
        num_machines: int,
        waiting: RendezvousWait,
        where: str,
        unit: str,
    ) -> None:
        self._connect = connect
        self._me, self._num_machines = machine, num_machines
        self._waiting, self._where, self._unit = waiting, where, unit
        self._absent: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="who-is-missing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            store = self._connect()
            arrive(store, self._me)
            self._absent = list(range(self._num_machines))
            while not self._is_over.wait(_LOOK):
                self._absent = missing(store, self._absent)
                who = f" for {named(self._absent, self._unit)}" if self._absent else ""
                self._waiting.tell(f"{self._unit} {self._me} of {self._num_machines} waits at {self._where}{who}")
        except (RuntimeError, OSError):
            return  # the rendezvous itself tells of a lost store

    def late(self) -> str:
        """The error where the time to meet is over."""
        return late(self._absent, self._num_machines, self._waiting, self._where, self._unit)

    def end(self) -> None:
        """The machines have met, or it is given up."""
        self._is_over.set()
        self._thread.join(5)


def is_taken(error: BaseException) -> bool:
    """Does an engine's error, or what it came from, say that the port is in use?"""
    seen: BaseException | None = error
    while seen is not None:
        if "EADDRINUSE" in str(seen) or "address already in use" in str(seen).lower():
            return True
        seen = seen.__cause__
    return False


def taken(port: int, free: int) -> str:
    """The error where the port to meet at is in use on this machine."""
    holder = _holder(port)
    return (
        f"port {port} of this machine is taken{f' by {holder}' if holder else ''}; end that program, or choose another port on all "
        f"machines, such as --main_process_port {free}, which is free here now"
    )


def _holder(port: int) -> str:
    """The program that listens on a port, where the system says so: "python (pid 12: python -m http.server)"."""
    import psutil

    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr]
        found = [one.pid for one in listening if getattr(one.laddr, "port", None) == port]
        process = next((psutil.Process(pid) for pid in found if pid is not None), None)
        if process is None:
            return ""
        command = " ".join(process.cmdline())
        return f"{process.name()} (pid {process.pid}: {command[:80]}{'...' if len(command) > 80 else ''})"
    except (psutil.Error, OSError):
        return ""
