"""How machines meet: one alone at its own store, several at machine 0, by given ranks or as they come; and who waits for whom."""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from headway.common import env
from headway.common.untrusted import Seal
from headway.config.launch import DEFAULT_TIMEOUT
from headway.config.load import run_setting
from headway.errors import LaunchError
from headway.launch.plan import AgentOrder
from headway.runtime.control_plane.store import SealedStore, serve
from headway.runtime.network import free_port, interface_of, own_address

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

MEETING = "meeting"
"""What errors call the store at which the machines meet."""

LAST_CALL = 3
"""Seconds that a full meeting stays open; none can come any more."""

LATECOMERS = 10
"""Seconds in which other machines may still come, once there are enough of them to begin."""

_CALL = 300
"""Seconds for one call to the store, at least."""

_FOR_EVER = 10**7
"""Seconds that stand for no end, where an engine wants a number."""

ALIVE = 2
"""Seconds between signs of life to the meeting, where a run goes on without a machine: three missing ones free its seat."""

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
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    while not wait([made], _LOOK).done:
        waiting.tell(what)
        if waiting.is_over:
            raise LaunchError(on_late)
    return made.result()


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


def is_taken(error: BaseException | None) -> bool:
    """Does an engine's error, or what it came from, say that the port is in use?"""
    if error is None:
        return False
    is_said = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    return is_said or is_taken(error.__cause__)


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
        found = [one.pid for one in listening if getattr(one.laddr, "port", None) == port and one.pid is not None]
        if not found:
            return ""
        process = psutil.Process(found[0])
        command = " ".join(process.cmdline())
        return f"{process.name()} (pid {process.pid}: {command[:80]}{'...' if len(command) > 80 else ''})"
    except (psutil.Error, OSError):
        return ""


class _SingleRendezvous(RendezvousHandler):
    """A way to meet once an attempt, in which nobody comes later; workers are handed the agents' store.

    Args:
        backend: the name of this way.
        run_id: the run's name.
    """

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """The name of this way to meet."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Yes: workers open no store, so no port can be taken by somebody else in between."""
        return True

    def is_closed(self) -> bool:
        """No."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: there is one meeting."""

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this process."""
        return True


class LocalRendezvous(_SingleRendezvous):
    """The rendezvous of a single machine: a fresh store per attempt, on a port that the system chose and we hold."""

    def __init__(self) -> None:
        super().__init__("local", "headway")

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt; nobody else is waited for."""
        self._store = serve(LOOPBACK, timeout=timedelta(minutes=10))
        info = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, info)


def host_of(order: AgentOrder) -> str:
    """Where the machines meet; loopback for one."""
    return LOOPBACK if not order.endpoint else str(parse_rendezvous_endpoint(order.endpoint, default_port=-1)[0])


def use_interface(order: AgentOrder) -> None:
    """Let gloo use the interface that leads to machine 0, unless the user has named one.

    Left to itself gloo looks the host's own name up, which many machines answer with a loopback address.
    """
    address = own_address(host_of(order)) if order.num_machines > 1 else None
    interface = interface_of(address) if address is not None else None
    if interface is not None:
        env.set_default("GLOO_SOCKET_IFNAME", interface)


class StaticRendezvous(_SingleRendezvous):
    """Machines that know their numbers meet at a store of machine 0's; who is missing is said."""

    def __init__(self, order: AgentOrder, say: Callable[[str], None], seal: Seal) -> None:
        super().__init__("static", order.run_id)
        self._order = order
        self._say = say
        self._seal = seal

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines.

        Raises:
            LaunchError: the port is taken, or machines do not come in time.
        """
        order = self._order
        host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
        waiting = waiting_of(order, self._say)
        if self._store is None:
            seconds = max(_CALL, min(time_to_meet(order), _FOR_EVER))
            self._store = _at_the_meeting(order, waiting, lambda: _store_of(order, order.machine_rank == 0, seconds))
        store = PrefixStore(order.run_id, self._store)
        sealed = SealedStore(store, MEETING, self._seal)
        try:
            wait_for_all(sealed, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
        except LaunchError:
            raise
        except RuntimeError as error:  # of the store, which is machine 0's
            raise LaunchError(
                f"{order.unit} 0 ended while this one waited for the others at {order.endpoint}; its own output says why"
            ) from error
        return RendezvousInfo(store, order.machine_rank, order.num_machines, RendezvousStoreInfo(host, port))


def _store_of(order: AgentOrder, is_host: bool, seconds: float) -> TCPStore:
    """The store at which the machines meet: opened here, or somebody else's."""
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    if is_host:
        return serve(host, port, timedelta(seconds=seconds))
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


