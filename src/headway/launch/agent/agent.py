"""Agent: the process that manages one machine's workers, built on torch's elastic agent, with failure reports.

It is run as `python -m headway.launch agent ORDER`, where ORDER is `order.AgentOrder` as JSON. In a run on one machine,
the rendezvous store listens on a free port. The agent is a separate process because it imports torch.
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

from headway.common import env
from headway.common.sealing import Seal, UnsealedCounter, read_secret
from headway.core.runtime import heartbeat_file
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.network import find_own_address, wait_for_name
from headway.core.runtime.preempted_run import PreemptedRun, find_preempted
from headway.core.runtime.resume_advice import NO_CHECKPOINT
from headway.errors import PREEMPTED, ConfigError, ControlPlaneError, LaunchError
from headway.launch.agent import decision, endings, metrics, rendezvous
from headway.launch.agent.exchange import AgentChannel
from headway.launch.agent.peers import PeerMachines
from headway.launch.agent.processes import ENDING_SIGNALS, end_sessions, get_exit_code, ignore_signals, kill_when_stuck
from headway.launch.agent.rank_files import RankFiles
from headway.launch.agent.shared_memory import SharedMemory
from headway.launch.memory_watch import MemoryWatch
from headway.launch.order import AgentOrder
from headway.launch.watch.hang_watch import GRACE as HANG_GRACE
from headway.launch.watch.hang_watch import HangWatch, ObservedRank
from headway.log import silence_elastic

GRACE = 15
"""Seconds that workers have to end after the agent has asked them to. After that they are killed."""

INTERRUPT_GRACE = 3
"""Seconds between a SIGINT and a SIGTERM to the workers, if the launcher was interrupted by SIGINT."""

FAILURE_WINDOW = 0.5
"""Seconds to wait after the first failure, so that other workers that fail can record their own errors."""

PEER_LOSS_GRACE = 5
"""Seconds that workers have to end after another machine was lost.

The agent itself has twice as long to end. After that, all processes of the run on this machine are killed.
"""

HAS_SHUTDOWN_TIMEOUT = "shutdown_timeout" in signature(LocalElasticAgent).parameters
"""Whether torch's agent accepts a timeout for ending its workers. The agent of torch 2.11 does not."""


def main(args: Sequence[str]) -> None:
    """Run the agent and exit with the run's exit code.

    Args:
        args: Instructions from the launcher as JSON text, in the first element.
    """
    sys.exit(run(AgentOrder.decode(args[0])))


def run(order: AgentOrder) -> int:
    """Manage this machine's ranks from the start of the run to its end.

    Args:
        order: Instructions from the launcher for this agent.

    Returns:
        Exit code of the run.
    """
    silence_elastic()
    scratch, memory = tempfile.mkdtemp(prefix="headway-"), SharedMemory()
    agent: Agent | None = None
    if order.log_dir is not None:
        Path(order.log_dir, "failure.json").unlink(missing_ok=True)  # from an earlier run
    try:
        if order.endpoint:
            wait_for_name(rendezvous.find_host(order), rendezvous.read_time_to_meet(order), _print_line)
        rendezvous.use_interface(order)
        seal = Seal(read_secret(order.secret_file), UnsealedCounter(lambda text: _print_line(f"headway: {text}")))
        handler = rendezvous.create_handler_for(order, _print_line, seal)
        agent = Agent(order, _make_worker_spec(order, handler), RankFiles(order, Path(scratch), memory), seal)
        kill_when_stuck(agent, order.grace, GRACE + 5, _print_line)
        code = agent.finish(agent.run().is_failed())
        handler.shutdown()
        return code
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        ignore_signals()
        if agent is not None:
            agent.announce_end(f"stopped by {name}", 128 + int(stopped.sigval))
        _print_line(f"headway: stopped by {name}; all {order.num_local} processes of this machine have ended")
        if agent is not None and (resume_advice := agent.find_resume_advice()):
            _print_line(resume_advice)
        return 128 + int(stopped.sigval)
    except (LaunchError, ControlPlaneError, ConfigError) as error:
        _print_line(f"headway: {error}")
        return 1
    except (RendezvousError, ConnectionError, TimeoutError, RuntimeError) as error:
        where = f" at {order.endpoint}" if order.endpoint else ""
        _print_line(f"headway: the {order.num_machines} machines did not meet{where}: {type(error).__name__}: {error}")
        return 1
    finally:
        ignore_signals()
        if agent is not None:
            agent.stop_threads()
        shutil.rmtree(scratch, ignore_errors=True)
        memory.remove()


