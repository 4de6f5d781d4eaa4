"""The hang watch of one machine: reads its ranks' pulses, judges with those of the other machines, tells who is missing.

Torch-free; a thread of the agent. It only reads mapped files and /proc, so a rank need not answer for its place to be known;
before it speaks it asks the ranks for live stacks by a signal that works in C code too.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headway.runtime import frames as stacks
from headway.runtime import hang, pulse
from headway.runtime.hang import Verdict
from headway.runtime.heartbeat import LIVE_SIGNAL
from headway.runtime.views import View, decode, encode, view_of

GRACE = 4
"""Seconds that ranks get to end in, once the run hangs."""

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
    """

    rank: int
    pid: int
    path: Path
    exit_code: int | None = None
    reader: pulse.Pulse | None = None
    num_written: int = -1
    written: float = -math.inf
    excused: float = -math.inf


@dataclass(frozen=True)
class HangReport:
    """What is told of a run that hung; every rank was ended."""

    verdict: Verdict
    dumps: Mapping[int, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1: no rank's own."""
        return 1

    def headline(self) -> str:
        """It in one sentence."""
        return hang.headline(self.verdict)

    def text(self) -> str:
        """What the screen shows."""
        lines = ["headway: " + hang.text(self.verdict), f"headway: all {self.verdict.world_size} ranks have been ended"]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write failure.json: the hang, every rank's stack, and all threads of this machine's ranks."""
        stacks_by_rank = {str(rank): text for rank, text in self.dumps.items()}
        told = {**hang.encode(self.verdict), "threads": stacks_by_rank}
        content = {"world_size": self.verdict.world_size, "exit_code": self.exit_code, "hang": told, "ranks": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        scratch.replace(path)


class HangWatch:
    """Watches the ranks of one attempt after the other.

    Args:
        patience: seconds that a rank may be missing from a collective; 0: do not watch.
        say: prints a line for the user.
        machines: the other machines; None on a single one.

    Attributes:
        report: the hang, once there is one.
    """

    def __init__(self, patience: float, say: Callable[[str], None], machines: Machines | None = None) -> None:
        self._given = self._patience = patience
        self._say = say
        self._machines = machines
        self._workers: tuple[Worker, ...] = ()
        self._world_size = 0
        self._said: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self.report: HangReport | None = None

    def begin(self, workers: Sequence[Worker], world_size: int) -> None:
        """Watch these ranks from now on."""
        self.report = None
        self._said.clear()
        self._workers, self._world_size = tuple(workers), world_size
        if self._thread is None and self._patience > 0:
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
        interval = min(1.0, self._patience / 8)
        while True:
            time.sleep(interval)
            if self.report is None:
                self._look(self._workers)

    def _look(self, workers: tuple[Worker, ...]) -> None:
        views = [self._view(worker) for worker in workers]
        everywhere = list(views)
        if self._machines is not None:
            others = self._machines.heard()
            if others is None:
                self._machines.tell([encode(view) for view in views])
                return
            everywhere += [decode(content) for content in others]
        # A script that sets the timeout itself knows better than the command line.
        self._patience = max((view.patience for view in everywhere if view.patience), default=self._given)
        if len(everywhere) < self._world_size or hang.judge(everywhere, self._patience) is None:
            self._say_whom_to_wait_for(everywhere)
            return
        dumps = _ask(workers, views)
        # Judged again: who was only late has come meanwhile.
        views = [_with_live(self._view(worker), dumps.get(worker.rank, "")) for worker in workers]
        verdict = hang.judge([*views, *everywhere[len(workers) :]], self._patience)
        if verdict is not None and workers == self._workers:
            self.report = HangReport(verdict, dumps)

    def _view(self, worker: Worker) -> View:
        if worker.reader is None:
            worker.reader = pulse.Pulse(worker.path, is_writer=False)
        now = time.monotonic()
        num_written = _bytes_written(worker.pid)
        if num_written != worker.num_written:
            worker.num_written, worker.written = num_written, now
        view = view_of(worker.rank, worker.reader.read(), now)
        view = replace(
            view, pid=worker.pid, exit_code=worker.exit_code, state=_state(worker.pid), writing_age=now - worker.written
        )
        if hang.excuse(view, self._patience):
            worker.excused = now
        return replace(view, excused_age=now - worker.excused)

    def _say_whom_to_wait_for(self, views: Sequence[View]) -> None:
        """Tell once that a rank in a debugger keeps the others waiting."""
        if hang.judge([replace(view, excused_age=math.inf) for view in views], self._patience) is None:
            return
        for view in views:
            reason = hang.excuse(view, self._patience)
            if "debugger" in reason and (view.rank, reason) not in self._said:
                self._said.add((view.rank, reason))
                self._say(
                    f"headway: rank {view.rank} keeps the others waiting at {hang.where(view)}: {reason}. The run goes on "
                    "when it does; --patience 0 switches the hang watch off"
                )


def progress(path: Path) -> str:
    """How far training had come on the rank with this pulse; "" where it has not said."""
    reading = pulse.Pulse(path, is_writer=False).read()
    return f"update {reading.update}, micro-step {reading.micro_step}" if reading.update or reading.micro_step else ""


def _ask(workers: Sequence[Worker], views: Sequence[View]) -> dict[int, str]:
    """The live stacks of all threads, by rank, of the ranks that can tell."""
    started: dict[int, tuple[Path, int]] = {}
    for worker, view in zip(workers, views):
        path = Path(f"{worker.path}.stacks")
        note = worker.reader.read().note if worker.reader is not None else {}
        if LIVE_SIGNAL is None or not note.get("live") or view.has_ended or view.state in "TtZ":
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


def _with_live(view: View, dump: str) -> View:
    """The view with the live stack where the last heartbeat's is old."""
    live = stacks.parse(dump)
    if not live or not view.is_mute:
        return view
    has_moved = stacks.users(live)[:1] != stacks.users(view.frames)[:1]
    return replace(
        view, frames=tuple(live), frames_age=0.0, still_age=view.beat_age or 0.0 if has_moved else view.still_age
    )


def _state(pid: int) -> str:
    """The kernel's letter for a process; "" where it does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _bytes_written(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("wchar")), 0)
    except (OSError, ValueError):
        return 0
