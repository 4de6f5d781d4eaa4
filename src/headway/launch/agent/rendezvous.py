"""Rendezvous handlers for torch's elastic agent: for one machine, for machines with given ranks, and for torch's c10d.

In a run on one machine, the agent opens a new store for each start of the ranks. In a run on several machines, all
agents connect to a store on machine 0. The ranks of the machines are given in advance. With c10d, torch assigns them at
each rendezvous instead, by sorting the machines' addresses.
"""

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
from headway.common.sealing import Seal
from headway.core.config.launch import DEFAULT_TIMEOUT
from headway.core.config.load import resolve_run_setting
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import start_store
from headway.core.runtime.network import find_free_port, find_interface, find_own_address
from headway.errors import LaunchError
from headway.launch.agent.arrival import RendezvousWatch, wait_for_all, wait_for_host
from headway.launch.agent.ports import describe_taken_port, is_port_taken
from headway.launch.agent.rendezvous_wait import RendezvousWait, call_in_time
from headway.launch.order import AgentOrder

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

STORE_NAME = "meeting"
"""Name of the rendezvous store in error messages and in the HMACs of its values."""

LAST_CALL_TIMEOUT = 3
"""Seconds that torch waits for further machines if all machines are required. It is short, because none can follow."""

LATE_JOIN_TIMEOUT = 10
"""Seconds that torch waits for further machines after the minimum number of machines has arrived."""

_MIN_STORE_TIMEOUT = 300
"""Minimum timeout in seconds of one call to the store."""

_INFINITE_SECONDS = 10**7
"""Seconds that represent an infinite timeout in libraries that require a number."""

KEEP_ALIVE_INTERVAL = 2
"""Seconds between two heartbeats to the rendezvous store in a run that can continue after it has lost a machine.

After three missing heartbeats, another machine can take the place of the lost one.
"""


