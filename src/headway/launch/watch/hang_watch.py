"""The hang watch of the launcher's agent, a thread that finds ranks that hang, and the ranks that they wait for.

A rank writes to its heartbeat file the time of each heartbeat, its stack and the collective in which it waits. The
thread only reads mapped files and /proc, so it can locate a rank that does not respond. Before it reports a hang, it
requests live stacks from the ranks with a signal whose handler runs even while a rank executes C code.

Without an agent, `peer_watch` does this work in each rank.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from headway.core.runtime import heartbeat_file
from headway.core.runtime.heartbeat import STACK_DUMP_SIGNAL
from headway.launch.watch import judge, report, stacks
from headway.launch.watch.judge import HangDiagnosis
from headway.launch.watch.views import RankView, decode_view, encode_view, make_view

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
        path: Heartbeat file of the rank.
        exit_code: Exit code. None while the rank runs.
        reader: Reader of the rank's heartbeat file. None before the first check.
        num_bytes_written: Bytes that the rank has written to files, except stacks that the agent requested. -1 before
            the first check.
        last_write: Time of the last check that found new bytes.
        last_excuse: Latest time at which the rank had a valid reason to keep other ranks waiting.
        cpu_seconds: CPU seconds that the process had used at the time `last_activity`. -1.0 before the first check.
        last_activity: Time of the last check that found CPU use or new bytes.
    """

    rank: int
    pid: int
    path: Path
    exit_code: int | None = None
    reader: heartbeat_file.HeartbeatFile | None = None
    num_bytes_written: int = -1
    last_write: float = -math.inf
    last_excuse: float = -math.inf
    cpu_seconds: float = -1.0
    last_activity: float = -math.inf

    def update_activity(self, now: float) -> None:
        """Record whether the rank has used the CPU or written files since the last check.

        Args:
            now: Current time on the monotonic clock.
        """
        num_bytes_written = _count_bytes_written(self.pid, self.path)
        has_written = num_bytes_written > self.num_bytes_written
        if has_written:
            self.num_bytes_written = num_bytes_written
            self.last_write = now
        cpu_seconds = _read_cpu_seconds(self.pid)
        # Threads that only check a clock from time to time do not count as active.
        idle_cpu_seconds = 0.05 + _ACTIVE_CPU_FRACTION * (now - self.last_activity)
        has_computed = self.cpu_seconds < 0 or cpu_seconds - self.cpu_seconds > idle_cpu_seconds
        if has_computed or has_written:
            self.cpu_seconds = cpu_seconds
            self.last_activity = now


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

    The launcher's agent on each machine runs one such detector. Its thread keeps running when all processes are
    restarted.

    Args:
        timeout: Seconds that a rank may be missing from a collective. If 0, nothing is watched.
        print_line: Function that prints a line for the user.
        machines: Connections to the agents of the other machines. None on a single machine.

    Attributes:
        found: Diagnosed hang since the processes were last started, or None.
    """

    def __init__(
        self, timeout: float, print_line: Callable[[str], None], machines: MachineConnections | None = None
    ) -> None:
        self._launch_timeout = timeout
        self._timeout = timeout
        self._print_line = print_line
        self._machines = machines
        self._workers: tuple[ObservedRank, ...] = ()
        self._world_size = 0
        self._reported: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self.found: DiagnosedHang | None = None

    def watch_ranks(self, workers: Sequence[ObservedRank], world_size: int) -> None:
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

    def release_ranks(self) -> None:
        """Stop watching until the ranks are started again."""
        self._workers = ()

    def _run(self) -> None:
        """Check the ranks at regular intervals, except after a hang was found and before the ranks are started again.

        The watch's thread runs this method, which never returns.
        """
        interval = min(1.0, self._timeout / 8)
        while True:
            time.sleep(interval)
            if self.found is None:
                self._check_ranks(self._workers)

    def _check_ranks(self, workers: tuple[ObservedRank, ...]) -> None:
        """Read the state of the ranks once, and record the diagnosis in `found` if the run hangs or does not end.

        In a run on several machines, only machine 0 diagnoses. The others send it the state of their ranks.

        Args:
            workers: Ranks of this machine.
        """
        own_views = [self._read_view(worker) for worker in workers]
        remote_views: list[RankView] = []
        self._report_lingering_ranks(workers, own_views)
        if self._machines is not None:
            received = self._machines.get_views()
            if received is None:
                self._machines.send_views([encode_view(view) for view in own_views])
                return
            remote_views = [decode_view(content) for content in received]
        all_views = [*own_views, *remote_views]
        # A timeout that the script sets has priority over that of the command line.
        self._timeout = max((view.timeout for view in all_views if view.timeout), default=self._launch_timeout)
        if self._world_size and judge.diagnose_lingering(all_views, self._timeout, self._world_size) is not None:
            dumps = _dump_stacks(workers, own_views, of_ended=True)
            all_views = [*_use_any_stack(own_views, dumps), *remote_views]
            verdict = judge.diagnose_lingering(all_views, self._timeout, self._world_size)
        elif len(all_views) < self._world_size or judge.diagnose_hang(all_views, self._timeout) is None:
            self._report_missing_ranks(all_views)
            return
        else:
            dumps = _dump_stacks(workers, own_views)
            # Judge again, because ranks that were only late might have arrived in the meantime.
            own_views = [_use_live_stack(self._read_view(worker), dumps.get(worker.rank, "")) for worker in workers]
            verdict = judge.diagnose_hang([*own_views, *remote_views], self._timeout)
        has_restarted = workers != self._workers
        if verdict is not None and not has_restarted:
            self.found = DiagnosedHang(verdict, dumps)

    def _report_lingering_ranks(self, workers: tuple[ObservedRank, ...], views: Sequence[RankView]) -> None:
        """Print which processes keep running after their scripts have ended, and the code that each one executes.

        Each process is reported only once.

        Args:
            workers: Ranks of this machine.
            views: State of each of these ranks, in the same order.
        """
        lingering = [
            (worker, view)
            for worker, view in zip(workers, views)
            if view.has_ended and view.exit_code is None and view.phase_age > _LINGERING_REPORT_DELAY
        ]
        unreported = [(worker, view) for worker, view in lingering if (view.rank, _LINGERS) not in self._reported]
        if not unreported:
            return
        late_workers = [worker for worker, _ in unreported]
        late_views = [view for _, view in unreported]
        for view in _use_any_stack(late_views, _dump_stacks(late_workers, late_views, of_ended=True)):
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
            if worker.rank == rank and worker.reader is not None and worker.last_activity > -math.inf:
                view = make_view(rank, worker.reader.read(), now)
                return view.has_ended and min(view.phase_age, now - worker.last_activity) > seconds
        return False

    def _read_view(self, worker: ObservedRank) -> RankView:
        """Return the state of a rank of this machine, from its heartbeat file and from the kernel."""
        if worker.reader is None:
            worker.reader = heartbeat_file.HeartbeatFile(worker.path, is_writer=False)
        now = time.monotonic()
        worker.update_activity(now)
        view = make_view(worker.rank, worker.reader.read(), now)
        view = replace(
            view,
            pid=worker.pid,
            exit_code=worker.exit_code,
            state=_read_stat_fields(worker.pid)[0],
            writing_age=now - worker.last_write,
            idle_age=now - worker.last_activity,
        )
        reason = judge.find_excuse(view, self._timeout)
        if reason:
            # A write excuses the rank until the last byte was written, not for a further timeout after that.
            excuse_time = worker.last_write if judge.is_writing(view) else now
            worker.last_excuse = max(worker.last_excuse, excuse_time)
        return replace(view, excused_age=now - worker.last_excuse)

    def _report_missing_ranks(self, views: Sequence[RankView]) -> None:
        """Print which ranks cannot write their checkpoints, and which ranks keep others waiting in a debugger.

        Each message is printed only once.

        Args:
            views: State of all ranks.
        """
        writing = [view for view in views if judge.is_stuck_writing(view, -1.0)]  # for any time
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
                    f"headway: rank {view.rank} keeps the others waiting at {report.locate_rank(view)}: {reason}. The run continues "
                    "when it does; --timeout 0 turns off the hang watch"
                )


def describe_progress(path: Path) -> str:
    """Return the progress of training that a rank has recorded, as text. Empty if it has recorded none.

    Args:
        path: Path of the rank's heartbeat file.
    """
    reading = heartbeat_file.read_file(path)
    if not reading.update and not reading.micro_step:
        return ""
    return f"update {reading.update}, micro-step {reading.micro_step}"


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
    if STACK_DUMP_SIGNAL is None:
        return {}
    # Each rank appends its stacks to its own file. The size before the request shows where the new text begins.
    files: dict[int, tuple[Path, int]] = {}  # path and former size, by rank
    for worker, view in zip(workers, views):
        note = worker.reader.read().note if worker.reader is not None else {}
        has_handler = bool(note.get("live"))
        is_over = view.exit_code is not None or (view.has_ended and not of_ended)
        # `in` is also true for the empty text of an unknown state.
        if not has_handler or is_over or view.state in "TtZ":
            continue
        path = Path(f"{worker.path}.stacks")
        with suppress(OSError):
            files[worker.rank] = (path, path.stat().st_size)
            os.kill(view.pid, STACK_DUMP_SIGNAL)
    if files:
        time.sleep(_STACK_DUMP_TIMEOUT)
    dumps = {}
    for rank, (path, former_size) in files.items():
        with suppress(OSError), open(path) as file:
            file.seek(former_size)
            dumps[rank] = file.read()
    return dumps


def _use_live_stack(view: RankView, dump: str) -> RankView:
    """Return the state of a rank with the main thread's stack from `dump`, if the rank does not respond (`is_mute`).

    The state is returned unchanged if the rank responds, or if `dump` contains no complete stack.
    """
    frames = stacks.parse_main_stack(dump)
    if not frames or not view.is_mute:
        return view
    still_age = view.still_age
    if stacks.select_user_frames(frames)[:1] != stacks.select_user_frames(view.frames)[:1]:
        still_age = view.beat_age or 0.0  # the rank has moved since its last heartbeat
    return replace(view, frames=tuple(frames), frames_age=0.0, still_age=still_age)


def _use_any_stack(views: Sequence[RankView], dumps: Mapping[int, str]) -> list[RankView]:
    """Return the states of ranks, each with the stack of the thread that probably keeps the rank's process running.

    This is the main thread if it runs the user's code, else another thread that runs the user's code, else the main
    thread. The state of a rank without a dump is unchanged.

    Args:
        views: States of the ranks.
        dumps: Output of faulthandler with the stacks of all threads, by rank.
    """
    updated_views = []
    for view in views:
        threads = stacks.parse_stacks(dumps.get(view.rank, ""))[::-1]  # the main thread first
        if not threads:
            updated_views.append(view)
            continue
        in_user_code = [frames for frames in threads if stacks.select_user_frames(frames)]
        frames = in_user_code[0] if in_user_code else threads[0]
        updated_views.append(replace(view, frames=tuple(frames), frames_age=0.0))
    return updated_views


def _count_bytes_written(pid: int, path: Path) -> int:
    """Return the number of bytes that a process has written, except for the stacks that the agent has requested.

    Return 0 if the kernel does not report it.

    Args:
        pid: Process ID.
        path: Heartbeat file of the rank. The stacks are in a file next to it.
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
