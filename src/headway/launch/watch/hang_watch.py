"""The hang watch of one machine, or of one process that no agent watches: reads pulses, judges, tells who is missing.

Torch-free; a thread of the agent. It only reads mapped files and /proc, so a rank need not answer for its place to be known;
before it speaks it asks the ranks for live stacks by a signal that works in C code too.

The hang watch of a process that no agent of Headway's watches (torchrun, a cluster's tasks): ranks ask one another.

Who has waited in a collective for longer than the timeout asks over the control plane; every rank that still can posts
where it is, and the asker's verdict ends the run. A rank that does not answer is named as such: only the launcher's agent
can look at it from outside.
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

from headway.errors import ControlPlaneError
from headway.launch.watch import judge
from headway.launch.watch import views as stacks
from headway.launch.watch.judge import HangDiagnosis
from headway.launch.watch.views import RankView, decode, encode, view_of
from headway.log import get_logger
from headway.runtime import heartbeat, process, pulse
from headway.runtime.control_plane.control import Control, current
from headway.runtime.heartbeat import LIVE_SIGNAL

GRACE = 4
"""Seconds that ranks get to end in, once the run hangs."""

_AT_WORK = 0.02
"""The share of a processor above which a process whose script is over is at work."""

_SOON = 30.0
"""Seconds after which it is told that a process whose script is over has not ended."""

_LINGERS, _SILENT = "lingers", "silent"

_ANSWER = 1.0
"""Seconds to wait for live stacks."""


class Machines(Protocol):
    """The way to the other machines' views."""

    def tell(self, views: list[dict[str, Any]]) -> None:
        """Send this machine's views to machine 0."""

    def heard(self) -> list[dict[str, Any]] | None:
        """On machine 0: the latest views of all others; elsewhere None."""


