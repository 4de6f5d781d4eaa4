"""How machines meet: one alone at a store of its own, several at machine 0, by their given ranks or as they come."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from headway import env
from headway.errors import LaunchError
from headway.launch import meeting
from headway.launch.network import free_port, interface_of, own_address
from headway.launch.plan import AgentOrder

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

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


class _OneMeeting(RendezvousHandler):
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


class OwnStore(_OneMeeting):
    """The rendezvous of a single machine: a fresh store per attempt, on a port that the system chose and we hold."""

    def __init__(self) -> None:
        super().__init__("local", "headway")

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt; nobody else is waited for."""
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
        info = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, info)


def host_of(order: AgentOrder) -> str:
    """Where the machines meet."""
    return str(parse_rendezvous_endpoint(order.endpoint, default_port=-1)[0])


def use_interface(order: AgentOrder) -> None:
    """Let gloo use the interface that leads to machine 0, unless the user has named one.

    Left to itself gloo looks the host's own name up, which many machines answer with a loopback address.
    """
    address = own_address(host_of(order)) if order.num_machines > 1 else None
    interface = interface_of(address) if address is not None else None
    if interface is not None:
        env.set_default("GLOO_SOCKET_IFNAME", interface)


class GivenRanks(_OneMeeting):
    """Machines that know their numbers meet at a store of machine 0's; who is missing is said."""

    def __init__(self, order: AgentOrder, seconds: float, say: Callable[[str], None]) -> None:
        super().__init__("static", order.run_id)
        self._order = order
        self._seconds = seconds
        self._say = say

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines.

        Raises:
            LaunchError: the port is taken, or machines do not come in time.
        """
        order = self._order
        host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
        waiting = waiting_of(order, self._seconds, self._say)
        if self._store is None:
            self._store = _at_the_meeting(
                order,
                waiting,
                lambda: TCPStore(
                    host,
                    port,
                    None,
                    order.machine_rank == 0,
                    timedelta(seconds=max(_CALL, _finite(self._seconds))),
                    wait_for_workers=False,
                    multi_tenant=True,
                ),
            )
        store = PrefixStore(order.run_id, self._store)
        try:
            meeting.wait_for_all(store, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
        except LaunchError:
            raise
        except RuntimeError as error:  # of the store, which is machine 0's
            raise LaunchError(
                f"{order.unit} 0 ended while this one waited for the others at {order.endpoint}; its own output says why"
            ) from error
        return RendezvousInfo(store, order.machine_rank, order.num_machines, RendezvousStoreInfo(host, port))


def waiting_of(order: AgentOrder, seconds: float, say: Callable[[str], None]) -> meeting.Waiting:
    """A wait for the order's other machines. Of a cluster's tasks, which share a screen, two speak: one on each side."""
    setting = "--rdzv_conf timeout" if "timeout" in order.conf else "--patience"
    return meeting.Waiting(say, seconds, setting, is_quiet=order.unit == "task" and order.machine_rank > 1)


def _at_the_meeting(order: AgentOrder, waiting: meeting.Waiting, make: Callable[[], T]) -> T:
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
    except (RendezvousError, RuntimeError) as error:
        if order.machine_rank == 0 and meeting.is_taken(error):
            raise LaunchError(meeting.taken(port, free_port())) from error
        raise


def _finite(seconds: float) -> float:
    return min(seconds, _FOR_EVER)


def handler_for(order: AgentOrder, seconds: float, say: Callable[[str], None]) -> RendezvousHandler:
    """The way to meet that the order names.

    Args:
        order: what the agent is to do.
        seconds: that machines get to come in; infinite: for ever.
        say: prints a line.
    """
    if order.backend == "local":
        return OwnStore()
    if order.backend == "static":
        return GivenRanks(order, seconds, say)
    conf: dict[str, Any] = {"join_timeout": int(_finite(seconds)), **order.conf, "rank": order.machine_rank}
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
    waiting = waiting_of(order, seconds, say)
    return _at_the_meeting(order, waiting, lambda: registry.get_rendezvous_handler(parameters))


def watch_for(order: AgentOrder, seconds: float, say: Callable[[str], None]) -> meeting.Watch | None:
    """Who is missing, said while torch's own rendezvous waits; None where the way to meet says so itself."""
    if order.backend != "c10d":
        return None
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    waiting = waiting_of(order, seconds, say)

    def connect() -> Any:
        return PrefixStore(
            f"{order.run_id}/headway", TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        )

    return meeting.Watch(connect, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
