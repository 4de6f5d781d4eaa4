"""The hang watch, which reads the ranks' pulses, diagnoses a hang and reports the missing ranks.

A pulse is a file that a rank updates with its heartbeat, its stack and the collective in which it waits.

With the launcher's agent, `HangWatch` is a thread of the agent that watches one machine and does not import torch.
It only reads mapped files and /proc, so it can locate a rank that does not respond. Before it reports a hang, it
requests live stacks from the ranks with a signal whose handler runs even while a rank executes C code.

Without an agent (torchrun, a cluster's tasks), `PeerWatch` runs in each process, and ranks query one another. A rank
that has waited in a collective for longer than the timeout sends a request over the control plane. Every rank that can
still respond sends its state (`RankView`). The requesting rank diagnoses the hang and ends the run. If a rank does not
respond, nothing else is known about this rank, because only the launcher's agent can inspect a rank from outside.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from headway.core.runtime import heartbeat, process, pulse
from headway.core.runtime.control_plane.control import Control, current
from headway.core.runtime.heartbeat import STACK_DUMP_SIGNAL
from headway.errors import ControlPlaneError
from headway.launch.watch import judge, report, stacks
from headway.launch.watch.judge import HangDiagnosis
from headway.launch.watch.views import RankView, decode_view, encode_view, make_view
from headway.log import get_logger

GRACE = 4
"""Seconds that ranks have to end after a hang has been diagnosed."""

_ACTIVE_CPU_FRACTION = 0.02
"""CPU use, as a fraction of one core, above which a process counts as active after its script has ended."""

_LINGERING_REPORT_DELAY = 30.0
"""Seconds after which a process that still runs after its script has ended is reported."""

_LINGERS, _SILENT = "lingers", "silent"

_STACK_DUMP_TIMEOUT = 1.0
"""Seconds that ranks have to write their stacks after they have received the signal that requests them."""


class MachineConnections(Protocol):
    """Interface of the connections to the other machines, which exchange the state of ranks (`RankView` as dicts)."""

    def send_views(self, views: list[dict[str, Any]]) -> None:
        """Send the state of this machine's ranks (`RankView` as dicts) to machine 0."""

    def get_views(self) -> list[dict[str, Any]] | None:
        """Return the latest state of all ranks on other machines (`RankView` as dicts).

        None if this is not machine 0.
        """


@dataclass
class ObservedRank:
    """Rank of this machine, with its activity as observed from outside. Times are on this process's monotonic clock.

    Attributes:
        rank: Global rank.
        pid: Process ID.
        path: File in which the rank records its state (its pulse).
        exit_code: Exit code. None while the rank runs.
        reader: Reader of the rank's pulse file. None before the first check.
        num_written: Bytes that the rank has written to files, except stacks that the agent requested. -1 before the
            first check.
        written: Time of the last check that found new bytes.
        excused: Latest time at which the rank had a valid reason to keep other ranks waiting.
        cpu: CPU seconds that the process had used at the time `active`. -1.0 before the first check.
        active: Time of the last check that found CPU use or new bytes.
    """

    rank: int
    pid: int
    path: Path
    exit_code: int | None = None
    reader: pulse.HeartbeatFile | None = None
    num_written: int = -1
    written: float = -math.inf
    excused: float = -math.inf
    cpu: float = -1.0
    active: float = -math.inf

    def update_activity(self, now: float) -> None:
        """Record whether the rank has used the CPU or written files since the last check.

        Args:
            now: Current time on the monotonic clock.
        """
        num_written, cpu = _count_bytes_written(self.pid, self.path), _read_cpu_seconds(self.pid)
        if num_written > self.num_written:
            self.num_written = num_written
            self.written = now
        # Threads that only check a clock from time to time do not count as active.
        if self.cpu < 0 or cpu - self.cpu > 0.05 + _ACTIVE_CPU_FRACTION * (now - self.active) or self.written == now:
            self.cpu = cpu
            self.active = now


@dataclass(frozen=True)
class DiagnosedHang:
    """Hang that was diagnosed, with the stacks of this machine's ranks.

    Attributes:
        verdict: Diagnosis that names the waiting and the missing ranks.
        dumps: Stacks of all threads of this machine's ranks, by rank.
    """

    verdict: HangDiagnosis
    dumps: Mapping[int, str]


