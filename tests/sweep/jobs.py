"""Runs the sweep's training script once: starts its processes, follows its progress marks, and can kill it at a chosen time."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")
PATIENCE = 120.0
"""Seconds after which a job counts as hanging."""

GONE = 25.0
"""Seconds for all processes to end after the launcher: DataLoader workers check every 5 s whether their rank still exists."""

Mark = tuple[str, str]
"""Progress mark: (phase that a rank is about to enter, number or place within phases of this kind)."""


@dataclass
class Strike:
    """A signal that interrupts a job.

    Attributes:
        phase: Phase in which the signal is sent.
        which: Position among the remaining marks of this phase, from 0 to 1.
        delay: Delay after the mark, as a fraction of the time until the next mark. It may exceed 1.
        number: The signal.
        target: "rank 0", "rank 1" and so on, "launcher" or "all".
    """

    phase: str
    which: float
    delay: float
    number: signal.Signals
    target: str

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target} in {self.phase} ({self.which:.3f}, after {self.delay:.2f})"


@dataclass
class Ended:
    """How a job ended.

    Attributes:
        code: Exit code of the launcher. With one process, the launcher becomes the script.
        seconds: Duration of the job.
        marks: Marks of rank 0, with the seconds since the start.
        lines: Log lines of each rank.
        errors: Output of all processes.
        left: Command lines of processes that still existed after the launcher's end.
        has_hung: Whether the job had to be killed.
        struck: Mark at which the signal was sent, or None.
    """

    code: int
    seconds: float
    marks: list[tuple[Mark, float]]
    lines: list[list[dict]]
    errors: str
    left: list[str] = field(default_factory=list)
    has_hung: bool = False
    struck: Mark | None = None


def run(folder: Path, mode: str, num_ranks: int, attempt: int, strike: Strike | None = None,
        find: Callable[[Strike], tuple[Mark, float] | None] = lambda _: None) -> Ended:  # fmt: skip
    """Start the script, send the signal of `strike` if one is given, and wait for the end.

    Args:
        find: Function that returns the mark at which to strike and the delay in seconds, or None.
    """
    fifo = folder / "marks"
    if not fifo.exists():
        os.mkfifo(fifo)
    marks = os.open(
        fifo, os.O_RDWR | os.O_NONBLOCK
    )  # opened for writing too, so that reads never reach the end of the FIFO
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(("HEADWAY_", "OMP_", "GLOO_", "RANK", "WORLD_SIZE", "LOCAL_"))}  # fmt: skip
    errors = folder / f"errors.{attempt}"
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", str(num_ranks), str(SCRIPT), mode]
    with _restore_sigint(), errors.open("w") as sink:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**kept, "HEADWAY_HOME": str(folder), "SWEEP_JOB": name, "SWEEP_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        job = _RunningJob(process, name, marks, began)
        struck = job.follow(strike, find)
        has_hung = not job.wait()
        stacks = _describe_hang(folder, name, attempt) if has_hung else ""
        left = job.find_remaining_processes()
        lines = [_read_lines(folder / f"log.{attempt}.{rank}") for rank in range(num_ranks)]
        return Ended(
            process.returncode,
            time.monotonic() - began,
            job.marks,
            lines,
            errors.read_text() + stacks,
            left,
            has_hung,
            struck,
        )
    finally:
        for pid in _list_pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        os.close(marks)


def _describe_hang(folder: Path, name: str, attempt: int) -> str:
    """Return what the processes of a hanging run wait for, and the stacks that they wrote."""
    report = []
    for pid in _list_pids(name):
        with contextlib.suppress(OSError):
            waits = Path(f"/proc/{pid}/wchan").read_text()
            parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
            report.append(f"{pid} (of {parent}) waits in {waits}: {_describe_process(pid)}")
    for file in sorted(folder.glob(f"stacks.{attempt}.*")):
        report.append(f"{file.name}:\n{file.read_text()}")
    return "\n".join(["", *report])


class _RunningJob:
    def __init__(self, process: subprocess.Popen, name: str, fifo: int, began: float) -> None:
        self.process, self.name, self.fifo, self.began = process, name, fifo, began
        self.marks: list[tuple[Mark, float]] = [(("import", "0"), 0.0)]
        self.compute_deadline = began + PATIENCE
        self._rest = b""
        self._pids: dict[str, int] = {}

    def follow(self, strike: Strike | None, find: Callable[[Strike], tuple[Mark, float] | None]) -> Mark | None:
        """Wait until the strike was sent, or until the script ends. Return the mark of the strike, or None."""
        expected = None if strike is None else find(strike)
        while self.process.poll() is None and time.monotonic() < self.compute_deadline:
            if strike is not None and expected is not None and (at := self._time_of(expected[0])) is not None:
                time.sleep(max(0.0, self.began + at + expected[1] - time.monotonic()))
                self._send(strike)
                self.compute_deadline = time.monotonic() + PATIENCE
                return expected[0]
            self._read(0.05)
        self._read(0)
        return None

    def wait(self) -> bool:
        """Wait until the launcher ends. Return False if it does not end in time."""
        while self.process.poll() is None:
            if time.monotonic() > self.compute_deadline:
                return False
            self._read(0.05)
        self._read(0)
        return True

    def find_remaining_processes(self) -> list[str]:
        """Return the command lines of processes that still exist some time after the launcher's end."""
        deadline = time.monotonic() + GONE
        while (left := _list_pids(self.name)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [_describe_process(pid) for pid in left]

    def _time_of(self, mark: Mark) -> float | None:
        return next((at for known, at in reversed(self.marks) if known == mark), None)

    def _read(self, seconds: float) -> None:
        if not select.select([self.fifo], [], [], seconds)[0]:
            return
        now = time.monotonic() - self.began
        *lines, self._rest = (self._rest + os.read(self.fifo, 65536)).split(b"\n")
        for line in lines:
            rank, phase, number = line.decode().split("|")
            if rank == "0":
                self.marks.append(((phase, number), now))

    def _send(self, strike: Strike) -> None:
        if strike.target == "launcher":
            pids = [self.process.pid]
        elif strike.target == "all":
            pids = _list_pids(self.name)
        else:
            rank = strike.target.split()[1]
            pids = [
                pid for pid in _list_pids(self.name) if _read_environment(pid).get("RANK") == rank and _is_rank(pid)
            ]
            pids = pids[:1] or [
                self.process.pid
            ]  # fallback to the launcher, for one process and for ranks that have not started yet
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, strike.number)


@contextlib.contextmanager
def _restore_sigint():
    """Restore the default handling of SIGINT for child processes.

    Background shells ignore SIGINT, and child processes inherit this.
    """
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _list_pids(name: str) -> list[int]:
    """Return the IDs of the job's processes, in ascending order.

    A process belongs to the job if its environment contains the job's name.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _read_environment(int(entry.name)).get("SWEEP_JOB") == name:
            found.append(int(entry.name))
    return sorted(found)


def _read_environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def _is_rank(pid: int) -> bool:
    """Whether the process is a rank, and not a DataLoader worker that a rank forked."""
    with contextlib.suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return "RANK" not in _read_environment(parent)
    return False


def _describe_process(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    return str(pid)


def _read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
