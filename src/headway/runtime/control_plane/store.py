"""The control plane's own TCPStore: who hosts it, how it is reached, and the roll call that begins a run.

torch's TCPStore is built directly, never through a rendezvous: that honours TORCHELASTIC_USE_AGENT_STORE for every
endpoint (pytorch #191989). One connection carries one call at a time, so each thread gets its own.

A store of torch's, in which each value of Headway's carries the run's proof; whatever else stands there counts as not written.

Counters, and that a key is there at all, are torch's and carry none: somebody who reaches the port can delay a run or end it by
them, but cannot put a value into it.
"""

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
from headway.common.text import listed
from headway.common.untrusted import Seal, UnsealedCounter, parse_json, plain, printable, shown
from headway.errors import ConfigError, ControlPlaneError, LaunchError
from headway.log import get_logger
from headway.runtime.network import listen


class SealedStore:
    """The store, as Headway uses it.

    Args:
        store: torch's.
        name: tells it from other stores of the run: a value opens in this one only, and under its own key.
        seal: of the run.
    """

    def __init__(self, store: Store, name: str, seal: Seal) -> None:
        self._store = store
        self._name = name
        self._seal = seal

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._store.set(key, self._seal.close(f"{self._name}/{key}", value))  # type: ignore[arg-type]

    def find(self, key: str) -> bytes | None:
        """The value, where the run has written one."""
        return self._open(key, self._store.get(key)) if self._store.check([key]) else None

    def get(self, key: str) -> bytes:
        """The value; waits for the key as torch's store does.

        Raises:
            ControlPlaneError: somebody else has written it.
        """
        return self._proven(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys in one call, else as `get`."""
        return [self._proven(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)))]

    def set_once(self, key: str, value: bytes) -> bytes:
        """Write a value unless there is one; returns the one there is."""
        sealed = self._seal.close(f"{self._name}/{key}", value)
        return self._proven(key, self._store.compare_set(key, "", sealed))  # type: ignore[arg-type, unused-ignore]

    def check(self, keys: Sequence[str]) -> bool:
        """Are all of these there?"""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to a counter; returns its sum."""
        return self._store.add(key, number)

    def reset(self, key: str) -> None:
        """Set a counter to 0, without a wait for the server."""
        self._store.set(key, "0")

    def delete_key(self, key: str) -> bool:
        """Take a key away; says whether it was there."""
        return self._store.delete_key(key)

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        value = self._seal.open(f"{self._name}/{key}", sealed)
        if value is None:
            what = f"the value of {key!r} in the {self._name} store, of another program or with another HEADWAY_SECRET,"
            self._seal.strangers.note(what)
        return value

    def _proven(self, key: str, sealed: bytes) -> bytes:
        value = self._open(key, sealed)
        if value is None:
            raise ControlPlaneError(
                f"the value of {key!r} in the {self._name} store was not written by this run: another program reaches its port, or "
                "HEADWAY_SECRET (--secret) is not the same on all machines (docs/security.md)"
            )
        return value


log = get_logger(__name__)
NOTICE = "notice"
"""The key that says that something has ended the run; its value says what."""

AGENT, RANK_0 = "the launcher", "rank 0"

_RAREST = 0.05
"""Seconds between looks in a long wait."""

_LISTEN, _FAREWELL = 0.25, 1.0
_ADDRESS, _GOODBYE, _GONE = "control", "goodbye", "gone"


@dataclass(frozen=True)
class StoreAddress:
    """Where the store is.

    Attributes:
        host, port: its server.
        attempt: the prefix that all ranks of one attempt share and no other attempt has.
        hosted_by: AGENT or RANK_0.
        key: the secret of the run, in hexadecimal; while ranks or machines still meet, the salt that makes it from the user's.
        hub_port: where machine 0 listens for the others' signs of life; 0 on one machine.
    """

    host: str
    port: int
    attempt: str
    hosted_by: str = AGENT
    key: str = field(default="", repr=False)
    hub_port: int = 0

    def encode(self) -> str:
        """The JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "StoreAddress":
        """Read `encode`'s text.

        Raises:
            ConfigError: it is something else.
        """
        try:
            content: dict[str, Any] = parse_json(text)
            bytes.fromhex(content["key"])
            found = cls(**content)
            is_sound = all(isinstance(each, str) for each in (found.host, found.attempt, found.hosted_by))
            is_sound = is_sound and all(
                type(each) is int and 0 <= each < 65536 for each in (found.port, found.hub_port)
            )
        except (ValueError, TypeError, KeyError):
            is_sound = False
        if not is_sound:
            raise ConfigError(
                f"{shown(text)} is no address of this Headway's control plane; only the launcher sets {env.CONTROL}: unset it"
            )
        return found


class StoreLink:
    """A process's way to the store: an address, the server where this process is the host, a connection per thread.

    Where rank 0 hosts it, a thread listens for aborts, which a launcher's agent does otherwise.

    Args:
        address: where the store is.
        timeout: how long connecting may take.
        server: the store itself, in the process that hosts it.
        strangers: is told of values that others have written.

    Attributes:
        seal: of the run.
        has_said_goodbye: has rank 0 said that it ends in order?
    """

    def __init__(
        self,
        address: StoreAddress,
        timeout: timedelta,
        server: TCPStore | None = None,
        strangers: UnsealedCounter | None = None,
    ) -> None:
        self.address = address
        self.seal = Seal(bytes.fromhex(address.key), strangers or UnsealedCounter(log.warning))
        self.has_said_goodbye = False
        self._timeout = timeout
        self._server = server
        self._connections = threading.local()
        self._is_over = threading.Event()
        self._presence: socket.socket | None = None
        self._thread = threading.Thread(target=self._listen, name="headway-control", daemon=True)
        if not self.is_launched:
            self._thread.start()

    @property
    def is_launched(self) -> bool:
        """Does a launcher's agent host the store, and see to aborts?"""
        return self.address.hosted_by != RANK_0

    @property
    def store(self) -> SealedStore:
        """This thread's connection, under the attempt's prefix.

        Raises:
            LaunchError: nothing answers there.
        """
        found: SealedStore | None = getattr(self._connections, "store", None)
        if found is None:
            name = self.address.attempt
            found = self._connections.store = SealedStore(
                PrefixStore(name, self._connect()), f"control {name}", self.seal
            )
        return found

    def _connect(self) -> TCPStore:
        host, port = self.address.host, self.address.port
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        except (DistError, RuntimeError, TimeoutError) as error:
            raise LaunchError(
                f"the control plane at {host}:{port}, hosted by {self.address.hosted_by}, cannot be reached: "
                f"{first_line(error)}. Let this port through, or see whether {self.address.hosted_by} still runs"
            ) from error

    def _listen(self) -> None:
        """Hear of an abort even while this process waits in C code.

        A bare connection shows when the host is gone; a call to its store would log a stack of C++ frames instead.
        """
        try:
            self._presence = socket.create_connection((self.address.host, self.address.port))
            while not self._is_over.is_set() and not select.select([self._presence], [], [], _LISTEN)[0]:
                self.has_said_goodbye = self.has_said_goodbye or self.store.find(_GOODBYE) is not None
                notice = self.store.find(NOTICE)
                if notice is not None:
                    # The store goes with its host, so that one must be the last to end.
                    time.sleep(_FAREWELL if self._server is not None else 0.0)
                    end_process(plain(notice.decode()))
        except (DistError, LaunchError, OSError) as error:
            log.debug("the control plane is lost: %s", first_line(error))
        if not self._is_over.is_set() and not self.has_said_goodbye:
            print("headway: rank 0, which hosted the control plane, is gone", file=sys.stderr, flush=True)

    def close(self, rank: int, world_size: int) -> None:
        """End in order: a rank 0 that hosts the store stays until the others have heard that it goes, a second at most."""
        self._is_over.set()
        if self.is_launched:
            self._connections = threading.local()
            return
        self._thread.join(5)
        try:
            if self._server is None:
                self.store.add(_GONE, 1)
            else:
                self.store.set(_GOODBYE, b"")
                deadline = time.monotonic() + _FAREWELL
                while self.store.add(_GONE, 0) < world_size - 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
        except (DistError, LaunchError) as error:
            log.debug("rank %d: the control plane was gone already: %s", rank, first_line(error))
        self._connections, self._server = threading.local(), None


def end_process(text: str) -> NoReturn:
    """Say why, and end this process at once, whatever its threads do."""
    print(f"headway: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def serve(host: str, port: int = 0, timeout: timedelta = timedelta(seconds=60)) -> TCPStore:
    """Open a store at an address of this machine; torch's own listens on all interfaces.

    Args:
        host: an address that clients will use, as for `listen`.
        port: 0 for any free one.
        timeout: how long a call to it may take.

    Raises:
        OSError: the port is taken or not allowed.
    """
    listener = listen(host, port)
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


def host_beside(store: SealedStore, seal: Seal, rank: int, is_alone_on_machine: bool, timeout: timedelta) -> StoreLink:
    """Without a launcher: rank 0 hosts the control plane, and the group's own store tells the others where.

    Args:
        store: the store at which the group has met.
        seal: the user's.
        rank: this process's.
        is_alone_on_machine: are all ranks on this machine?
        timeout: how long the others wait for rank 0.
    """
    server = None
    if rank == 0:
        host = "127.0.0.1" if is_alone_on_machine else env.get("MASTER_ADDR") or socket.gethostname()
        server = serve(host)
        address = StoreAddress(host, server.port, f"{os.getpid()}.{time.time_ns():x}", RANK_0, secrets.token_hex(16))
        store.set(_ADDRESS, address.encode().encode())
    else:
        address = StoreAddress.decode(wait_and_get(store, _ADDRESS, timeout).decode())
    return StoreLink(replace(address, key=seal.derive(address.key)), timeout, server, seal.strangers)


def meet(init_method: str | None, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, int]:
    """The store at which a group meets, with this process's rank and the number of ranks.

    Of torch's own ways, the one by MASTER_ADDR and MASTER_PORT would wait for all ranks, and could not name the missing.
    """
    address, port = env.get("MASTER_ADDR"), env.get_int("MASTER_PORT")
    if init_method not in (None, "env://") or not address or not port or env.get("TORCHELASTIC_USE_AGENT_STORE"):
        store, rank, world_size = next(rendezvous(init_method or "env://", rank, world_size, timeout=timeout))
        return store, rank, world_size
    if rank == 0:
        # A port in use may be that of a store that this process has opened already, which torch then hands out again.
        with contextlib.suppress(OSError):
            return serve(address, port, timeout), rank, world_size
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    return store, rank, world_size


def wait_for(store: SealedStore, keys: Sequence[str], timeout: timedelta) -> bool:
    """Look for the keys until all are there, more and more rarely; returns whether they are.

    Waiting in C++ would hear nothing of signals meanwhile, and log two lines at every timeout.
    """
    start, seconds = time.monotonic(), timeout.total_seconds()
    names = list(keys)
    while not store.check(names):
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(_RAREST, waited / 20))
    return True


def wait_and_get(store: SealedStore, key: str, timeout: timedelta, name: str = "") -> bytes:
    """The key's value, as soon as there is one.

    Args:
        name: what an error calls the key.

    Raises:
        ControlPlaneError: there is none in time.
    """
    if not wait_for(store, [key], timeout):
        raise ControlPlaneError(
            f"no rank has set {name or key!r} on the control plane within {timeout.total_seconds():g} s; set it on one rank "
            "before others wait for it, or give more time"
        )
    return store.get(key)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------- roll call


def check_in(store: SealedStore, rank: int, world_size: int, timeout: timedelta) -> None:
    """Say that this rank is here, and wait until all are.

    Raises:
        LaunchError: fewer came in time, or a rank came twice; the message has the numbers and names.
    """
    me = f"pid {os.getpid()} on {socket.gethostname()}"
    if store.add(f"here/{rank}/count", 1) > 1:
        other = whereabouts(store, rank) or "another process"
        raise LaunchError(
            f"more processes than the {world_size} that were asked for: rank {rank} is here twice ({other}, and {me}). "
            "Start each rank once, and do not hand RANK on to processes that are not ranks"
        )
    store.set(f"here/{rank}", me.encode())
    keys = [f"here/{other}" for other in range(world_size)]
    if wait_for(store, keys, timeout):
        return
    missing = [other for other in range(world_size) if not store.check([keys[other]])]
    if missing:
        raise LaunchError(roll(world_size, missing, f"within the timeout of {timeout.total_seconds():g} s"))


def whereabouts(store: SealedStore, rank: int) -> str:
    """Process and host of a rank that has checked in; empty for others."""
    return printable((store.find(f"here/{rank}") or b"").decode())


def present(store: SealedStore, world_size: int) -> list[int]:
    """The ranks that have checked in."""
    return [rank for rank in range(world_size) if store.check([f"here/{rank}"])]


def roll(world_size: int, missing: Sequence[int], when: str) -> str:
    """The sentence about ranks that did not come."""
    came = world_size - len(missing)
    return (
        f"{world_size} processes were asked for and {came} {'have' if came != 1 else 'has'} come {when}: missing "
        f"{named(missing)}. Look there for what keeps it (an import, a download, a branch that leaves early), or give more "
        "time with --timeout"
    )


def named(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 1, 3'; a long list is cut."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, ranks)), 20)}"
