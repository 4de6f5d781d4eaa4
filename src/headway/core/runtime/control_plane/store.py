"""TCPStore of the control plane: hosting it, connecting to it, and waiting for its keys."""

import contextlib
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from headway.common import env
from headway.common.sealing import Seal, UnsealedCounter
from headway.common.untrusted import escape_json, parse_json, shorten_repr
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.network import open_listener
from headway.errors import ConfigError, ControlPlaneError, LaunchError
from headway.log import get_logger

log = get_logger(__name__)

NOTICE = "notice"
"""Key of the store that announces the end of the run. Its value is the reason."""

AGENT, RANK_0 = "the launcher", "rank 0"
"""Processes that can host the store, as named in messages."""

_MAX_POLL_INTERVAL = 0.05
"""Maximum seconds between two polls of the store in a long wait."""

_ABORT_POLL_INTERVAL = 0.25
"""Seconds between two checks for an abort of the run."""

_CLOSE_TIMEOUT = 1.0
"""Maximum seconds that the host of the store waits at its end, so that other ranks notice the end or the abort."""

_ADDRESS_KEY, _HOST_FINISHED_KEY, _NUM_CLOSED_KEY = "control", "goodbye", "gone"


@dataclass(frozen=True)
class StoreAddress:
    """Address of the control plane's store.

    Attributes:
        host: Host of the server.
        port: Port of the server.
        attempt: Prefix of the store's keys, equal on all ranks. Each start of all ranks has a different prefix.
        hosted_by: Process that hosts the store: `AGENT` (the launcher's agent) or `RANK_0`.
        key: Secret of the run in hexadecimal. In an address that is published for the rendezvous, it is the salt with
            which each process derives the run's secret from the user's secret.
        hub_port: Port on machine 0 for the heartbeats of other machines; 0 in a run on one machine.
    """

    host: str
    port: int
    attempt: str
    hosted_by: str = AGENT
    key: str = field(default="", repr=False)
    hub_port: int = 0

    def encode(self) -> str:
        """Return the address as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "StoreAddress":
        """Parse an address from JSON text.

        Raises:
            ConfigError: If the text is not a valid address.
        """
        try:
            content: dict[str, Any] = parse_json(text)
            bytes.fromhex(content["key"])
            address = cls(**content)
            are_texts = all(isinstance(each, str) for each in (address.host, address.attempt, address.hosted_by))
            are_ports = all(type(each) is int and 0 <= each < 65536 for each in (address.port, address.hub_port))
            is_valid = are_texts and are_ports
        except (ValueError, TypeError, KeyError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"{shorten_repr(text)} is not the address of a control plane of this Headway. Only the launcher sets {env.CONTROL}, "
                "so unset it"
            )
        return address


class StoreLink:
    """Connection of a process to the control plane's store. It has one client per thread, and the server if there is one.

    If rank 0 hosts the store, a thread of each process watches for an abort of the run. With a launcher, the agent does
    this.

    Args:
        address: Address of the store.
        timeout: Maximum time for connecting.
        server: Server of the store if this process hosts it. Default: None, if another process does.
        unsealed_counter: Counter of the values in the store that other programs have written. Default: a new counter.

    Attributes:
        seal: Object that computes and checks HMACs with the run's secret.
        has_host_finished: Whether rank 0 has announced that it ends without an error.
    """

    def __init__(
        self,
        address: StoreAddress,
        timeout: timedelta,
        server: TCPStore | None = None,
        unsealed_counter: UnsealedCounter | None = None,
    ) -> None:
        self.address = address
        self.seal = Seal(bytes.fromhex(address.key), unsealed_counter or UnsealedCounter(log.warning))
        self.has_host_finished = False
        self._timeout = timeout
        self._server = server
        self._connections = threading.local()  # each thread's client of the store
        self._is_closed = threading.Event()
        self._host_socket: socket.socket | None = None  # connection that shows whether the store's host is alive
        self._thread = threading.Thread(target=self._watch_for_abort, name="headway-control", daemon=True)
        if not self.is_launched:
            self._thread.start()

    @property
    def is_launched(self) -> bool:
        """Whether a launcher's agent hosts the store and handles aborts."""
        return self.address.hosted_by != RANK_0

    @property
    def store(self) -> SealedStore:
        """Client of the store for the calling thread.

        Its keys begin with the prefix of the last start of all ranks.

        Raises:
            LaunchError: If the store cannot be reached.
        """
        store: SealedStore | None = getattr(self._connections, "store", None)
        if store is None:
            prefix = self.address.attempt
            store = SealedStore(PrefixStore(prefix, self._connect_client()), f"control {prefix}", self.seal)
            self._connections.store = store
        return store

    def _connect_client(self) -> TCPStore:
        """Connect to the control plane's store.

        Raises:
            LaunchError: If it cannot be reached within the timeout.
        """
        host, port = self.address.host, self.address.port
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        except (DistError, RuntimeError, TimeoutError) as error:
            raise LaunchError(
                f"the control plane at {host}:{port}, hosted by {self.address.hosted_by}, cannot be reached: "
                f"{get_first_line(error)}. Let this port through, or see whether {self.address.hosted_by} still runs"
            ) from error

    def _watch_for_abort(self) -> None:
        """In a background thread, watch for an abort of the run, even while the main thread waits in C code.

        The background thread waits on a plain socket, which closes when the process that hosts the store exits. If the
        thread waited on a torch store, torch would log a C++ stack trace at that point.
        """
        try:
            self._host_socket = socket.create_connection((self.address.host, self.address.port))
            while (
                not self._is_closed.is_set() and not select.select([self._host_socket], [], [], _ABORT_POLL_INTERVAL)[0]
            ):
                self.has_host_finished = self.has_host_finished or self.store.find(_HOST_FINISHED_KEY) is not None
                notice = self.store.find(NOTICE)
                if notice is not None:
                    # The store ends with its host, so the host must be the last to end.
                    time.sleep(_CLOSE_TIMEOUT if self._server is not None else 0.0)
                    end_process(escape_json(notice.decode()))
        except (DistError, LaunchError, OSError) as error:
            log.debug("the control plane is lost: %s", get_first_line(error))
        if not self._is_closed.is_set() and not self.has_host_finished:
            print("headway: rank 0, which hosted the control plane, is gone", file=sys.stderr, flush=True)

    def close(self, rank: int, world_size: int) -> None:
        """Close the connection at a regular end of the run.

        If rank 0 hosts the store, rank 0 waits up to one second so that the other ranks notice the regular end.

        Args:
            rank: Rank of this process.
            world_size: Number of processes.
        """
        self._is_closed.set()
        if self.is_launched:
            self._connections = threading.local()
            return
        self._thread.join(5)
        try:
            if self._server is None:
                # Rank 0 might have ended already, and torch retries a refused connection until its timeout.
                self._timeout = min(self._timeout, timedelta(seconds=_CLOSE_TIMEOUT))
                self.store.add(_NUM_CLOSED_KEY, 1)
            else:
                self.store.set(_HOST_FINISHED_KEY, b"")
                deadline = time.monotonic() + _CLOSE_TIMEOUT
                while self.store.add(_NUM_CLOSED_KEY, 0) < world_size - 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
        except (DistError, LaunchError) as error:
            log.debug("rank %d: the control plane was gone already: %s", rank, get_first_line(error))
        self._connections = threading.local()
        self._server = None


