"""Wait until all machines have arrived at the rendezvous, with messages that name the missing ones."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.errors import LaunchError
from headway.launch.agent.rendezvous_wait import POLL_SECONDS, RendezvousWait

_KEY = "headway/here"


def wait_for_host(host: str, port: int, waiting: RendezvousWait, me: str, unit: str = "machine") -> None:
    """Wait until a program listens at the address of the rendezvous.

    Args:
        host: Address of machine 0.
        port: Port of the rendezvous.
        waiting: Deadline and messages of this wait.
        me: Name of this machine in messages.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.
            Default: "machine".

    Raises:
        LaunchError: If no program listens at this address before the deadline.
    """
    while True:
        try:
            with socket.create_connection((host, port), timeout=3):
                return
        except OSError as error:
            why = str(error.strerror or error).lower()
        waiting.print_if_due(f"{me} waits for {unit} 0 to open {host}:{port} ({why} so far)")
        if waiting.is_over:
            raise LaunchError(
                f"{unit} 0 did not open {host}:{port} {waiting.describe_limit()}: {why}. Start the launcher there with "
                "--machine_rank 0 and the same address and port, and see that no firewall is in between (`headway doctor`)"
            )
        time.sleep(POLL_SECONDS)


def record_arrival(store: SealedStore, machine: int) -> None:
    """Record in the rendezvous store that this machine has arrived."""
    store.set(f"{_KEY}/{machine}", socket.gethostname().encode())


def list_missing(store: SealedStore, machines: Sequence[int]) -> list[int]:
    """Return which of the given machines have not arrived yet."""
    return [machine for machine in machines if store.find(f"{_KEY}/{machine}") is None]


def name_machines(machines: Sequence[int], unit: str = "machine") -> str:
    """Return a phrase that lists machines, such as "machines 1, 3".

    Args:
        machines: Ranks of the machines.
        unit: Word for a machine: "machine", or "task" if each process has its own launcher. Default: "machine".
    """
    return f"{unit}{'s' if len(machines) > 1 else ''} {', '.join(map(str, machines))}"


def wait_for_all(
    store: SealedStore, machine: int, num_machines: int, waiting: RendezvousWait, where: str, unit: str
) -> None:
    """Record this machine's arrival and wait until all machines have arrived.

    Args:
        store: Store of the rendezvous.
        machine: Rank of this machine.
        num_machines: Number of machines.
        waiting: Deadline and messages of this wait.
        where: Address of the rendezvous in messages.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.

    Raises:
        LaunchError: If machines have not arrived before the deadline. The message names them.
    """
    record_arrival(store, machine)
    absent: Sequence[int] = range(num_machines)
    while absent := list_missing(store, absent):
        waiting.print_if_due(f"{unit} {machine} of {num_machines} waits at {where} for {name_machines(absent, unit)}")
        if waiting.is_over:
            raise LaunchError(describe_late(absent, num_machines, waiting, where, unit))
        time.sleep(POLL_SECONDS)
    waiting.report_end(f"all {num_machines} {unit}s are there")


def describe_late(absent: Sequence[int], num_machines: int, waiting: RendezvousWait, where: str, unit: str) -> str:
    """Return the error message for a rendezvous that was not complete at its deadline.

    Args:
        absent: Machines that have not arrived. Empty if all have arrived, but the rendezvous has not finished.
        num_machines: Number of machines.
        waiting: Wait whose deadline has passed.
        where: Address of the rendezvous.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.
    """
    who = f"{name_machines(absent, unit)} did not come" if absent else f"not all {unit}s began"
    return (
        f"the {num_machines} {unit}s did not meet at {where}: {who} {waiting.describe_limit()}. Start the launcher there with its "
        "own command; `headway launch` without --machine_rank prints the commands"
    )


class RendezvousWatch:
    """Thread that reports which machines are missing while torch's own rendezvous blocks the main thread.

    The constructor starts the thread.

    Args:
        connect: Function that connects to the store of the rendezvous.
        machine: Rank of this machine.
        num_machines: Number of machines.
        waiting: Deadline and messages of the wait.
        where: Address of the rendezvous in messages.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.
    """

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
        self._me = machine
        self._num_machines = num_machines
        self._waiting = waiting
        self._where = where
        self._unit = unit
        self._absent: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="who-is-missing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Record this machine's arrival, and print from time to time which machines are missing. Executed by the thread."""
        try:
            store = self._connect()
            record_arrival(store, self._me)
            self._absent = list(range(self._num_machines))
            while not self._is_over.wait(POLL_SECONDS):
                self._absent = list_missing(store, self._absent)
                who = f" for {name_machines(self._absent, self._unit)}" if self._absent else ""
                self._waiting.print_if_due(
                    f"{self._unit} {self._me} of {self._num_machines} waits at {self._where}{who}"
                )
        except (RuntimeError, OSError):
            return  # the rendezvous itself reports a lost store

    def describe_late(self) -> str:
        """Return the error message for a rendezvous that missed its deadline."""
        return describe_late(self._absent, self._num_machines, self._waiting, self._where, self._unit)

    def stop(self) -> None:
        """Stop the thread after the rendezvous has finished or failed."""
        self._is_over.set()
        self._thread.join(5)