class _SealedBackend(C10dRendezvousBackend):
    """torch's way for machines to meet as they come, whose state is a pickle: opened only where this run has sealed it."""

    def __init__(self, store: TCPStore, run_id: str, seal: Seal) -> None:
        super().__init__(store, run_id)
        self._seal = seal

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and a token for `set_state`; None before the first."""
        found = super().get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the state unless it has changed since `token`; returns what there is then, and whether it is this."""
        found = super().set_state(self._seal.close(MEETING, state), token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _opened(self, sealed: bytes) -> bytes:
        state = self._seal.open(MEETING, sealed)
        if state is None:
            raise LaunchError(
                "the state of the meeting was not written by this run: another program reaches its port, or HEADWAY_SECRET "
                "(--secret) is not the same on all machines (docs/security.md)"
            )
        return state


def waiting_of(order: AgentOrder, say: Callable[[str], None]) -> RendezvousWait:
    """A wait for the order's other machines. Of a cluster's tasks, which share a screen, two speak: one on each side."""
    setting = "--rdzv_conf timeout" if "timeout" in order.conf else "--timeout"
    return RendezvousWait(say, time_to_meet(order), setting, is_quiet=order.unit == "task" and order.machine_rank > 1)


def _at_the_meeting(order: AgentOrder, waiting: RendezvousWait, make: Callable[[], T]) -> T:
    """Open machine 0's port, or wait for it to be open, and make what meets there.

    Raises:
        LaunchError: the port is taken, is not opened in time, or another program answers there.
    """
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    me = f"{order.unit} {order.machine_rank} of {order.num_machines}"
    if order.machine_rank > 0:
        knock(host, port, waiting, me, order.unit)
    strange = f"what answers at {order.endpoint} is not the launcher of {order.unit} 0"
    try:
        return in_time(
            make,
            waiting,
            f"{me} waits for an answer from {order.endpoint}, where another program may listen in place of {order.unit} 0",
            f"{strange}, or it hangs: check that it was started with this address and port, or choose another port on all machines, "
            f"such as --main_process_port {free_port()}",
        )
    except (RendezvousError, RuntimeError, OSError) as error:
        if order.machine_rank == 0 and is_taken(error):
            raise LaunchError(taken(port, free_port())) from error
        raise


def timeout() -> float:
    """Seconds that a rank may be missing from a collective; 0: for ever."""
    return float(run_setting("timeout", None, DEFAULT_TIMEOUT)[0])


def time_to_meet(order: AgentOrder) -> float:
    """Seconds that machines get to come in: as --rdzv_conf says, else the timeout; infinite where that is 0."""
    return float(order.conf.get("timeout", 0)) or timeout() or math.inf


def handler_for(order: AgentOrder, say: Callable[[str], None], seal: Seal) -> RendezvousHandler:
    """The way to meet that the order names.

    Args:
        order: what the agent is to do.
        say: prints a line.
        seal: with the user's secret.
    """
    if order.backend == "local":
        return LocalRendezvous()
    if order.backend == "static":
        return StaticRendezvous(order, say, seal)
    seconds = int(min(time_to_meet(order), _FOR_EVER))
    conf: dict[str, Any] = {"join_timeout": seconds, **order.conf, "rank": order.machine_rank}
    # Left to itself torch compares host names, which says the wrong thing on many clusters.
    conf = {"is_host": str(order.machine_rank == 0).lower(), "last_call_timeout": LAST_CALL, **conf}
    if order.min_machines < order.num_machines:
        conf = {**conf, "last_call_timeout": LATECOMERS, "keep_alive_interval": ALIVE, **order.conf}
    parameters = RendezvousParameters(
        order.backend,
        order.endpoint,
        order.run_id,
        order.min_machines,
        order.num_machines,
        local_addr=own_address(host_of(order)),
        **conf,
    )
    waiting = waiting_of(order, say)

    def begin() -> RendezvousHandler:
        is_host, seconds_a_call = parameters.get_as_bool("is_host"), parameters.get_as_int("read_timeout", 60)
        store = _store_of(order, bool(is_host), float(seconds_a_call or 60))
        return create_handler(store, _SealedBackend(store, order.run_id, seal), parameters)

    return _at_the_meeting(order, waiting, begin)


def watch_for(order: AgentOrder, say: Callable[[str], None], seal: Seal) -> RendezvousWatch | None:
    """Who is missing, said while torch's own rendezvous waits; None where the way to meet says so itself."""
    if order.backend != "c10d":
        return None
    waiting = waiting_of(order, say)

    def connect() -> SealedStore:
        return SealedStore(PrefixStore(f"{order.run_id}/headway", _store_of(order, False, 30)), MEETING, seal)

    return RendezvousWatch(connect, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
