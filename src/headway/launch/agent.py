"""The process that keeps one machine's workers: torch's elastic agent, a store on a free port, a failure report.

Run as `python -m headway.launch agent ORDER`, ORDER being plan.AgentOrder as JSON. This file and none beside it in the
launcher imports torch: it is a process of its own.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.numa.binding import AffinityMode, NumaOptions

from headway import env
from headway.launch.failure import Death, MemoryWatch, Record, Report, read_record
from headway.launch.plan import AgentOrder

GRACE = 15
"""Seconds between asking workers to end and killing them."""

POLITE = 3
"""Seconds between an interrupt and asking the workers once more."""

SETTLE = 0.5
"""Seconds that the other workers get to fail by themselves after the first."""

LOOPBACK = "127.0.0.1"


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


class RankFiles(LogsSpecs):
    """Where each rank's output and its record of an exception go: a folder per attempt, a file per rank."""

    def __init__(self, order: AgentOrder, scratch: Path) -> None:
        super().__init__(order.log_dir)
        self._order = order
        self._scratch = scratch
        self.records: dict[int, Path] = {}
        self._logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of the log files, or where nothing stays."""
        return self._order.log_dir or str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of one attempt, by local rank."""
        attempt = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(self.root_log_dir, "" if self._order.max_restarts == 0 else f"attempt{attempt}")
        folder.mkdir(parents=True, exist_ok=True)
        logs: dict[int, str] = {}
        self.records = {}
        for local_rank, variables in envs.items():
            logs[local_rank] = str(folder / f"rank{variables['RANK']}.log")
            record = self._scratch / f"rank{variables['RANK']}-attempt{attempt}.json"
            self.records[local_rank] = record
            variables["TORCHELASTIC_ERROR_FILE"] = str(record)
        screen = dict.fromkeys(envs, "")
        tee = self._order.tee
        stdouts = logs if tee in "13" and tee != "0" else screen
        # With "3" a worker sends its stderr where its stdout goes, so that one file holds both in order.
        stderrs = logs if tee == "2" else screen
        self._logs = logs if tee != "0" else {}
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=logs if stdouts is logs else {},
            tee_stderrs=logs if stderrs is logs else {},
            error_files={local_rank: str(path) for local_rank, path in self.records.items()},
        )

    def append_trace(self, local_rank: int, record: Record | None) -> None:
        """Let a rank's log file end with its own traceback, which the screen shows once for all ranks."""
        if record is not None and local_rank in self._logs:
            with open(self._logs[local_rank], "a") as log:
                log.write(record.trace)