def _make_worker_spec(order: AgentOrder, handler: RendezvousHandler) -> WorkerSpec:
    """Return torch's description of this machine's workers.

    Args:
        order: Instructions from the launcher for the agent.
        handler: Handler of the rendezvous.
    """
    arguments = ["-m", "headway.launch", "worker", str(os.getpid()), order.program.kind]
    arguments += ["merge" if order.tee == "3" else "apart", order.program.target, *order.program.args]
    store_host: str | None = None
    store_port: int | None = None
    if order.backend == "static":
        store_host, store_port = parse_rendezvous_endpoint(order.endpoint, default_port=-1)
    return WorkerSpec(
        role=order.role,
        local_world_size=order.num_local,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        # torch would replace this text by the local rank, also where it is an argument of the user's program.
        args=tuple(text.replace("${local_rank}", "$${local_rank}") for text in arguments),
        max_restarts=order.max_restarts,
        monitor_interval=order.monitor_interval,
        master_addr=store_host,
        master_port=store_port,
        local_addr=None if order.backend == "local" else find_own_address(rendezvous.find_host(order)),
        numa_options=NumaOptions(AffinityMode.NODE) if order.is_bound_to_cores else None,
    )


class Agent(LocalElasticAgent):
    """torch's elastic agent with failure reports, the hang watch, the control plane, and heartbeats to other machines.

    Args:
        order: Instructions from the launcher for this agent.
        spec: torch's description of the workers.
        files: Paths of the ranks' files.
        seal: Object that computes and checks HMACs with the user's secret.

    Attributes:
        forwarded_signal: Signal that the agent has forwarded to the ranks so that they save a checkpoint. None if there was
            none.
        exit_code: Exit code of the run. None until it is known.
        code_when_stuck: Exit code to use if a signal arrives when the ranks have already ended and the agent then fails
            to end. None if no such signal has arrived.
        report: Report of how the ranks ended after their last start. None if they ended well.
    """

    def __init__(self, order: AgentOrder, spec: WorkerSpec, files: RankFiles, seal: Seal) -> None:
        time_to_end: dict[str, Any] = {"shutdown_timeout": GRACE} if HAS_SHUTDOWN_TIMEOUT else {}
        super().__init__(
            spec, files, exit_barrier_timeout=300, log_line_prefix_template="[${role_name} ${rank}] ", **time_to_end
        )
        self._order = order
        self._files = files
        self._seal = seal
        self._failure_path = None if order.log_dir is None else Path(order.log_dir, "failure.json")
        host = rendezvous.find_host(order)

        # Observers of this machine's ranks, and connections to the agents of other machines.
        self._peers: PeerMachines | None = None
        if order.num_machines > 1:
            address = find_own_address(host) or ""
            self._peers = PeerMachines(
                order.machine_rank, address, order.machine_timeout, self._schedule_forced_end, order.unit
            )
        self._exchange = AgentChannel(order.machine_rank, order.num_machines, host, seal, order.unit)
        self._watch = HangWatch(rendezvous.read_timeout(), _print_line, self._peers)
        self._memory = MemoryWatch()

        # State of the whole run.
        self._num_starts = 0
        """Number of times that all ranks were started."""
        self._resume_advice = ""
        """Advice on how to continue the run, as of the last restart. Empty before."""
        self.forwarded_signal: signal.Signals | None = None
        self.exit_code: int | None = None
        self.code_when_stuck: int | None = None

        # State since the last start of the ranks.
        self._has_ended_ranks = False
        """Whether the main thread has ended the ranks, and is finding out why they failed."""
        self._killed_after_failure: set[int] = set()
        """Local ranks that the agent has killed because they had failed and did not end."""
        self._former_failure_file: tuple[int, int] | None = None
        """Identity of failure.json when the ranks were started. A newer file was written by another machine's agent."""
        self.report: endings.Report | None = None

        # Last, because the server's thread reads the state above.
        self._metrics: metrics.MetricsServer | None = None
        if order.metrics_port is not None:
            run_metrics = metrics.RunMetrics(self._list_heartbeat_paths, lambda: max(0, self._num_starts - 1))
            self._metrics = metrics.MetricsServer(order.metrics_port, run_metrics)

    # ---------------------------------------------------------------- calls of the functions that run the agent

    def finish(self, has_failed: bool) -> int:
        """Report on the screen, and to the other machines, how the last start of the ranks has ended.

        Args:
            has_failed: Whether torch's agent reports a failure.

        Returns:
            Exit code of the run.
        """
        if total := self._seal.unsealed_counter.describe_total():
            _print_line(f"headway: {total}")
        if self.report is None and has_failed:
            self.report = endings.RunEnded(
                "the run was ended, and no machine has reported a reason", self._worker_group.workers[0].world_size
            )
        report = self.report
        self.exit_code = 0 if report is None else report.exit_code
        if report is None or isinstance(report, PreemptedRun):
            self.announce_end()
        else:
            self.announce_end(report.format_headline(), report.exit_code)
        if report is not None:
            _print_line(report.format_text())
            if self._write_report(report):
                _print_line(f"headway: logs and failure.json are in {self._order.log_dir}")
        return self.exit_code

    def find_resume_advice(self) -> str:
        """Return the ranks' advice on how to continue the run from its last checkpoint.

        If no checkpoint was saved, the advice says so, or is empty if no rank has recorded any. Only rank 0's machine
        returns advice, because the ranks of other machines might not know what was saved.
        """
        if 0 not in self._ranks.values():
            return ""
        readings = [heartbeat_file.read_file(path) for path in self._files.heartbeats.values()]
        readings.sort(key=lambda reading: reading.resume_advice_since)
        advice = [reading.resume_advice for reading in readings if reading.resume_advice]
        checkpoint_advice = [text for text in advice if text != NO_CHECKPOINT]
        if checkpoint_advice:
            return checkpoint_advice[-1]
        if self._resume_advice:  # a rank that was just restarted has not loaded the checkpoint yet
            return self._resume_advice
        return NO_CHECKPOINT if advice else ""

    def announce_end(self, why: str = "", exit_code: int = 0) -> None:
        """Announce to the other machines that this machine ends. Do nothing in a run on one machine.

        Args:
            why: Failure that ended this machine's ranks. Empty if they ended well. Default: empty.
            exit_code: Exit code of this machine. Default: 0.
        """
        if self._peers is not None:
            self._peers.announce_end(why, exit_code)

    def kill_workers(self) -> None:
        """Kill the workers and their children immediately and free the run's shared memory."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._files.memory.remove()

    def stop_threads(self) -> None:
        """Stop the agent's threads before Python shuts down."""
        self._watch.release_ranks()
        self._exchange.stop_listening()
        if self._metrics is not None:
            self._metrics.stop_server()

    # ---------------------------------------------------------------- methods of torch's agent, in the order of its calls

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the agents of the other machines, and connect to them. torch's agent calls it before each start of the ranks.

        Raises:
            LaunchError: If a machine does not arrive in time.
        """
        watch = rendezvous.create_watch(self._order, _print_line, self._seal)
        try:
            super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise LaunchError(watch.describe_late() if watch is not None else str(error)) from error
        finally:
            if watch is not None:
                watch.stop()
        self._has_ended_ranks = False
        self._num_starts += 1
        # All machines have reported the failures of the earlier start before they meet again.
        self._former_failure_file = endings.read_file_identity(self._failure_path) if self._failure_path else None
        start_number = 0
        if self._order.backend == "static":
            # A static rendezvous uses one store for all starts of the ranks, so each start needs its own keys. With other
            # backends, the agents can count the starts differently.
            start_number = self._order.max_restarts - self._remaining_restarts
        world_size = worker_group.workers[0].world_size
        num_present = worker_group.group_world_size or 1
        hub_port = 0 if self._peers is None else self._peers.open_hub(rendezvous.find_host(self._order))
        store = SealedStore(cast(Any, self._store), rendezvous.STORE_NAME, self._seal)
        address = self._exchange.connect(store, world_size, start_number, num_present, hub_port)
        self._files.control = address.encode()
        if self._peers is not None:
            ranks = [worker.global_rank for worker in worker_group.workers]
            failure = self._peers.connect(address.host, address.hub_port, self._exchange.seal, ranks)
            if failure is not None:
                _print_line(f"headway: lost machines will be noticed late: {failure}; let this port through")
        if num_present < self._order.num_machines:
            _print_line(
                f"headway: {num_present} of {self._order.num_machines} machines take part: {world_size} processes"
            )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this machine, watch them, and install the agent's signal handlers.

        Returns:
            Process IDs by local rank.
        """
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for number in ENDING_SIGNALS:  # replace the handlers that torch has installed
            signal.signal(number, self._handle_signal)
        paths, workers = self._files.heartbeats, worker_group.workers
        self._watch.watch_ranks(
            [ObservedRank(each.global_rank, pids[each.local_rank], paths[each.local_rank]) for each in workers],
            workers[0].world_size,
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the run once, and end its ranks if necessary. torch's agent calls this method periodically."""
        self._kill_idle_failed()
        snapshot, preempted_run = self._observe_run(worker_group)
        action = decision.decide_action(snapshot)
        if action is decision.AgentAction.END_SAVED and preempted_run is not None:
            return self._end_run_with(worker_group, preempted_run, GRACE)
        if action is decision.AgentAction.END_ABORTED:
            # As in a hang, the ranks may wait in collectives and cannot end by themselves, so they get as little time.
            aborted = endings.RunEnded(self._exchange.notice, worker_group.workers[0].world_size)
            return self._end_run_with(worker_group, aborted, HANG_GRACE)
        if action is decision.AgentAction.END_HANG and self._watch.found is not None:
            return self._end_hang(worker_group, endings.HangReport(self._watch.found))
        has_failed_elsewhere = action is decision.AgentAction.END_ALONE
        codes = snapshot.codes
        if action is not decision.AgentAction.GO_ON:
            codes = self._end_remaining_workers(PEER_LOSS_GRACE if has_failed_elsewhere else GRACE)
        result: RunResult = super()._monitor_workers(worker_group)
        if action is decision.AgentAction.GO_ON and result.is_failed():  # a worker failed after `_observe_run`
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            codes = {first.local_rank: first.exitcode}
        own_failures = self._report_failures(worker_group, codes) if any(codes.values()) else None
        if own_failures is None and not has_failed_elsewhere:
            self.report = None
            return result
        failures = self._exchange.merge(own_failures, self._has_lost_machine)
        if self._peers is None:
            self.report = failures
            return result
        self.report = self._blame_a_machine(self._peers, failures)
        # torch judges only this machine's workers, which may have succeeded although another machine's have failed.
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Report why the ranks have ended, and start them again. torch's agent calls this method after a failure."""
        if self.report is not None:
            _print_line(self.report.format_text())
            self._write_report(self.report)
            if not isinstance(self.report, PreemptedRun):  # a preempted run is not restarted
                env.apply_changes({env.RESTART_REASON: self.report.format_headline()})
            restart_number = self._order.max_restarts - self._remaining_restarts
            _print_line(f"headway: restarting all processes ({restart_number} of {self._order.max_restarts} restarts)")
            self.report = None
        self._resume_advice = self.find_resume_advice()
        self._memory = MemoryWatch()
        self._watch.release_ranks()
        self._killed_after_failure.clear()
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        """End all workers. torch's agent calls this method when the run ends.

        Args:
            death_sig: Signal to send to the workers. SIGINT is followed by SIGTERM after `INTERRUPT_GRACE` seconds.
                Default: SIGTERM.
            timeout: Seconds that the workers have to end before they are killed. Default: `GRACE`.
        """
        context = self._pcontext
        self._mark_run_over()
        if death_sig == signal.SIGINT and context is not None:
            # KeyboardInterrupt lets a program clean up, but never reaches a worker that waits in a collective.
            for handler in self._workers.values():
                if handler.proc.poll() is None:
                    handler.close(death_sig=death_sig)
            self._wait_for_all(INTERRUPT_GRACE)
            death_sig = signal.SIGTERM
        # Workers that have survived SIGKILL do not end within any time.
        has_unkillable = isinstance(self.report, endings.HangReport) and bool(self.report.unkillable_pids)
        seconds = 1 if has_unkillable else timeout
        if HAS_SHUTDOWN_TIMEOUT:
            super()._shutdown(death_sig, seconds)
        else:
            if context is not None:
                context.close(death_sig, seconds)  # torch's own shutdown then has nothing to wait for
            super()._shutdown(death_sig)
        if self._worker_group.state is not WorkerState.SUCCEEDED and context is not None:
            end_sessions(context.pids().values())

    # ---------------------------------------------------------------- one check of the run

    def _kill_idle_failed(self) -> None:
        """Kill the processes of ranks that have failed but do not end, because an idle thread keeps them running."""
        for local_rank in self._find_failed_alive():
            if self._watch.is_idle_after_end(self._ranks[local_rank], GRACE):
                self._killed_after_failure.add(local_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pids[local_rank], signal.SIGKILL)

    def _find_failed_alive(self) -> list[int]:
        """Return the local ranks that have recorded a failure, but whose processes are still running."""
        codes = self._read_exit_codes()
        return [
            local_rank for local_rank, path in self._files.records.items() if local_rank not in codes and path.exists()
        ]

    def _observe_run(self, worker_group: WorkerGroup) -> tuple[decision.AgentSnapshot, PreemptedRun | None]:
        """Return the current state of the run, and the record of a preempted run's checkpoint, or None.

        If ranks have started to end after they saved such a checkpoint, wait up to `GRACE` seconds until all of them
        have ended.
        """
        codes = self._read_ended()
        self._record_ended_ranks(codes)
        preempted_run = None
        if PREEMPTED in codes.values():
            preempted_run = next(filter(None, map(find_preempted, self._files.records.values())), None)
            if preempted_run is not None:
                self._wait_for_all(GRACE)
            codes = self._read_ended()
        # Read this before `notice`: the thread that sets both sets `notice` first, and an abort takes precedence.
        has_failed_elsewhere = self._exchange.has_failed_elsewhere
        has_lost_machine = self._peers is not None and self._peers.lost is not None
        snapshot = decision.AgentSnapshot(
            codes,
            has_saved=preempted_run is not None,
            is_aborted=bool(self._exchange.notice),
            is_hanging=self._watch.found is not None,
            is_alone=has_failed_elsewhere or has_lost_machine,
        )
        return snapshot, preempted_run

    def _record_ended_ranks(self, codes: dict[int, int]) -> None:
        """Tell the hang watch which ranks have ended, and the control plane which of them ended without an error.

        Args:
            codes: Exit codes of the workers that have ended, by local rank.
        """
        ranks = self._ranks
        # A rank that has failed but has not ended yet explains why others wait, so there is no hang to diagnose.
        known_codes = {**dict.fromkeys(self._find_failed_alive(), 1), **codes}
        self._watch.note_ended({ranks[local_rank]: code for local_rank, code in known_codes.items()})
        self._exchange.record_finished_ranks([ranks[local_rank] for local_rank, code in codes.items() if code == 0])

    def _report_failures(self, worker_group: WorkerGroup, codes: Mapping[int, int]) -> endings.FailureReport:
        """Return a report of the failed ranks of this machine.

        Args:
            worker_group: torch's description of this machine's workers.
            codes: Exit codes by local rank, of the workers that had ended before the agent ended the others.
        """
        pids = self._pids
        exits = [
            self._files.read_exit(rank, local_rank, pids[local_rank], codes.get(local_rank))
            for local_rank, rank in self._ranks.items()
        ]
        deaths = tuple(death for death in exits if death is not None)
        finished = tuple(worker.global_rank for worker in worker_group.workers if codes.get(worker.local_rank) == 0)
        world_size = worker_group.workers[0].world_size
        return endings.FailureReport(deaths, world_size, self._memory.describe_kills(), finished)

    def _write_report(self, report: endings.Report) -> bool:
        """Write failure.json if there is a failure and a folder for logs. Return whether this is the case."""
        if self._failure_path is None or isinstance(report, PreemptedRun):
            return False
        report.write(self._failure_path)
        return True

    # ---------------------------------------------------------------- the ends of the workers

    def _end_run_with(
        self, worker_group: WorkerGroup, report: PreemptedRun | endings.RunEnded, grace: int
    ) -> RunResult:
        """End all workers of a run that has saved a checkpoint or was aborted. The run is not restarted.

        Args:
            worker_group: torch's description of this machine's workers.
            report: Report of how the run ended.
            grace: Seconds that the workers have to end before they are killed.
        """
        self._remaining_restarts = 0
        self.report = report
        self._end_remaining_workers(grace)
        result: RunResult = super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def _end_hang(self, worker_group: WorkerGroup, report: endings.HangReport) -> RunResult:
        """End all workers of a run that hangs, including stopped processes."""
        self._watch.release_ranks()
        self.report = report
        if self._remaining_restarts == 0:
            # Before the workers are ended, so that all machines end at the same time.
            self.announce_end(report.format_headline(), report.exit_code)
        self._end_workers(HANG_GRACE)
        unkillable_pids = self._find_unkillable_pids()
        if unkillable_pids:
            self._remaining_restarts = 0  # the remaining workers hold devices, ports and memory
            self.report = replace(report, unkillable_pids=tuple(unkillable_pids))
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def _find_unkillable_pids(self) -> list[int]:
        """Return the process IDs of workers that have survived SIGKILL.

        Such a worker waits for a disk that does not respond.
        """
        codes = self._read_exit_codes()
        return [pid for local_rank, pid in self._pids.items() if local_rank not in codes]

    def _end_remaining_workers(self, grace: int) -> dict[int, int]:
        """End every worker. Return the exit codes, by local rank, of those that had already ended on their own.

        Args:
            grace: Seconds that the workers have to end before they are killed.
        """
        # Several ranks often fail with the same error, and each should record its own.
        self._wait_for_all(FAILURE_WINDOW)
        codes = self._read_ended()
        self._end_workers(grace)
        return codes

    def _end_workers(self, grace: int) -> None:
        """End all workers. First record in their heartbeat files that the signal is not a request to save a checkpoint.

        Args:
            grace: Seconds that the workers have to end before they are killed.
        """
        assert self._pcontext is not None
        self._mark_run_over()
        self._pcontext.close(timeout=grace)

    def _mark_run_over(self) -> None:
        """Record in the ranks' heartbeat files that the next signal is not a request to save a checkpoint."""
        for path in self._files.heartbeats.values():
            with contextlib.suppress(OSError):
                heartbeat_file.mark_run_over(path)

    def _wait_for_all(self, seconds: float) -> None:
        """Wait until all workers of this machine have ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while len(self._read_ended()) < self._order.num_local and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---------------------------------------------------------------- the loss of another machine

    def _has_lost_machine(self) -> bool:
        """Whether another machine is lost or sends no heartbeats, so that waiting for its report is pointless."""
        return self._peers is not None and (self._peers.lost is not None or self._peers.find_silent() is not None)

    def _blame_a_machine(self, peers: PeerMachines, report: endings.FailureReport | None) -> endings.Report | None:
        """Return a report that names the lost machine instead of the failures that its loss has caused on this machine.

        Wait up to `PEER_LOSS_GRACE` seconds until a loss is detected.

        Args:
            peers: Connections to the other machines.
            report: Failures of the run. None if there are none.

        Returns:
            A report of the loss. If no machine is lost, or if `report` contains a failure that the loss does not
                explain, `report` itself.
        """
        self._has_ended_ranks = True
        if report is not None and not report.is_consequence:
            return report
        # Wait, because other machines often detect the loss first, while this one only notices a closed connection.
        deadline = time.monotonic() + PEER_LOSS_GRACE
        while peers.lost is None and peers.find_silent() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        machine = peers.lost or peers.find_silent()
        if peers.has_lost_hub:
            self._remaining_restarts = 0  # machine 0 hosts the rendezvous
        if machine is None:
            return report
        return endings.MachineLost(
            machine, self._order.machine_rank, report, peers.exit_code, self._order.unit, self._former_failure_file
        )

    def _schedule_forced_end(self) -> None:
        """Schedule a forced end of this machine's processes, because another machine is lost.

        The forced end takes effect after a delay, unless the main thread has ended the processes before. The main
        thread might be waiting for the lost machine. This method is called on the thread that watches the other
        machines.
        """
        num_starts = self._num_starts

        def force_end() -> None:
            """Kill this machine's workers and end this process, unless the main thread has handled the loss."""
            assert self._peers is not None
            has_ended = self._has_ended_ranks or num_starts != self._num_starts
            if has_ended and not self._peers.has_lost_hub:
                return  # the main thread handles the loss, and might be waiting for that machine to return
            if not has_ended:
                _print_line(
                    endings.MachineLost(
                        str(self._peers.lost), self._order.machine_rank, unit=self._order.unit
                    ).format_text()
                )
            self.kill_workers()
            os._exit(self._peers.exit_code)

        timer = threading.Timer(2 * PEER_LOSS_GRACE, force_end)
        timer.daemon = True
        timer.start()

    # ---------------------------------------------------------------- signals

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: forward it if the ranks save a checkpoint in response, otherwise end the run.

        If the run or its ranks have already ended, only record the exit code for `kill_when_stuck`.

        Raises:
            SignalException: If the signal ends the run.
        """
        if self.exit_code is not None or self._has_ended_well():
            self.code_when_stuck = self.exit_code or max(self._read_exit_codes().values(), default=0)
            return
        readings = [heartbeat_file.read_file(path) for path in self._files.heartbeats.values()]
        is_request = number in (signal.SIGTERM, signal.SIGUSR1)
        has_saving_ranks = self.forwarded_signal is not None or all(reading.saves_on_signal for reading in readings)
        if not (is_request and has_saving_ranks):
            raise SignalException(f"got signal {number}", sigval=signal.Signals(number))
        self._remaining_restarts = 0
        if self.forwarded_signal is None:
            self.forwarded_signal = signal.Signals(number)
            message = f"headway: {self.forwarded_signal.name}: the ranks save and end, within {self._order.grace:g} s\n"
            os.write(2, message.encode())  # print is not reentrant, and the signal might have interrupted it
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _has_ended_well(self) -> bool:
        """Whether all ranks of this machine have ended successfully or after a preemption.

        A signal then has no process to end.
        """
        handlers = self._workers.values()
        return bool(handlers) and all(get_exit_code(handler.proc) in (0, PREEMPTED) for handler in handlers)

    # ---------------------------------------------------------------- processes and files of this machine's ranks

    @property
    def _workers(self) -> dict[int, SubprocessHandler]:
        """Processes of this machine by local rank. Empty before the first start."""
        context = cast(SubprocessContext | None, self._pcontext)
        return {} if context is None else context.subprocess_handlers

    @property
    def _pids(self) -> dict[int, int]:
        """Process IDs of this machine's workers by local rank. Empty before the first start."""
        return {} if self._pcontext is None else self._pcontext.pids()

    @property
    def _ranks(self) -> dict[int, int]:
        """Global ranks of this machine's workers by local rank."""
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    def _list_heartbeat_paths(self) -> dict[int, Path]:
        """Return the path of each started rank's heartbeat file, by global rank."""
        ranks = self._ranks
        return {ranks[local]: path for local, path in dict(self._files.heartbeats).items() if local in ranks}

    def _read_ended(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended, by local rank.

        The exit code is 1 for a worker that had failed before the agent killed it.
        """
        return {
            local_rank: 1 if local_rank in self._killed_after_failure else code
            for local_rank, code in self._read_exit_codes().items()
        }

    def _read_exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers' processes that have ended, by local rank; -n for signal n."""
        codes = {local_rank: handler.proc.poll() for local_rank, handler in self._workers.items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