class _SingleRendezvous(RendezvousHandler):
    """Base class of rendezvous handlers in which no machine can join after the ranks have been started.

    The workers use the store that the agents share.

    Args:
        backend: Name of the rendezvous backend.
        run_id: ID of the run.
    """

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of the rendezvous backend."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the agents' store. Always True.

        If workers opened their own store, another program might take the store's port first.
        """
        return True

    def is_closed(self) -> bool:
        """Return False, because this rendezvous is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because this rendezvous need not be closed."""

    def num_nodes_waiting(self) -> int:
        """Return 0, because no machine joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the ID of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing and return True, because the store ends with this process."""
        return True


class LocalRendezvous(_SingleRendezvous):
    """Rendezvous of a run on one machine, with a new store at each start of the ranks.

    The store's port is chosen by the system and stays bound, so no other program can take it.
    """

    def __init__(self) -> None:
        super().__init__("local", "headway")

    def next_rendezvous(self) -> RendezvousInfo:
        """Open and return a new store for the next start of the ranks. There are no other machines to wait for."""
        self._store = start_store(LOOPBACK, timeout=timedelta(minutes=10))
        info = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, info)


def find_host(order: AgentOrder) -> str:
    """Return the host of the rendezvous; in a run on one machine, the loopback address."""
    if not order.endpoint:
        return LOOPBACK
    host, _ = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    return str(host)


def use_interface(order: AgentOrder) -> None:
    """Set gloo's network interface to the one that leads to machine 0, unless the user has set an interface.

    By default gloo resolves the host's own name, which many machines resolve to a loopback address. Do nothing in a run
    on one machine, or if the interface cannot be determined.

    Args:
        order: Instructions from the launcher for this agent.
    """
    address = find_own_address(find_host(order)) if order.num_machines > 1 else None
    interface = find_interface(address) if address is not None else None
    if interface is not None:
        env.set_default("GLOO_SOCKET_IFNAME", interface)


class StaticRendezvous(_SingleRendezvous):
    """Rendezvous through a store that machine 0 hosts, for machines whose ranks were assigned in advance.

    While it waits, it prints which machines are missing. At the deadline it raises an error.

    Args:
        order: Instructions from the launcher for this agent: endpoint, number of machines and this machine's rank.
        print_line: Function that prints a line for the user.
        seal: Object that adds HMACs with the user's secret to the messages between machines.
    """

    def __init__(self, order: AgentOrder, print_line: Callable[[str], None], seal: Seal) -> None:
        super().__init__("static", order.run_id)
        self._order = order
        self._print_line = print_line
        self._seal = seal

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines have arrived. Return the store, this machine's rank and the number of machines.

        Raises:
            LaunchError: If the port is in use, if machines do not arrive before the deadline, or if machine 0 ends.
        """
        order = self._order
        host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
        waiting = create_wait(order, self._print_line)
        if self._store is None:
            seconds = max(_MIN_STORE_TIMEOUT, min(read_time_to_meet(order), _INFINITE_SECONDS))
            self._store = _connect_in_time(order, waiting, lambda: _open_store(order, order.machine_rank == 0, seconds))
        store = PrefixStore(order.run_id, self._store)
        sealed = SealedStore(store, STORE_NAME, self._seal)
        try:
            wait_for_all(sealed, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
        except LaunchError:
            raise
        except RuntimeError as error:  # an error of the store, which machine 0 hosts
            raise LaunchError(
                f"{order.unit} 0 ended while this one waited for the others at {order.endpoint}; its own output names the reason"
            ) from error
        return RendezvousInfo(store, order.machine_rank, order.num_machines, RendezvousStoreInfo(host, port))


def _open_store(order: AgentOrder, is_host: bool, seconds: float) -> TCPStore:
    """Return the store of the rendezvous: a new one if `is_host`, otherwise a connection to machine 0's store.

    `seconds` is the timeout of each call to the store.
    """
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    if is_host:
        return start_store(host, port, timedelta(seconds=seconds))
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


class _SealedBackend(C10dRendezvousBackend):
    """torch's c10d rendezvous backend, extended to unpickle shared state only if it carries this run's HMAC."""

    def __init__(self, store: TCPStore, run_id: str, seal: Seal) -> None:
        super().__init__(store, run_id)
        self._seal = seal

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the shared state and its token for `set_state`, or None if there is no state yet.

        Raises:
            LaunchError: If the state does not carry this run's HMAC.
        """
        found = super().get_state()
        return None if found is None else (self._open_state(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the shared state, unless another machine has changed it since `token` was issued.

        Args:
            state: New state, as pickled by torch.
            token: Token that an earlier call of `get_state` or `set_state` has returned. None for the first state.

        Returns:
            Tuple of (current state, its token, whether the current state is the given one). None if the state cannot
                be written.

        Raises:
            LaunchError: If the current state does not carry this run's HMAC.
        """
        found = super().set_state(self._seal.seal_message(STORE_NAME, state), token)
        return None if found is None else (self._open_state(found[0]), *found[1:])

    def _open_state(self, sealed: bytes) -> bytes:
        """Return the state of the rendezvous after checking its HMAC.

        Raises:
            LaunchError: If the HMAC is not valid.
        """
        state = self._seal.open_message(STORE_NAME, sealed)
        if state is None:
            raise LaunchError(
                "the state of the meeting was not written by this run: another program reaches its port, or HEADWAY_SECRET "
                "(--secret) is not the same on all machines (docs/security.md)"
            )
        return state


def create_wait(order: AgentOrder, print_line: Callable[[str], None]) -> RendezvousWait:
    """Return the deadline and the messages with which this agent waits for other machines.

    All tasks of a cluster print to one screen. So only two tasks print messages: task 0, which hosts the rendezvous,
    and task 1, which connects to it.

    Args:
        order: Instructions from the launcher for this agent.
        print_line: Function that prints a line.
    """
    setting = "--rdzv_conf timeout" if "timeout" in order.conf else "--timeout"
    return RendezvousWait(
        print_line, read_time_to_meet(order), setting, is_quiet=order.unit == "task" and order.machine_rank > 1
    )


def _connect_in_time(order: AgentOrder, waiting: RendezvousWait, make: Callable[[], T]) -> T:
    """Call a function that opens machine 0's port or connects to it, and wait for its result until a deadline.

    On machines other than machine 0, first wait until the port is open.

    Args:
        order: Instructions from the launcher for this agent.
        waiting: Deadline and messages of the wait.
        make: Function that opens the port on machine 0, or connects to it.

    Raises:
        LaunchError: If the port is in use, is not opened before the deadline, or belongs to a program that does not
            answer before the deadline. Other errors of `make` propagate.
    """
    host, port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    me = f"{order.unit} {order.machine_rank} of {order.num_machines}"
    if order.machine_rank > 0:
        wait_for_host(host, port, waiting, me, order.unit)
    strange = f"what answers at {order.endpoint} is not the launcher of {order.unit} 0"
    try:
        return call_in_time(
            make,
            waiting,
            f"{me} waits for an answer from {order.endpoint}, where another program may listen in place of {order.unit} 0",
            f"{strange}, or it hangs: check that it was started with this address and port, or choose another port on all machines, "
            f"such as --main_process_port {find_free_port()}",
        )
    except (RendezvousError, RuntimeError, OSError) as error:
        if order.machine_rank == 0 and is_port_taken(error):
            raise LaunchError(describe_taken_port(port, find_free_port())) from error
        raise


def read_timeout() -> float:
    """Return the run's timeout: seconds that a rank may be missing from a collective; 0 for no limit."""
    return float(resolve_run_setting("timeout", None, DEFAULT_TIMEOUT)[0])


def read_time_to_meet(order: AgentOrder) -> float:
    """Return how many seconds to wait for all machines to arrive.

    This is the timeout in --rdzv_conf if there is one, otherwise the run's timeout. If both are 0, there is no limit.
    """
    return float(order.conf.get("timeout", 0)) or read_timeout() or math.inf


def create_handler_for(order: AgentOrder, print_line: Callable[[str], None], seal: Seal) -> RendezvousHandler:
    """Return the rendezvous handler for the backend that the agent's instructions name.

    For torch's own backends, first open the rendezvous store, or wait until machine 0 has opened it.

    Args:
        order: Instructions from the launcher for this agent.
        print_line: Function that prints a line.
        seal: Object that computes and checks HMACs with the user's secret.

    Raises:
        LaunchError: If the port of the store is in use, or cannot be reached before the deadline. Also if torch refuses
            an option of --rdzv_conf.
    """
    if order.backend == "local":
        return LocalRendezvous()
    if order.backend == "static":
        return StaticRendezvous(order, print_line, seal)
    try:
        return _create_torch_handler(order, print_line, seal)
    except (TypeError, ValueError) as error:  # raised by torch's checks of the options
        options = ",".join(f"{name}={value}" for name, value in order.conf.items())
        raise LaunchError(f"--rdzv_conf {options} is refused by torch's rendezvous: {error}") from error


def _create_torch_handler(order: AgentOrder, print_line: Callable[[str], None], seal: Seal) -> RendezvousHandler:
    """Return the handler of torch's dynamic rendezvous (c10d), whose state is sealed with the user's secret.

    Args:
        order: Instructions from the launcher for the agent.
        print_line: Function that prints a line for the user.
        seal: Object that computes and checks HMACs with the user's secret.

    Raises:
        LaunchError: If the store of the rendezvous cannot be reached in time.
    """
    seconds = int(min(read_time_to_meet(order), _INFINITE_SECONDS))
    defaults: dict[str, Any] = {
        "join_timeout": seconds,
        "last_call_timeout": LAST_CALL_TIMEOUT,
        # By default torch compares host names, which gives a wrong answer on many clusters.
        "is_host": str(order.machine_rank == 0).lower(),
    }
    if order.min_machines < order.num_machines:
        defaults |= {"last_call_timeout": LATE_JOIN_TIMEOUT, "keep_alive_interval": KEEP_ALIVE_INTERVAL}
    conf = {**defaults, **order.conf, "rank": order.machine_rank}
    parameters = RendezvousParameters(
        order.backend,
        order.endpoint,
        order.run_id,
        order.min_machines,
        order.num_machines,
        local_addr=find_own_address(find_host(order)),
        **conf,
    )
    waiting = create_wait(order, print_line)

    def make_handler() -> RendezvousHandler:
        is_host = bool(parameters.get_as_bool("is_host"))
        read_timeout = parameters.get_as_int("read_timeout", 60) or 60
        store = _open_store(order, is_host, float(read_timeout))
        return create_handler(store, _SealedBackend(store, order.run_id, seal), parameters)

    return _connect_in_time(order, waiting, make_handler)


def create_watch(order: AgentOrder, print_line: Callable[[str], None], seal: Seal) -> RendezvousWatch | None:
    """Return a thread that reports missing machines while torch's own rendezvous blocks.

    Return None for backends other than c10d, whose rendezvous handlers report missing machines themselves.

    Args:
        order: Instructions from the launcher for this agent.
        print_line: Function that prints a line.
        seal: Object that computes and checks HMACs with the user's secret.
    """
    if order.backend != "c10d":
        return None
    waiting = create_wait(order, print_line)

    def connect_store() -> SealedStore:
        return SealedStore(PrefixStore(f"{order.run_id}/headway", _open_store(order, False, 30)), STORE_NAME, seal)

    return RendezvousWatch(connect_store, order.machine_rank, order.num_machines, waiting, order.endpoint, order.unit)