class HangWatch:
    """Detector of ranks that hang in a collective, whose checkpoint writes are blocked, or whose processes do not end.

    The launcher's agent on each machine runs one such detector, which keeps running when all processes are
    restarted. Each start of the processes is one attempt.

    Args:
        timeout: Seconds that a rank may be missing from a collective. If 0, ranks are not watched.
        print_line: Function that prints a line for the user.
        machines: Connections to the agents of the other machines. None on a single machine.

    Attributes:
        found: Diagnosed hang of the current attempt, or None.
    """

    def __init__(
        self, timeout: float, print_line: Callable[[str], None], machines: MachineConnections | None = None
    ) -> None:
        self._given = timeout
        self._timeout = timeout
        self._print_line = print_line
        self._machines = machines
        self._workers: tuple[ObservedRank, ...] = ()
        self._world_size = 0
        self._reported: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self.found: DiagnosedHang | None = None

    def begin_attempt(self, workers: Sequence[ObservedRank], world_size: int) -> None:
        """Start watching the ranks after all of them have been started or restarted.

        Args:
            workers: Ranks of this machine.
            world_size: Number of processes on all machines.
        """
        self.found = None
        self._reported.clear()
        self._workers = tuple(workers)
        self._world_size = world_size
        if self._thread is None and self._timeout > 0:
            self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
            self._thread.start()

    def note_ended(self, codes: Mapping[int, int]) -> None:
        """Record the exit codes, by global rank, of the ranks that have ended."""
        for worker in self._workers:
            worker.exit_code = codes.get(worker.rank)

    def end_attempt(self) -> None:
        """Stop watching until the ranks are started again."""
        self._workers = ()

    def _run(self) -> None:
        interval = min(1.0, self._timeout / 8)
        while True:
            time.sleep(interval)
            if self.found is None:
                self._check_ranks(self._workers)

    def _check_ranks(self, workers: tuple[ObservedRank, ...]) -> None:
        views = [self._read_view(worker) for worker in workers]
        everywhere = list(views)
        self._report_lingering_ranks(workers, views)
        if self._machines is not None:
            others = self._machines.get_views()
            if others is None:
                self._machines.send_views([encode_view(view) for view in views])
                return
            everywhere += [decode_view(content) for content in others]
        # A timeout that the script sets has priority over that of the command line.
        self._timeout = max((view.timeout for view in everywhere if view.timeout), default=self._given)
        elsewhere = everywhere[len(views) :]
        if self._world_size and judge.diagnose_lingering(everywhere, self._timeout, self._world_size) is not None:
            dumps = _dump_stacks(workers, views, of_ended=True)
            views = [*_use_any_stack(views, dumps), *elsewhere]
            verdict = judge.diagnose_lingering(views, self._timeout, self._world_size)
        elif len(everywhere) < self._world_size or judge.diagnose_hang(everywhere, self._timeout) is None:
            self._report_missing_ranks(everywhere)
            return
        else:
            dumps = _dump_stacks(workers, views)
            # Judge again, because ranks that were only late might have arrived in the meantime.
            views = [_use_live_stack(self._read_view(worker), dumps.get(worker.rank, "")) for worker in workers]
            verdict = judge.diagnose_hang([*views, *elsewhere], self._timeout)
        if verdict is not None and workers == self._workers:
            self.found = DiagnosedHang(verdict, dumps)

    def _report_lingering_ranks(self, workers: tuple[ObservedRank, ...], views: Sequence[RankView]) -> None:
        """Print which processes keep running after their scripts have ended, and the code that each one executes.

        Each process is reported only once.
        """
        found = [
            view
            for view in views
            if view.has_ended and view.exit_code is None and view.phase_age > _LINGERING_REPORT_DELAY
        ]
        found = [view for view in found if (view.rank, _LINGERS) not in self._reported]
        if not found:
            return
        late = [worker for worker in workers if worker.rank in {view.rank for view in found}]
        for view in _use_any_stack(found, _dump_stacks(late, found, of_ended=True)):
            self._reported.add((view.rank, _LINGERS))
            self._print_line(f"headway: {report.describe_lateness(view)}. The run waits for it")

    def is_idle_after_end(self, rank: int, seconds: float) -> bool:
        """Whether a rank's script has ended and its process has been idle for longer than `seconds` since then.

        False if the rank is not on this machine or has not been checked yet.

        Args:
            rank: Global rank.
            seconds: Time that the process may be idle.
        """
        now = time.monotonic()
        for worker in self._workers:
            if worker.rank == rank and worker.reader is not None and worker.active > -math.inf:
                view = make_view(rank, worker.reader.read(), now)
                return view.has_ended and min(view.phase_age, now - worker.active) > seconds
        return False

    def _read_view(self, worker: ObservedRank) -> RankView:
        if worker.reader is None:
            worker.reader = pulse.HeartbeatFile(worker.path, is_writer=False)
        now = time.monotonic()
        worker.update_activity(now)
        view = make_view(worker.rank, worker.reader.read(), now)
        view = replace(
            view,
            pid=worker.pid,
            exit_code=worker.exit_code,
            state=_read_stat_fields(worker.pid)[0],
            writing_age=now - worker.written,
            idle_age=now - worker.active,
        )
        reason = judge.find_excuse(view, self._timeout)
        if reason:
            # A write excuses the rank until the last byte was written, not for a further timeout after that.
            worker.excused = max(worker.excused, worker.written) if judge.is_writing(view) else now
        return replace(view, excused_age=now - worker.excused)

    def _report_missing_ranks(self, views: Sequence[RankView]) -> None:
        """Print which ranks cannot write their checkpoints, and which ranks keep others waiting in a debugger.

        Each message is printed only once.

        Args:
            views: State of all ranks.
        """
        writing = [view for view in views if judge.is_stuck_writing(view, -1.0)]
        stuck = [view for view in writing if judge.is_stuck_writing(view, self._timeout)]
        if len(stuck) == len(writing) and any((view.rank, _SILENT) not in self._reported for view in stuck):
            self._reported |= {(view.rank, _SILENT) for view in stuck}
            self._print_line(f"headway: {report.describe_blocked_writers(stuck)}")
        if judge.diagnose_hang([replace(view, excused_age=math.inf) for view in views], self._timeout) is None:
            return
        for view in views:
            reason = judge.find_excuse(view, self._timeout)
            if "debugger" in reason and (view.rank, reason) not in self._reported:
                self._reported.add((view.rank, reason))
                self._print_line(
                    f"headway: rank {view.rank} keeps the others waiting at {report.locate_rank(view)}: {reason}. The run goes on "
                    "when it does; --timeout 0 turns off the hang watch"
                )


