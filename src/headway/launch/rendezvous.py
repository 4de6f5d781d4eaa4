"""How machines meet: one alone at a store of its own, several at machine 0, by their given ranks or as they come."""

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from headway import env
from headway.launch.network import interface_of, own_address
from headway.launch.plan import AgentOrder

LOOPBACK = "127.0.0.1"

LAST_CALL = 3
"""Seconds that a full meeting stays open; none can come any more."""

LATECOMERS = 10
"""Seconds in which other machines may still come, once there are enough of them to begin."""

ALIVE = 2
"""Seconds between signs of life to the meeting, where a run goes on without a machine: three missing ones free its seat."""


class OwnStore(RendezvousHandler):
    """The rendezvous of a single machine: a fresh store per attempt, on a port that the system chose and we hold."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """The name of this way to meet."""
        return "local"

    @property
    def use_agent_store(self) -> bool:
        """Yes: workers are handed this store and open none, so no port can be taken by somebody else in between."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt; nobody else is waited for."""
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
        info = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, info)

    def is_closed(self) -> bool:
        """No."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: nobody else takes part."""

    def num_nodes_waiting(self) -> int:
        """Nobody ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return "headway"

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this process."""
        return True


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


def handler_for(order: AgentOrder) -> RendezvousHandler:
    """The way to meet that the order names."""
    if order.backend == "local":
        return OwnStore()
    conf: dict[str, Any] = {"timeout": 900, **order.conf, "rank": order.machine_rank}
    if order.backend == "c10d":
        # Left to itself torch compares host names, which says the wrong thing on many clusters.
        conf = {"is_host": str(order.machine_rank == 0).lower(), "last_call_timeout": LAST_CALL, **conf}
        if order.min_machines < order.num_machines:
            conf = {**conf, "last_call_timeout": LATECOMERS, "keep_alive_interval": ALIVE, **order.conf}
    parameters = RendezvousParameters(
        order.backend, order.endpoint, order.run_id, order.min_machines, order.num_machines,
        local_addr=own_address(host_of(order)), **conf,
    )  # fmt: skip
    return registry.get_rendezvous_handler(parameters)
