"""How machines meet: one alone at a store of its own, several at machine 0, by their given ranks or as they come."""

import math
from collections.abc import Callable
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
from headway.launch.agent import meeting
from headway.launch.network import free_port, interface_of, own_address
from headway.launch.plan import AgentOrder
from headway.runtime.control_plane.store import SealedStore, serve

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
            seconds = max(_CALL, _finite(time_to_meet(order)))
            self._store = _at_the_meeting(order, waiting, lambda: _store_of(order, order.machine_rank == 0, seconds))
        store = PrefixStore(order.run_id, self._store)
        sealed = SealedStore(store, MEETING, self._seal)
        try:
            meeting.wait_for_all(sealed, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
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


def waiting_of(order: AgentOrder, say: Callable[[str], None]) -> meeting.RendezvousWait:
    """A wait for the order's other machines. Of a cluster's tasks, which share a screen, two speak: one on each side."""
    setting = "--rdzv_conf timeout" if "timeout" in order.conf else "--timeout"
    return meeting.RendezvousWait(
        say, time_to_meet(order), setting, is_quiet=order.unit == "task" and order.machine_rank > 1
    )


def _at_the_meeting(order: AgentOrder, waiting: meeting.RendezvousWait, make: Callable[[], T]) -> T:
    """Open machine 0's port, or wait for it to be open, and make what meets there.

    Raises:
        LaunchError: the port is taken, is not opened in time, or another program answers there.
    """
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    me = f"{order.unit} {order.machine_rank} of {order.num_machines}"
    if order.machine_rank > 0:
        meeting.knock(host, port, waiting, me, order.unit)
    strange = f"what answers at {order.endpoint} is not the launcher of {order.unit} 0"
    try:
        return meeting.in_time(
            make,
            waiting,
            f"{me} waits for an answer from {order.endpoint}, where another program may listen in place of {order.unit} 0",
            f"{strange}, or it hangs: check that it was started with this address and port, or choose another port on all machines, "
            f"such as --main_process_port {free_port()}",
        )
    except (RendezvousError, RuntimeError, OSError) as error:
        if order.machine_rank == 0 and meeting.is_taken(error):
            raise LaunchError(meeting.taken(port, free_port())) from error
        raise


def _finite(seconds: float) -> float:
    return min(seconds, _FOR_EVER)


def timeout() -> float:
    """Seconds that a rank may be missing from a collective; 0: for ever."""
    seconds, _ = run_setting("timeout", None, DEFAULT_TIMEOUT)
    return float(seconds)


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
    conf: dict[str, Any] = {"join_timeout": int(_finite(time_to_meet(order))), **order.conf, "rank": order.machine_rank}
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


def watch_for(order: AgentOrder, say: Callable[[str], None], seal: Seal) -> meeting.RendezvousWatch | None:
    """Who is missing, said while torch's own rendezvous waits; None where the way to meet says so itself."""
    if order.backend != "c10d":
        return None
    waiting = waiting_of(order, say)

    def connect() -> SealedStore:
        return SealedStore(PrefixStore(f"{order.run_id}/headway", _store_of(order, False, 30)), MEETING, seal)

    return meeting.RendezvousWatch(connect, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