def describe_progress(path: Path) -> str:
    """Return the progress of training that a rank has recorded, as text. Empty if it has recorded none.

    Args:
        path: Path of the pulse file, in which the rank records its state.
    """
    reading = pulse.HeartbeatFile(path, is_writer=False).read()
    return f"update {reading.update}, micro-step {reading.micro_step}" if reading.update or reading.micro_step else ""


def _dump_stacks(
    workers: Sequence[ObservedRank], views: Sequence[RankView], *, of_ended: bool = False
) -> dict[int, str]:
    """Request live stacks of all threads from the ranks, and return the text that arrives within a second, by rank.

    Ranks that have ended, are stopped or traced, or have no handler for the request are left out.

    Args:
        workers: Ranks of this machine.
        views: State of each of these ranks, in the same order.
        of_ended: Whether to also request stacks from ranks whose scripts have ended while their processes still run.
            Default: False.
    """
    started: dict[int, tuple[Path, int]] = {}
    for worker, view in zip(workers, views):
        path = Path(f"{worker.path}.stacks")
        note = worker.reader.read().note if worker.reader is not None else {}
        is_over = view.exit_code is not None or (view.has_ended and not of_ended)
        if STACK_DUMP_SIGNAL is None or not note.get("live") or is_over or view.state in "TtZ":
            continue
        with suppress(OSError):
            started[worker.rank] = (path, path.stat().st_size)
            os.kill(view.pid, STACK_DUMP_SIGNAL)
    time.sleep(_STACK_DUMP_TIMEOUT if started else 0.0)
    found = {}
    for rank, (path, size) in started.items():
        with suppress(OSError), open(path) as file:
            file.seek(size)
            found[rank] = file.read()
    return found


def _use_live_stack(view: RankView, dump: str) -> RankView:
    """Return the state of a rank with the main thread's stack from `dump`, if the rank does not respond (`is_mute`).

    The state is returned unchanged if the rank responds, or if `dump` contains no complete stack.
    """
    live = stacks.parse_main_stack(dump)
    if not live or not view.is_mute:
        return view
    has_moved = stacks.select_user_frames(live)[:1] != stacks.select_user_frames(view.frames)[:1]
    return replace(
        view, frames=tuple(live), frames_age=0.0, still_age=view.beat_age or 0.0 if has_moved else view.still_age
    )


def _use_any_stack(views: Sequence[RankView], dumps: Mapping[int, str]) -> list[RankView]:
    """Return the states of ranks, each with the stack of the thread that probably keeps the rank's process running.

    This is the main thread if it runs the user's code, else another thread that runs the user's code, else the main
    thread. The state of a rank without a dump is unchanged.

    Args:
        views: States of the ranks.
        dumps: Output of faulthandler with the stacks of all threads, by rank.
    """
    found = []
    for view in views:
        threads = stacks.parse_stacks(dumps.get(view.rank, ""))[::-1]
        frames = next(
            (thread for thread in threads if stacks.select_user_frames(thread)), threads[0] if threads else view.frames
        )
        found.append(replace(view, frames=tuple(frames), frames_age=0.0) if threads else view)
    return found


