"""The agents' connection to the control plane, over which they receive aborts and exchange reports of failures.

Machine 0's agent hosts the control plane's store. Only a background thread calls the store, because a call might never
return if the store's machine is cut off. Even in this case, the agent can end its workers.
"""

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from headway.common.sealing import Seal
from headway.common.untrusted import escape_json
from headway.core.runtime.control_plane.roll_call import describe_missing, list_present, name_ranks
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import NOTICE, StoreAddress, StoreLink, start_store
from headway.launch.agent.endings import FailureReport
from headway.launch.agent.records import ExceptionRecord, RankExit

_KEY = "headway/control"
_FAILED = "failed"

POLL_SECONDS = 0.2
"""Seconds between two checks for aborts and for failures on other machines."""

REPORTS_TIMEOUT = 8.0
"""Seconds that an agent waits for other machines to report their failures."""

REPORT_HEAD_START = 2.0
"""Seconds that the agents of other machines wait so that machine 0's agent can print its report and end first.

mpirun ends all tasks when the first one has ended.
"""


class AgentChannel:
    """Connection of one agent to the control plane, over which it receives aborts and reports of failures.

    The connection is renewed at each start of the ranks.

    Args:
        machine: Rank of this machine.
        num_machines: Number of machines.
        host: Address by which the other machines reach machine 0.
        seal: Object that computes and checks HMACs with the user's secret, from which the run's secret is derived.
        unit: "task" if each process has its own launcher and all launchers print to one screen, so that only one of
            them reports a failure. Otherwise "machine". Default: "machine".

    Attributes:
        notice: Reason why the run must end. Empty until a rank has aborted the run.
        has_failed_elsewhere: Whether another machine has reported a failure.
    """

    def __init__(self, machine: int, num_machines: int, host: str, seal: Seal, unit: str = "machine") -> None:
        self._machine = machine
        self._num_machines = num_machines
        self._host = host
        self._seal = seal
        self._salt = secrets.token_hex(16)
        self._has_one_screen = unit == "task"
        self._server: Any = None
        self._link: StoreLink | None = None
        self._world_size = 0
        self._num_here = num_machines
        self._finished_ranks: tuple[int, ...] = ()
        self._own_report = ""
        self._others: dict[int, dict[str, Any]] = {}
        self._thread: threading.Thread | None = None
        self.notice = ""
        self.has_failed_elsewhere = False

    @property
    def seal(self) -> Seal:
        """Object that computes and checks HMACs with the run's secret. Available after `connect`."""
        assert self._link is not None
        return self._link.seal

    def connect(
        self,
        meeting: SealedStore,
        world_size: int,
        start_number: int = 0,
        num_present: int | None = None,
        hub_port: int = 0,
    ) -> StoreAddress:
        """Connect to the other agents for one start of the ranks, and listen for failures. Return the store's address.

        The agents agree on the secret of the run, and on a prefix for the store's keys, which differs for each start.
        The run's secret is derived from the user's secret and a random salt of machine 0. If the user has set no
        secret, the salt alone determines the run's secret. So the salt is deleted from the rendezvous store after all
        machines have read it.

        Args:
            meeting: Store of the rendezvous, whose values are authenticated with the user's secret.
            world_size: Number of processes on all machines.
            start_number: Number of this start of the ranks, if all starts share one rendezvous store and all agents
                count them equally. Otherwise 0. Default: 0.
            num_present: Number of machines that take part in this start. Default: all machines.
            hub_port: Port on which machine 0 listens for heartbeats from the other machines; 0 for none. Default: 0.

        Returns:
            Address of the control plane's store for the workers of this start.

        Raises:
            ControlPlaneError: If the entry in the store was not written by machine 0 of this run.
        """
        self.stop_listening()  # otherwise the thread of the previous start might report old failures
        self._num_here = self._num_machines if num_present is None else num_present
        key = f"{_KEY}/{start_number}"
        if self._machine == 0:
            self._server = self._server or start_store(self._host)
            prefix = secrets.token_hex(6)
            address = StoreAddress(self._host, self._server.port, prefix, key=self._salt, hub_port=hub_port)
            if self._num_machines > 1:
                meeting.set(key, address.encode().encode())
        else:
            address = StoreAddress.decode(meeting.get(key).decode())
            if meeting.add(f"{key}/read", 1) == self._num_here - 1:
                meeting.delete_key(key)
        address = replace(address, key=self._seal.derive_secret(address.key))
        self._link = StoreLink(address, timedelta(seconds=30), unsealed_counter=self._seal.unsealed_counter)
        self._world_size = world_size
        self._finished_ranks = ()
        self._own_report = ""
        self._others = {}
        self.notice = ""
        self.has_failed_elsewhere = False
        self._thread = threading.Thread(
            target=self._poll_control_plane, args=(self._link,), name="control", daemon=True
        )
        self._thread.start()
        return address

    def record_finished_ranks(self, ranks: Sequence[int]) -> None:
        """Record the ranks of this machine that have ended without an error."""
        self._finished_ranks = tuple(ranks)

    def stop_listening(self) -> None:
        """Stop the listening thread.

        Call this before Python shuts down. A thread that returned from C++ during the shutdown would abort this
        process.
        """
        self._link, thread = None, self._thread
        if thread is not None:
            thread.join(5)

    # ---------------------------------------------------------------- listening

    def _poll_control_plane(self, link: StoreLink) -> None:
        """Poll the control plane for aborts and failures.

        This method runs on a background thread. When the ranks are started again, a new thread replaces it.
        """
        try:
            store = link.store
            while link is self._link:
                time.sleep(POLL_SECONDS)
                if self._own_report and store.find(f"deaths/{self._machine}") is None:
                    store.set(f"deaths/{self._machine}", self._own_report.encode())
                    store.set(_FAILED, b"")
                if self._finished_ranks and not self.notice:
                    self._check_contract(store)
                if not self.notice:
                    self.notice = escape_json((store.find(NOTICE) or b"").decode())
                if self._num_machines > 1 and store.find(_FAILED) is not None:
                    self._hear_failures(store)
        except (RuntimeError, OSError, ValueError) as error:
            # In a run on several machines, the heartbeats between them report that the host of the store is gone.
            if link is self._link and self._num_machines == 1:
                print(f"headway: the control plane is lost: {error}", file=sys.stderr, flush=True)

    def _check_contract(self, store: SealedStore) -> None:
        """Abort the run if a local rank has ended before joining the run, because other ranks would wait forever.

        Do nothing if no rank has joined the run.
        """
        here = list_present(store, self._world_size)
        missing = [rank for rank in self._finished_ranks if rank not in here]
        if missing and here:
            they = "it" if len(missing) == 1 else "they"
            absent = [rank for rank in range(self._world_size) if rank not in here]
            notice = f"{name_ranks(missing)} ended with exit code 0 before {they} joined the run: "
            store.set(NOTICE, (notice + describe_missing(self._world_size, absent, "so far")).encode())

    def _hear_failures(self, store: SealedStore) -> None:
        """Read the failure reports that the other machines have written to the store since the last call."""
        for machine in range(self._num_machines):
            if machine == self._machine or machine in self._others:
                continue
            text = store.find(f"deaths/{machine}")
            if text is not None:
                self._others[machine] = escape_json(json.loads(text))
        self.has_failed_elsewhere = bool(self._others)

    # ---------------------------------------------------------------- failures

    def merge(self, own: FailureReport | None, is_over: Callable[[], bool]) -> FailureReport | None:
        """Report this machine's failures to the other machines, and merge the reports of all machines.

        Args:
            own: Failures on this machine. None if there are none.
            is_over: Function that returns whether to stop waiting for the reports, because a machine is lost.

        Returns:
            The merged report, with the same first failure on every machine. None if no machine has failed. If only
                one machine takes part in the run, `own` is returned unchanged.
        """
        if self._num_here == 1:
            return own
        self._own_report = json.dumps({} if own is None else asdict(own))
        _wait_until(lambda: len(self._others) == self._num_here - 1 or is_over(), REPORTS_TIMEOUT)
        # Give this machine's failures time to reach the others. This process might end next, and on machine 0 the store
        # ends with it.
        time.sleep(2 * POLL_SECONDS)
        reports = [report for report in (own, *map(_decode_report, self._others.values())) if report is not None]
        deaths = tuple(death for report in reports for death in report.deaths)
        if not deaths:
            return None
        merged = FailureReport(
            deaths, self._world_size, "", tuple(sorted(rank for report in reports for rank in report.finished))
        )
        memory = next(report.memory for report in reports if merged.first in report.deaths)
        # Machine 0 has reported its own failures, so it is alive and about to print the full report.
        is_told = self._has_one_screen and 0 in self._others
        if is_told:
            _wait_until(is_over, REPORT_HEAD_START)
            time.sleep(2 * POLL_SECONDS)
        return replace(merged, memory=memory, is_printed_by_rank_0=is_told)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until the function returns True, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)


def _decode_report(content: dict[str, Any]) -> FailureReport | None:
    """Return the failures of another machine from the JSON object that it has sent. None if it had no failures."""
    if not content:
        return None
    deaths = tuple(
        RankExit(**{**death, "record": None if death["record"] is None else ExceptionRecord(**death["record"])})
        for death in content["deaths"]
    )
    return FailureReport(**{**content, "deaths": deaths, "finished": tuple(content["finished"])})