@dataclass
class Worker:
    """A rank of this machine.

    Attributes:
        path: its pulse.
        exit_code: how it ended; None while it runs.
        reader: reads the pulse.
        num_written: bytes that it has written to files, what it was asked to dump left out; -1 before the first look.
        written: when that last changed.
        excused: when there was last a reason to let the others wait.
        cpu: processor seconds at `active`.
        active: when it last used the processor, or wrote something.
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

    def look(self, now: float) -> None:
        """Note whether it has done something since the last look."""
        num_written, cpu = _count_bytes_written(self.pid, self.path), _read_cpu_seconds(self.pid)
        if num_written > self.num_written:
            self.num_written, self.written = num_written, now
        # Threads that only look at a clock now and then do not count.
        if self.cpu < 0 or cpu - self.cpu > 0.05 + _AT_WORK * (now - self.active) or self.written == now:
            self.cpu, self.active = cpu, now


@dataclass(frozen=True)
class Hang:
    """What was found of a run that hangs.

    Attributes:
        verdict: who is missing.
        dumps: the stacks of all threads, by rank, of this machine's ranks.
    """

    verdict: HangDiagnosis
    dumps: Mapping[int, str]


class HangWatch:
    """Watches the ranks of one attempt after the other.

    Args:
        timeout: seconds that a rank may be missing from a collective; 0: do not watch.
        say: prints a line for the user.
        machines: the other machines; None on a single one.

    Attributes:
        found: the hang, once there is one.
    """

    def __init__(self, timeout: float, say: Callable[[str], None], machines: Machines | None = None) -> None:
        self._given = self._timeout = timeout
        self._say = say
        self._machines = machines
        self._workers: tuple[Worker, ...] = ()
        self._world_size = 0
        self._said: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self.found: Hang | None = None

    def begin(self, workers: Sequence[Worker], world_size: int) -> None:
        """Watch these ranks from now on."""
        self.found = None
        self._said.clear()
        self._workers, self._world_size = tuple(workers), world_size
        if self._thread is None and self._timeout > 0:
            self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
            self._thread.start()

    def note_ended(self, codes: Mapping[int, int]) -> None:
        """Exit codes by rank, of the ranks that have ended."""
        for worker in self._workers:
            worker.exit_code = codes.get(worker.rank)

    def end(self) -> None:
        """Watch nobody until the next attempt."""
        self._workers = ()

    def _run(self) -> None:
        interval = min(1.0, self._timeout / 8)
        while True:
            time.sleep(interval)
            if self.found is None:
                self._check_ranks(self._workers)

    def _check_ranks(self, workers: tuple[Worker, ...]) -> None:
        views = [self._read_view(worker) for worker in workers]
        everywhere = list(views)
        self._report_lingering_ranks(workers, views)
        if self._machines is not None:
            others = self._machines.heard()
            if others is None:
                self._machines.tell([encode(view) for view in views])
                return
            everywhere += [decode(content) for content in others]
        # A script that sets the timeout itself knows better than the command line.
        self._timeout = max((view.timeout for view in everywhere if view.timeout), default=self._given)
        elsewhere = everywhere[len(views) :]
        if self._world_size and judge.lingering(everywhere, self._timeout, self._world_size) is not None:
            dumps = _dump_stacks(workers, views, of_ended=True)
            views = [*_use_any_stack(views, dumps), *elsewhere]
            verdict = judge.lingering(views, self._timeout, self._world_size)
        elif len(everywhere) < self._world_size or judge.judge(everywhere, self._timeout) is None:
            self._report_missing_ranks(everywhere)
            return
        else:
            dumps = _dump_stacks(workers, views)
            # Judged again: who was only late has come meanwhile.
            views = [_use_live_stack(self._read_view(worker), dumps.get(worker.rank, "")) for worker in workers]
            verdict = judge.judge([*views, *elsewhere], self._timeout)
        if verdict is not None and workers == self._workers:
            self.found = Hang(verdict, dumps)

    def _report_lingering_ranks(self, workers: tuple[Worker, ...], views: Sequence[RankView]) -> None:
        """Tell once where a process is that keeps the launcher waiting though its script is over."""
        found = [view for view in views if view.has_ended and view.exit_code is None and view.phase_age > _SOON]
        found = [view for view in found if (view.rank, _LINGERS) not in self._said]
        if not found:
            return
        late = [worker for worker in workers if worker.rank in {view.rank for view in found}]
        for view in _use_any_stack(found, _dump_stacks(late, found, of_ended=True)):
            self._said.add((view.rank, _LINGERS))
            self._say(f"headway: {judge.lateness(view)}. It is waited for")

    def has_given_up(self, rank: int, seconds: float) -> bool:
        """Is this rank's script over, and has its process done nothing for so long?"""
        now = time.monotonic()
        for worker in self._workers:
            if worker.rank == rank and worker.reader is not None and worker.active > -math.inf:
                view = view_of(rank, worker.reader.read(), now)
                return view.has_ended and min(view.phase_age, now - worker.active) > seconds
        return False

    def _read_view(self, worker: Worker) -> RankView:
        if worker.reader is None:
            worker.reader = pulse.HeartbeatFile(worker.path, is_writer=False)
        now = time.monotonic()
        worker.look(now)
        view = view_of(worker.rank, worker.reader.read(), now)
        view = replace(
            view,
            pid=worker.pid,
            exit_code=worker.exit_code,
            state=_read_stat_fields(worker.pid)[0],
            writing_age=now - worker.written,
            idle_age=now - worker.active,
        )
        reason = judge.excuse(view, self._timeout)
        if reason:
            # A write excuses up to its last byte, not for another timeout from there on.
            worker.excused = max(worker.excused, worker.written) if judge.is_writing(view) else now
        return replace(view, excused_age=now - worker.excused)

    def _report_missing_ranks(self, views: Sequence[RankView]) -> None:
        """Tell once that a rank in a debugger keeps the others waiting, or that a disk keeps a rank."""
        writing = [view for view in views if judge.is_stuck_writing(view, -1.0)]
        stuck = [view for view in writing if judge.is_stuck_writing(view, self._timeout)]
        if len(stuck) == len(writing) and any((view.rank, _SILENT) not in self._said for view in stuck):
            self._said |= {(view.rank, _SILENT) for view in stuck}
            self._say(f"headway: {judge.silence(stuck)}")
        if judge.judge([replace(view, excused_age=math.inf) for view in views], self._timeout) is None:
            return
        for view in views:
            reason = judge.excuse(view, self._timeout)
            if "debugger" in reason and (view.rank, reason) not in self._said:
                self._said.add((view.rank, reason))
                self._say(
                    f"headway: rank {view.rank} keeps the others waiting at {judge.where(view)}: {reason}. The run goes on "
                    "when it does; --timeout 0 switches the hang watch off"
                )


def progress(path: Path) -> str:
    """How far training had come on the rank with this pulse; "" where it has not said."""
    reading = pulse.HeartbeatFile(path, is_writer=False).read()
    return f"update {reading.update}, micro-step {reading.micro_step}" if reading.update or reading.micro_step else ""


def _dump_stacks(workers: Sequence[Worker], views: Sequence[RankView], *, of_ended: bool = False) -> dict[int, str]:
    """The live stacks of all threads, by rank, of the ranks that can tell."""
    started: dict[int, tuple[Path, int]] = {}
    for worker, view in zip(workers, views):
        path = Path(f"{worker.path}.stacks")
        note = worker.reader.read().note if worker.reader is not None else {}
        is_over = view.exit_code is not None or (view.has_ended and not of_ended)
        if LIVE_SIGNAL is None or not note.get("live") or is_over or view.state in "TtZ":
            continue
        with suppress(OSError):
            started[worker.rank] = (path, path.stat().st_size)
            os.kill(view.pid, LIVE_SIGNAL)
    time.sleep(_ANSWER if started else 0.0)
    found = {}
    for rank, (path, size) in started.items():
        with suppress(OSError), open(path) as file:
            file.seek(size)
            found[rank] = file.read()
    return found