def _count_bytes_written(pid: int, path: Path) -> int:
    """Return the number of bytes that a process has written, except for the stacks that the agent has requested.

    Return 0 if the kernel does not report it.

    Args:
        pid: Process ID.
        path: Pulse file of the rank. The stacks are in a file next to it.
    """
    try:
        with open(f"/proc/{pid}/io") as file:
            written = next((int(line.split()[1]) for line in file if line.startswith("wchar")), 0)
        # Read after the total, so that a dump in between is subtracted too early rather than counted as written.
        stacks_file = f"{path}.stacks"
        return written - (os.stat(stacks_file).st_size if os.path.exists(stacks_file) else 0)
    except (OSError, ValueError):
        return 0


def _read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process in seconds. 0.0 if the kernel does not report it."""
    user, system = _read_stat_fields(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the process state.

    If the file cannot be read, the state is "" and all other fields are zero.
    """
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        if fields := file.read().rpartition(")")[2].split():
            return fields
    return ["", *("0" for _ in range(12))]


_ANSWER_TIMEOUT = 4.0
"""Seconds that other ranks have to send their state."""

_REQUEST_KEY = "hang/asked"

log = get_logger(__name__)


class PeerWatch:
    """Hang watch of one process without the launcher's agent. The watch ends when the control plane is gone.

    Args:
        control: Control plane that connects the ranks.
        timeout: Seconds that a rank may be missing from a collective.
    """

    def __init__(self, control: Control, timeout: float) -> None:
        self._control = control
        self._timeout = timeout
        self._round = 0
        self._excused = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that watches this process."""
        heartbeat.start_heartbeat()
        heartbeat.stop_before_shutdown(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread before the interpreter shuts down."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_TIMEOUT + 2)

    def _run(self) -> None:
        interval = min(2.0, max(0.2, self._timeout / 8))
        while not self._over.wait(interval):
            try:
                self._check_ranks()
            except (ControlPlaneError, RuntimeError) as error:  # the control plane's host is gone (DistError)
                if not self._over.is_set():
                    log.info("the hang watch ends with the control plane: %s", str(error).splitlines()[0])
                return

    def _check_ranks(self) -> None:
        me = self._read_view()
        if self._control.has_key(f"{_REQUEST_KEY}/{self._round}"):
            self._post_view(me)
        elif me.wait is not None and (me.wait.age or 0.0) > self._timeout:
            asked = self._round
            self._control.set(f"{_REQUEST_KEY}/{asked}", b"")
            self._post_view(me)
            self._judge_hang(asked)

    def _post_view(self, me: RankView) -> None:
        self._control.set(f"hang/{self._round}/{me.rank}", json.dumps(encode_view(me)).encode())
        self._round += 1

    def _judge_hang(self, asked: int) -> None:
        views = []
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        for rank in range(self._control.world_size):
            key = f"hang/{asked}/{rank}"
            while not self._control.has_key(key) and time.monotonic() < deadline:
                time.sleep(0.1)
            is_there = self._control.has_key(key)
            content = self._control.get(key, timedelta(seconds=5)) if is_there else b""
            views.append(decode_view(json.loads(content)) if is_there else RankView(rank, state="?"))
        verdict = judge.diagnose_hang(views, self._timeout)
        if verdict is not None and not self._over.is_set():
            self._control.abort(report.format_report(verdict))

    def _read_view(self) -> RankView:
        """Return the state of this process as a `RankView`.

        A debugger or a file write is a valid reason to keep other ranks waiting. The `excused_age` in the state is the
        time since the process last had such a reason. The other ranks report this rank as missing only if `excused_age`
        also exceeds the timeout.
        """
        now = time.monotonic()
        view = make_view(self._control.rank, pulse.get_own_pulse().read(), now)
        if judge.find_excuse(view, self._timeout):
            self._excused = now
        return replace(view, excused_age=now - self._excused)


def _create_process_watch() -> PeerWatch:
    return PeerWatch(current(), process.current().timeout.total_seconds())


def start(runtime: process.ProcessRuntime) -> None:
    """Start the hang watch of this process, unless it is already running. It ends with the process runtime."""
    if not runtime.scope.has(_create_process_watch):
        watch = runtime.scope.get_or_create(_create_process_watch)
        watch.start()
        process.release_at_end(watch.stop)