def end_process(text: str) -> NoReturn:
    """Print the reason to standard error and end this process at once, with exit code 1.

    Nothing else is cleaned up: neither `finally` blocks nor `atexit` functions run.
    """
    print(f"headway: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def start_store(host: str, port: int = 0, timeout: timedelta = timedelta(seconds=60)) -> TCPStore:
    """Start a store that listens on one address of this machine. torch's own server would listen on all interfaces.

    Args:
        host: Address that clients will use. All interfaces are used if it is not an address of this machine.
        port: Port to listen on; 0 for any free port.
        timeout: Maximum time of a call to the store.

    Raises:
        OSError: If the port is taken or not allowed.
    """
    listener = open_listener(host, port)
    number, handle = listener.getsockname()[1], listener.detach()
    return TCPStore(
        host,
        number,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=handle,
    )


def host_control_plane(store: SealedStore, seal: Seal, is_alone_on_machine: bool, timeout: timedelta) -> StoreLink:
    """Start the control plane's store on rank 0, for runs without a launcher, and return rank 0's connection to it.

    The other ranks find its address in the process group's store (`join_control_plane`).

    Args:
        store: Rendezvous store of the process group.
        seal: Object that computes and checks HMACs with the user's secret.
        is_alone_on_machine: Whether all ranks run on this machine.
        timeout: Maximum time for connecting.
    """
    host = "127.0.0.1" if is_alone_on_machine else env.get("MASTER_ADDR") or socket.gethostname()
    server = start_store(host)
    address = StoreAddress(host, server.port, f"{os.getpid()}.{time.time_ns():x}", RANK_0, secrets.token_hex(16))
    store.set(_ADDRESS_KEY, address.encode().encode())
    return StoreLink(replace(address, key=seal.derive_secret(address.key)), timeout, server, seal.unsealed_counter)


def join_control_plane(store: SealedStore, seal: Seal, timeout: timedelta) -> StoreLink:
    """Return another rank's connection to the control plane that rank 0 hosts.

    Args:
        store: Rendezvous store of the process group, in which rank 0 publishes the address.
        seal: Object that computes and checks HMACs with the user's secret.
        timeout: Maximum time to wait for rank 0.

    Raises:
        ControlPlaneError: If rank 0 does not publish the address before the timeout.
    """
    address = StoreAddress.decode(wait_for_value(store, _ADDRESS_KEY, timeout).decode())
    return StoreLink(
        replace(address, key=seal.derive_secret(address.key)), timeout, unsealed_counter=seal.unsealed_counter
    )


def open_group_store(init_method: str | None, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, int]:
    """Open the store for the rendezvous of a process group.

    For "env://" with MASTER_ADDR and MASTER_PORT, rank 0 starts the store and the other ranks connect to it. torch's
    own rendezvous is not used then, because it could not name missing ranks. It is used for every other URL, if one of
    the two variables is missing, and if torchrun's agent hosts the store (TORCHELASTIC_USE_AGENT_STORE).

    Args:
        init_method: URL as for torch's `init_process_group`; None for "env://".
        rank: Rank of this process. A URL with a rank can override it.
        world_size: Number of processes. A URL with a number of processes can override it.
        timeout: Maximum time of a call to the store.

    Returns:
        The store, this process's rank, and the number of ranks.
    """
    address, port = env.get("MASTER_ADDR"), env.get_int("MASTER_PORT")
    if init_method not in (None, "env://") or not address or not port or env.get("TORCHELASTIC_USE_AGENT_STORE"):
        store, rank, world_size = next(rendezvous(init_method or "env://", rank, world_size, timeout=timeout))
        return store, rank, world_size
    if rank == 0:
        # If the port is in use, it might belong to a store of this process, which torch then returns below.
        with contextlib.suppress(OSError):
            return start_store(address, port, timeout), rank, world_size
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    return store, rank, world_size


def wait_for_keys(store: SealedStore, keys: Sequence[str], timeout: timedelta) -> bool:
    """Wait until all keys exist in the store, and return whether they have appeared before the timeout.

    The keys are polled at increasing intervals.

    torch's own wait runs in C++. It would not react to signals and would log two lines at every timeout.

    Args:
        store: Store of the control plane.
        keys: Keys to wait for.
        timeout: Maximum time to wait.
    """
    start, seconds = time.monotonic(), timeout.total_seconds()
    names = list(keys)
    while not store.check(names):
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(_MAX_POLL_INTERVAL, waited / 20))
    return True


def wait_for_value(store: SealedStore, key: str, timeout: timedelta, name: str = "") -> bytes:
    """Wait until a key has a value, and return the value.

    Args:
        store: Store to read from.
        key: Key to wait for.
        timeout: Maximum time to wait.
        name: Name of the key in the error message. Default: "", which uses `key`.

    Raises:
        ControlPlaneError: If the key has no value when the timeout expires, or its value was not written by this run.
    """
    if not wait_for_keys(store, [key], timeout):
        raise ControlPlaneError(
            f"no rank has set {name or key!r} on the control plane within {timeout.total_seconds():g} s; set it on one rank "
            "before others wait for it, or give more time"
        )
    return store.get(key)


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
