"""The process that keeps one machine's workers: torch's elastic agent, a store on a free port, a failure report.

Run as `python -m headway.launch agent ORDER`, ORDER being plan.AgentOrder as JSON. It is a process of its own: of the
launcher's files only this one, processes.py and rendezvous.py import torch.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.numa.binding import AffinityMode, NumaOptions

from headway.common.untrusted import Seal, UnsealedCounter, users_secret
from headway.errors import PREEMPTED, ConfigError, ControlPlaneError, LaunchError
from headway.launch.agent import endings, metrics, rendezvous
from headway.launch.agent.exchange import AgentChannel
from headway.launch.agent.peers import PeerMachines
from headway.launch.agent.processes import (
    DEADLY,
    RankFiles,
    SharedMemory,
    code_of,
    end_sessions,
    ignore,
    kill_when_stuck,
)
from headway.launch.agent.records import PreemptedRun, find_preempted
from headway.launch.machine import MemoryWatch
from headway.launch.plan import AgentOrder
from headway.launch.watch.hang_watch import GRACE as HANG_GRACE
from headway.launch.watch.hang_watch import HangWatch, Worker
from headway.log import silence_elastic
from headway.runtime import pulse
from headway.runtime.control_plane.store import SealedStore
from headway.runtime.network import own_address, wait_for_name

GRACE = 15
"""Seconds between asking workers to end and killing them."""

POLITE = 3
"""Seconds between an interrupt and asking the workers once more."""

SETTLE = 0.5
"""Seconds that the other workers get to fail by themselves after the first."""

WITHOUT_PEER = 5
"""Seconds that workers get to end in after a machine was lost, and this process twice; then all is killed."""


TAKES_TIMEOUT = "shutdown_timeout" in signature(LocalElasticAgent).parameters
"""Is torch's agent told how long workers may take to end? That of 2.11 is not."""