def _use_live_stack(view: RankView, dump: str) -> RankView:
    """The view with the live stack where the last heartbeat's is old."""
    live = stacks.parse(dump)
    if not live or not view.is_mute:
        return view
    has_moved = stacks.users(live)[:1] != stacks.users(view.frames)[:1]
    return replace(
        view, frames=tuple(live), frames_age=0.0, still_age=view.beat_age or 0.0 if has_moved else view.still_age
    )


def _use_any_stack(views: Sequence[RankView], dumps: Mapping[int, str]) -> list[RankView]:
    """The views with the stack that shows what holds a process: the main thread's where the user's code runs in it."""
    found = []
    for view in views:
        threads = stacks.parse_all(dumps.get(view.rank, ""))[::-1]
        frames = next((thread for thread in threads if stacks.users(thread)), threads[0] if threads else view.frames)
        found.append(replace(view, frames=tuple(frames), frames_age=0.0) if threads else view)
    return found


def _count_bytes_written(pid: int, path: Path) -> int:
    """Bytes that the process with this pulse has written, but for the stacks that it was asked for."""
    try:
        with open(f"/proc/{pid}/io") as file:
            written = next((int(line.split()[1]) for line in file if line.startswith("wchar")), 0)
        # Read later: what is dumped meanwhile is subtracted too much, never too little.
        stacks_file = f"{path}.stacks"
        return written - (os.stat(stacks_file).st_size if os.path.exists(stacks_file) else 0)
    except (OSError, ValueError):
        return 0


def _read_cpu_seconds(pid: int) -> float:
    """Processor time of all threads; 0.0 where the kernel does not say."""
    user, system = _read_stat_fields(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _read_stat_fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; "" for the state and zeros where it says nothing."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        if fields := file.read().rpartition(")")[2].split():
            return fields
    return ["", *("0" for _ in range(12))]


_WAIT_FOR_ANSWERS = 4.0
"""Seconds for the others to post where they are."""

_ASKED = "hang/asked"

log = get_logger(__name__)


class PeerWatch:
    """One process's watch; it lives as long as the control plane.

    Args:
        control: the way to the other ranks.
        timeout: seconds that a rank may be missing from a collective.
    """

    def __init__(self, control: Control, timeout: float) -> None:
        self._control = control
        self._timeout = timeout
        self._round = 0
        self._excused = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        heartbeat.start()
        heartbeat.before_shutdown(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the interpreter is taken down."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_WAIT_FOR_ANSWERS + 2)

    def _run(self) -> None:
        interval = min(2.0, max(0.2, self._timeout / 8))
        while not self._over.wait(interval):
            try:
                self._check_ranks()
            except (ControlPlaneError, RuntimeError) as error:  # torch's DistError among them: its host is gone
                if not self._over.is_set():
                    log.info("the hang watch ends with the control plane: %s", str(error).splitlines()[0])
                return

    def _check_ranks(self) -> None:
        me = self._read_view()
        if self._control.has(f"{_ASKED}/{self._round}"):
            self._post_view(me)
        elif me.wait is not None and (me.wait.age or 0.0) > self._timeout:
            asked = self._round
            self._control.set(f"{_ASKED}/{asked}", b"")
            self._post_view(me)
            self._judge(asked)

    def _post_view(self, me: RankView) -> None:
        self._control.set(f"hang/{self._round}/{me.rank}", json.dumps(encode(me)).encode())
        self._round += 1

    def _judge(self, asked: int) -> None:
        views = []
        deadline = time.monotonic() + _WAIT_FOR_ANSWERS
        for rank in range(self._control.world_size):
            key = f"hang/{asked}/{rank}"
            while not self._control.has(key) and time.monotonic() < deadline:
                time.sleep(0.1)
            is_there = self._control.has(key)
            content = self._control.get(key, timedelta(seconds=5)) if is_there else b""
            views.append(decode(json.loads(content)) if is_there else RankView(rank, state="?"))
        verdict = judge.judge(views, self._timeout)
        if verdict is not None and not self._over.is_set():
            self._control.abort(judge.text(verdict))

    def _read_view(self) -> RankView:
        """Where this process is; a debugger excuses it for another timeout."""
        now = time.monotonic()
        view = view_of(self._control.rank, pulse.own().read(), now)
        if judge.excuse(view, self._timeout):
            self._excused = now
        return replace(view, excused_age=now - self._excused)


def _of_this_process() -> PeerWatch:
    return PeerWatch(current(), process.current().timeout.total_seconds())


def start(runtime: process.ProcessRuntime) -> None:
    """Watch this process until its runtime ends."""
    if not runtime.scope.has(_of_this_process):
        watch = runtime.scope.own(_of_this_process)
        watch.start()
        process.at_end(watch.stop)