class Agent(LocalElasticAgent):
    """torch's agent, which also says what ended an attempt."""

    def __init__(self, order: AgentOrder, spec: WorkerSpec, files: RankFiles) -> None:
        super().__init__(
            spec,
            files,
            exit_barrier_timeout=300,
            log_line_prefix_template="[${role_name} ${rank}] ",
            shutdown_timeout=GRACE,
        )
        self._order = order
        self._files = files
        self._memory = MemoryWatch()
        self.report: Report | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended()
        if any(ended.values()):
            ended = self._end_the_rest()
        result: RunResult = super()._monitor_workers(worker_group)
        if any(ended.values()):
            self.report = self._explain(worker_group, ended)
        return result

    def _ended(self) -> dict[int, int]:
        """Exit codes by local rank of the workers that have ended by themselves."""
        context = cast(SubprocessContext | None, self._pcontext)
        handlers = context.subprocess_handlers if context is not None else {}
        codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}

    def _end_the_rest(self) -> dict[int, int]:
        """End every worker; return the exit codes of those that had ended without being told."""
        self._wait_for_all(SETTLE)  # several ranks often fail alike, and each should have its say
        ended = self._ended()
        assert self._pcontext is not None
        self._pcontext.close(timeout=GRACE)
        return ended

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        context = cast(SubprocessContext | None, self._pcontext)
        if death_sig == signal.SIGINT and context is not None:
            # A KeyboardInterrupt lets a program tidy up, but never comes to one that waits in a collective.
            for handler in context.subprocess_handlers.values():
                if handler.proc.poll() is None:
                    handler.close(death_sig=death_sig)
            self._wait_for_all(POLITE)
            death_sig = signal.SIGTERM
        super()._shutdown(death_sig, timeout)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._ended()) < self._order.num_local and time.monotonic() < deadline:
            time.sleep(0.02)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.report is not None:
            _say(self.report.text())
            self._keep(self.report)
            attempt = self._order.max_restarts - self._remaining_restarts
            _say(f"headway: starting all processes anew ({attempt} of {self._order.max_restarts} restarts)")
            self.report = None
        self._memory = MemoryWatch()
        super()._restart_workers(worker_group)

    def _explain(self, worker_group: WorkerGroup, ended: dict[int, int]) -> Report:
        assert self._pcontext is not None
        pids = self._pcontext.pids()
        deaths = []
        for worker in worker_group.workers:
            path = self._files.records[worker.local_rank]
            record, code = read_record(path), ended.get(worker.local_rank)
            crash = Path(f"{path}.fault")
            has_crashed = code is not None and code < 0 and crash.exists()
            if record is None and not code:
                continue
            self._files.append_trace(worker.local_rank, record)
            deaths.append(Death(
                worker.global_rank, socket.gethostname(), pids[worker.local_rank], code, record,
                crash.read_text() if has_crashed else "", crash.stat().st_mtime if has_crashed else 0.0,
            ))  # fmt: skip
        return Report(tuple(deaths), worker_group.workers[0].world_size, self._memory.verdict())

    def _keep(self, report: Report) -> None:
        if self._order.log_dir is not None:
            report.write(Path(self._order.log_dir) / "failure.json")

    def finish(self) -> int:
        """Say what ended the last attempt; return the exit code of the run."""
        if self.report is None:
            return 0
        _say(self.report.text())
        self._keep(self.report)
        if self._order.log_dir is not None:
            _say(f"headway: logs and failure.json are in {self._order.log_dir}")
        return self.report.exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _local_address(endpoint: str) -> str | None:
    """This machine's address on the way to `endpoint`; None where there is no way. No packet is sent."""
    host, port = parse_rendezvous_endpoint(endpoint, default_port=1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _use_interface(order: AgentOrder) -> None:
    """Let gloo use the interface that leads to machine 0, unless the user has named one.

    Left to itself gloo looks the host's own name up, which many machines answer with a loopback address.
    """
    address = _local_address(order.endpoint) if order.num_machines > 1 else None
    for name, entries in psutil.net_if_addrs().items() if address is not None else ():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            env.set_default("GLOO_SOCKET_IFNAME", name)


def _handler(order: AgentOrder) -> RendezvousHandler:
    if order.backend == "local":
        return OwnStore()
    conf: dict[str, Any] = {"timeout": 900, **order.conf, "rank": order.machine_rank}
    if order.backend == "c10d":
        # Left to itself torch compares host names, which says the wrong thing on many clusters.
        conf = {"is_host": str(order.machine_rank == 0).lower(), "last_call_timeout": 3, **conf}
    parameters = RendezvousParameters(
        order.backend, order.endpoint, order.run_id, order.num_machines, order.num_machines,
        local_addr=_local_address(order.endpoint), **conf,
    )  # fmt: skip
    return rendezvous.get_rendezvous_handler(parameters)


def _spec(order: AgentOrder, handler: RendezvousHandler) -> WorkerSpec:
    worker = ["-u", "-m", "headway.launch", "worker", str(os.getpid()), order.program.kind]
    worker += ["merge" if order.tee == "3" else "apart", order.program.target, *order.program.args]
    address: tuple[str | None, int | None] = (None, None)
    if order.backend == "static":
        address = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    return WorkerSpec(
        role=order.role,
        local_world_size=order.num_local,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=tuple(text.replace("${local_rank}", "$${local_rank}") for text in worker),
        max_restarts=order.max_restarts,
        monitor_interval=order.monitor_interval,
        master_addr=address[0],
        master_port=address[1],
        local_addr=None if order.backend == "local" else _local_address(order.endpoint),
        numa_options=NumaOptions(AffinityMode.NODE) if order.is_bound_to_cores else None,
    )


def _kill_when_stuck(agent: Agent) -> None:
    """End everything a while after the first signal, even where the main thread waits for a dead machine."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        deadly = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        # The thread holds the sender too, which would be closed with this function's end.
        while sender.fileno() >= 0 and receiver.recv(1)[0] not in deadly:
            pass
        time.sleep(GRACE + 5)
        context = agent._pcontext
        for pid in context.pids().values() if context is not None else ():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="kill-when-stuck", daemon=True).start()


def run(order: AgentOrder) -> int:
    """Carry out the order; return the exit code."""
    # Its warnings speak of agents and closing signals; what a user needs is in the report.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    scratch = tempfile.mkdtemp(prefix="headway-")
    if order.log_dir is not None:
        Path(order.log_dir, "failure.json").unlink(missing_ok=True)  # of an earlier run
    try:
        _use_interface(order)
        handler = _handler(order)
        agent = Agent(order, _spec(order, handler), RankFiles(order, Path(scratch)))
        _kill_when_stuck(agent)
        agent.run()
        handler.shutdown()
        return agent.finish()
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        _say(f"headway: stopped by {name}; all {order.num_local} processes of this machine have ended")
        return 128 + int(stopped.sigval)
    except (RendezvousError, ConnectionError, TimeoutError, RuntimeError) as error:
        where = f" at {order.endpoint}" if order.endpoint else ""
        _say(f"headway: the {order.num_machines} machines did not meet{where}: {type(error).__name__}: {error}")
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(args: Sequence[str]) -> None:
    """Read the order from the command line and carry it out."""
    sys.exit(run(AgentOrder.decode(args[0])))