class Agent(LocalElasticAgent):
    """torch's agent, which also says what ended an attempt."""

    def __init__(self, order: AgentOrder, spec: WorkerSpec, files: RankFiles, seal: Seal) -> None:
        time_to_end: dict[str, Any] = {"shutdown_timeout": GRACE} if TAKES_TIMEOUT else {}
        super().__init__(
            spec, files, exit_barrier_timeout=300, log_line_prefix_template="[${role_name} ${rank}] ", **time_to_end
        )
        self._order = order
        self._files = files
        self._memory = MemoryWatch()
        self._peers: PeerMachines | None = None
        self._has_ended_attempt = False
        self._attempt = 0
        self.handed_on: signal.Signals | None = None
        host = rendezvous.host_of(order)
        if order.num_machines > 1:
            address = own_address(host) or ""
            self._peers = PeerMachines(
                order.machine_rank, address, order.machine_timeout, self._lost_a_machine, order.unit
            )
        self._seal = seal
        self._exchange = AgentChannel(order.machine_rank, order.num_machines, host, seal, order.unit)
        self._watch = HangWatch(rendezvous.timeout(), _say, self._peers)
        self._is_watching = False
        self._given_up: set[int] = set()
        self._metrics: metrics.MetricsServer | None = None
        if order.metrics_port is not None:
            told = metrics.RunMetrics(self._pulses, lambda: max(0, self._attempt - 1))
            self._metrics = metrics.MetricsServer(order.metrics_port, told)
        self.exit_code: int | None = None
        self.code_when_stuck: int | None = None
        self.report: endings.Report | None = None

    @property
    def _workers(self) -> dict[int, SubprocessHandler]:
        """The processes of this machine by local rank; none before the first have been started."""
        context = cast(SubprocessContext | None, self._pcontext)
        return {} if context is None else context.subprocess_handlers

    @property
    def _pids(self) -> dict[int, int]:
        """Their numbers."""
        return {} if self._pcontext is None else self._pcontext.pids()

    @property
    def _ranks(self) -> dict[int, int]:
        """The global rank of each local one."""
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        watch = rendezvous.watch_for(self._order, _say, self._seal)
        try:
            super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise LaunchError(watch.late() if watch is not None else str(error)) from error
        finally:
            if watch is not None:
                watch.end()
        self._has_ended_attempt = False
        self._attempt += 1
        # Only a static meeting is at one store every time; elsewhere attempts need not be counted alike.
        attempt = self._order.max_restarts - self._remaining_restarts if self._order.backend == "static" else 0
        world_size = worker_group.workers[0].world_size
        num_here = worker_group.group_world_size or 1
        hub_port = self._peers.open_hub(rendezvous.host_of(self._order)) if self._peers is not None else 0
        store = SealedStore(cast(Any, self._store), rendezvous.MEETING, self._seal)
        address = self._exchange.begin(store, world_size, attempt, num_here, hub_port)
        self._files.control = address.encode()
        if self._peers is not None:
            ranks = [worker.global_rank for worker in worker_group.workers]
            trouble = self._peers.meet(address.host, address.hub_port, self._exchange.seal, ranks)
            if trouble is not None:
                _say(f"headway: lost machines will be noticed late: {trouble}; let this port through")
        if num_here < self._order.num_machines:
            _say(f"headway: {num_here} of {self._order.num_machines} machines take part: {world_size} processes")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for number in DEADLY:  # in the place of the engine's own handlers
            signal.signal(number, self._take)
        return pids

    def _take(self, number: int, frame: FrameType | None) -> None:
        """A signal to this process: handed on where the ranks answer it by a checkpoint, else it ends all."""
        if self.exit_code is not None or self._has_ended_well():
            self.code_when_stuck = self.exit_code or max(self._codes().values(), default=0)
            return
        readers = [pulse.HeartbeatFile(path, is_writer=False).read() for path in self._files.pulses.values()]
        is_request = number in (signal.SIGTERM, signal.SIGUSR1)
        if not is_request or (self.handed_on is None and not all(one.saves_on_signal for one in readers)):
            raise SignalException(f"got signal {number}", sigval=signal.Signals(number))
        self._remaining_restarts = 0
        if self.handed_on is None:
            self.handed_on = signal.Signals(number)
            what = f"headway: {self.handed_on.name}: the ranks save and end, within {self._order.grace:g} s\n"
            os.write(2, what.encode())  # a handler must not print: it may have interrupted just that
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _has_ended_well(self) -> bool:
        """Have all ranks of this machine come to a good end? Then a signal finds nothing left to end."""
        handlers = self._workers.values()
        return bool(handlers) and all(code_of(handler.proc) in (0, PREEMPTED) for handler in handlers)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._give_up_on_failed()
        seen, left = self._look(worker_group)
        step = endings.decide(seen)
        if step is endings.AgentAction.END_SAVED and left is not None:
            return self._end_with(worker_group, left, GRACE)
        if step is endings.AgentAction.END_ABORTED:
            told = endings.RunEnded(self._exchange.notice, worker_group.workers[0].world_size)
            return self._end_with(worker_group, told, HANG_GRACE)
        if step is endings.AgentAction.END_HANG and self._watch.found is not None:
            return self._end_hang(worker_group, endings.HangReport(self._watch.found))
        is_alone, codes = step is endings.AgentAction.END_ALONE, seen.codes
        if step is not endings.AgentAction.GO_ON:
            codes = self._end_the_rest(WITHOUT_PEER if is_alone else GRACE)
        result: RunResult = super()._monitor_workers(worker_group)
        if step is endings.AgentAction.GO_ON and result.is_failed():  # since the look
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            codes = {first.local_rank: first.exitcode}
        report = self._explain(worker_group, codes) if any(codes.values()) else None
        if report is not None or is_alone:
            report = self._exchange.merge(report, self._has_lost_one)
        self.report = report
        if self._peers is not None and (report is not None or is_alone):
            self.report = self._blame_a_machine(self._peers, report)
            result = RunResult(state=WorkerState.FAILED, failures=result.failures)
        return result

    def _look(self, worker_group: WorkerGroup) -> tuple[endings.AgentSnapshot, PreemptedRun | None]:
        """What is seen now; where ranks begin to end with a checkpoint, after all of them have."""
        codes = self._ended()
        self._let_watch(worker_group, codes)
        left = None
        if PREEMPTED in codes.values():
            left = next(filter(None, map(find_preempted, self._files.records.values())), None)
            self._wait_for_all(GRACE if left is not None else 0)
            codes = self._ended()
        is_alone = self._exchange.has_failed_elsewhere or (self._peers is not None and self._peers.lost is not None)
        is_aborted, hangs = bool(self._exchange.notice), self._watch.found is not None
        return endings.AgentSnapshot(codes, left is not None, is_aborted, hangs, is_alone), left

    def _failed_alive(self) -> list[int]:
        """Local ranks that have failed, by what they wrote, and whose processes are still there."""
        codes = self._codes()
        return [one for one, path in self._files.records.items() if one not in codes and path.exists()]

    def _give_up_on_failed(self) -> None:
        """End the process of a rank that has failed, where a thread of it that does nothing keeps it from ending."""
        for local_rank in self._failed_alive():
            if self._watch.has_given_up(self._ranks[local_rank], GRACE):
                self._given_up.add(local_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pids[local_rank], signal.SIGKILL)

    def _has_lost_one(self) -> bool:
        """Is a machine lost or silent, so that waiting for its word is in vain?"""
        return self._peers is not None and (self._peers.lost is not None or self._peers.silent() is not None)

    def _end_with(self, worker_group: WorkerGroup, report: PreemptedRun | endings.RunEnded, grace: int) -> RunResult:
        """End all workers of a run that has saved, or was aborted; it is not restarted."""
        self._remaining_restarts = 0
        self.report = report
        self._end_the_rest(grace)
        result: RunResult = super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def _let_watch(self, worker_group: WorkerGroup, ended: dict[int, int]) -> None:
        """Tell the hang watch which ranks there are and which have ended."""
        if not self._is_watching:
            pids, paths = self._pids, self._files.pulses
            workers = worker_group.workers
            self._watch.begin(
                [Worker(one.global_rank, pids[one.local_rank], paths[one.local_rank]) for one in workers],
                workers[0].world_size,
            )
            self._is_watching = True
        ranks = self._ranks
        # One that has failed and not ended yet is no riddle, and what the others wait for.
        known = {**dict.fromkeys(self._failed_alive(), 1), **ended}
        self._watch.note_ended({ranks[local_rank]: code for local_rank, code in known.items()})
        self._exchange.note_left([ranks[local_rank] for local_rank, code in ended.items() if code == 0])

    def _end_hang(self, worker_group: WorkerGroup, report: endings.HangReport) -> RunResult:
        """End all workers of a run that hangs, the stopped ones too."""
        self._watch.end()
        self.report = report
        if self._remaining_restarts == 0:
            self.leave(report.headline(), report.exit_code)  # now, so that all machines end at the same time
        self._close(HANG_GRACE)
        if left := self._held_by_the_kernel():
            self._remaining_restarts = 0  # they hold devices, ports and memory
            self.report = replace(report, left=tuple(left))
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def _held_by_the_kernel(self) -> list[int]:
        """The workers that even SIGKILL has not ended: they wait for a disk that does not answer."""
        codes = self._codes()
        return [pid for local_rank, pid in self._pids.items() if local_rank not in codes]

    def _blame_a_machine(self, peers: PeerMachines, report: endings.FailureReport | None) -> endings.Report | None:
        """The loss of a machine in the place of what it led to here."""
        self._has_ended_attempt = True
        if report is not None and not report.is_consequence:
            return report
        deadline = time.monotonic() + WITHOUT_PEER  # what killed a connection here is often noticed there first
        while peers.lost is None and peers.silent() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        machine = peers.lost or peers.silent()
        if peers.has_lost_hub:
            self._remaining_restarts = 0  # machines meet there
        if machine is None:
            return report
        return endings.MachineLost(machine, self._order.machine_rank, report, peers.exit_code, self._order.unit)

    def _lost_a_machine(self) -> None:
        """Called on the peers' thread: see that this machine's part ends even where the main thread waits for ever."""
        attempt = self._attempt

        def force() -> None:
            assert self._peers is not None
            has_ended = self._has_ended_attempt or attempt != self._attempt
            if has_ended and not self._peers.has_lost_hub:
                return  # the main thread has seen to it, and may be waiting for that machine to come back
            if not has_ended:
                _say(endings.MachineLost(str(self._peers.lost), self._order.machine_rank, unit=self._order.unit).text())
            self.kill()
            os._exit(self._peers.exit_code)

        timer = threading.Timer(2 * WITHOUT_PEER, force)
        timer.daemon = True
        timer.start()

    def _pulses(self) -> dict[int, Path]:
        """The pulse of each rank that was started here."""
        ranks = self._ranks
        return {ranks[local]: path for local, path in dict(self._files.pulses).items() if local in ranks}

    def kill(self) -> None:
        """End the workers and their children at once, and with them the run."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._files.memory.remove()

    def end(self) -> None:
        """Stop the threads before Python does."""
        self._watch.end()
        self._exchange.end()
        if self._metrics is not None:
            self._metrics.end()

    def leave(self, why: str = "", exit_code: int = 0) -> None:
        """Tell the other machines that this one ends, and why."""
        if self._peers is not None:
            self._peers.leave(why, exit_code)

    def _ended(self) -> dict[int, int]:
        """Exit codes by local rank of the workers that have ended by themselves, or failed before they were ended."""
        return {local_rank: 1 if local_rank in self._given_up else code for local_rank, code in self._codes().items()}

    def _codes(self) -> dict[int, int]:
        codes = {local_rank: handler.proc.poll() for local_rank, handler in self._workers.items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}

    def _end_the_rest(self, grace: int) -> dict[int, int]:
        """End every worker; return the exit codes of those that had ended without being told."""
        self._wait_for_all(SETTLE)  # several ranks often fail alike, and each should have its say
        ended = self._ended()
        self._close(grace)
        return ended

    def _close(self, grace: int) -> None:
        """End all workers, which are told that this is not a request to save."""
        assert self._pcontext is not None
        self._tell_to_end()
        self._pcontext.close(timeout=grace)

    def _tell_to_end(self) -> None:
        for path in self._files.pulses.values():
            with contextlib.suppress(OSError):
                pulse.tell_to_end(path)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        context = self._pcontext
        self._tell_to_end()
        if death_sig == signal.SIGINT and context is not None:
            # A KeyboardInterrupt lets a program tidy up, but never comes to one that waits in a collective.
            for handler in self._workers.values():
                if handler.proc.poll() is None:
                    handler.close(death_sig=death_sig)
            self._wait_for_all(POLITE)
            death_sig = signal.SIGTERM
        is_held = isinstance(self.report, endings.HangReport) and bool(self.report.left)
        seconds = 1 if is_held else timeout
        if context is not None and not TAKES_TIMEOUT:
            context.close(death_sig, seconds)  # torch's own then finds nothing to wait for
        super()._shutdown(death_sig, *([seconds] if TAKES_TIMEOUT else []))
        if self._worker_group.state is not WorkerState.SUCCEEDED and context is not None:
            end_sessions(context.pids().values())

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._ended()) < self._order.num_local and time.monotonic() < deadline:
            time.sleep(0.02)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.report is not None:
            _say(self.report.text())
            self._keep(self.report)
            attempt = self._order.max_restarts - self._remaining_restarts
            _say(f"headway: starting all processes again ({attempt} of {self._order.max_restarts} restarts)")
            self.report = None
        self._memory = MemoryWatch()
        self._watch.end()
        self._is_watching = False
        self._given_up.clear()
        super()._restart_workers(worker_group)

    def _explain(self, worker_group: WorkerGroup, ended: Mapping[int, int]) -> endings.FailureReport:
        pids = self._pids
        found = (self._files.death(rank, local, pids[local], ended.get(local)) for local, rank in self._ranks.items())
        deaths = tuple(death for death in found if death is not None)
        finished = tuple(worker.global_rank for worker in worker_group.workers if ended.get(worker.local_rank) == 0)
        return endings.FailureReport(deaths, worker_group.workers[0].world_size, self._memory.verdict(), finished)

    def _keep(self, report: endings.Report) -> bool:
        """Write failure.json, where there is a failure and a folder for it; says whether."""
        if self._order.log_dir is None or isinstance(report, PreemptedRun):
            return False
        report.write(Path(self._order.log_dir) / "failure.json")
        return True

    def finish(self, has_failed: bool) -> int:
        """Say what ended the last attempt, here and to the other machines; return the exit code of the run."""
        if total := self._seal.strangers.total():
            _say(f"headway: {total}")
        if self.report is None and has_failed:
            self.report = endings.RunEnded(
                "the run was ended, and no machine has said why", self._worker_group.workers[0].world_size
            )
        report = self.report
        self.exit_code = 0 if report is None else report.exit_code
        if report is None or isinstance(report, PreemptedRun):
            self.leave()
        else:
            self.leave(report.headline(), report.exit_code)
        if report is not None:
            _say(report.text())
            if self._keep(report):
                _say(f"headway: logs and failure.json are in {self._order.log_dir}")
        return self.exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _spec(order: AgentOrder, handler: RendezvousHandler) -> WorkerSpec:
    worker = ["-m", "headway.launch", "worker", str(os.getpid()), order.program.kind]
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
        local_addr=None if order.backend == "local" else own_address(rendezvous.host_of(order)),
        numa_options=NumaOptions(AffinityMode.NODE) if order.is_bound_to_cores else None,
    )


def run(order: AgentOrder) -> int:
    """Carry out the order; return the exit code."""
    silence_elastic()
    scratch, memory = tempfile.mkdtemp(prefix="headway-"), SharedMemory()
    agent: Agent | None = None
    if order.log_dir is not None:
        Path(order.log_dir, "failure.json").unlink(missing_ok=True)  # of an earlier run
    try:
        if order.endpoint:
            wait_for_name(rendezvous.host_of(order), rendezvous.time_to_meet(order), _say)
        rendezvous.use_interface(order)
        seal = Seal(users_secret(order.secret_file), UnsealedCounter(lambda text: _say(f"headway: {text}")))
        handler = rendezvous.handler_for(order, _say, seal)
        agent = Agent(order, _spec(order, handler), RankFiles(order, Path(scratch), memory), seal)
        kill_when_stuck(agent, order.grace, GRACE + 5, _say)
        code = agent.finish(agent.run().is_failed())
        handler.shutdown()
        return code
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        ignore()
        if agent is not None:
            agent.leave(f"stopped by {name}", 128 + int(stopped.sigval))
        _say(f"headway: stopped by {name}; all {order.num_local} processes of this machine have ended")
        return 128 + int(stopped.sigval)
    except (LaunchError, ControlPlaneError, ConfigError) as error:
        _say(f"headway: {error}")
        return 1
    except (RendezvousError, ConnectionError, TimeoutError, RuntimeError) as error:
        where = f" at {order.endpoint}" if order.endpoint else ""
        _say(f"headway: the {order.num_machines} machines did not meet{where}: {type(error).__name__}: {error}")
        return 1
    finally:
        ignore()
        if agent is not None:
            agent.end()
        shutil.rmtree(scratch, ignore_errors=True)
        memory.remove()


def main(args: Sequence[str]) -> None:
    """Read the order from the command line and carry it out."""
    sys.exit(run(AgentOrder.decode(args[0])))
