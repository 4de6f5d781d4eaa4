"""One start of the training script as a job: its processes, the moments it tells of, and its end."""

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
"""Seconds after which a job that was struck, or that goes on, counts as hanging."""

GONE = 25.0
"""Seconds for the last process to go after the first one has ended: DataLoader workers look for their rank every 5 s."""

Mark = tuple[str, str]
"""What a rank is about to do: the phase, and which one of its kind."""


@dataclass
class Strike:
    """A signal that ends a job.

    Attributes:
        phase: in which it comes.
        which: of that phase's marks that are still to come, from 0 to 1.
        delay: after the mark, as a part of the time until the next one, which may be over one.
        number: the signal.
        target: "rank 0", "rank 1", "launcher" or "all".
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
        code: of the launcher, which is the script on one process.
        seconds: it took.
        marks: of rank 0, with the seconds since the start.
        lines: that each rank told.
        errors: what was printed.
        left: command lines of processes that were still there.
        has_hung: it had to be killed.
        struck: at which mark; None: not.
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
    """Start the script, strike where that is wanted, and wait for the end.

    Args:
        find: gives the mark at which a strike falls, and the seconds after it.
    """
    fifo = folder / "marks"
    if not fifo.exists():
        os.mkfifo(fifo)
    marks = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # never at its end, whoever comes and goes
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(("HEADWAY_", "OMP_", "GLOO_", "RANK", "WORLD_SIZE", "LOCAL_"))}  # fmt: skip
    errors = folder / f"errors.{attempt}"
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", str(num_ranks), str(SCRIPT), mode]
    with _interruptible(), errors.open("w") as sink:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**kept, "HEADWAY_HOME": str(folder), "SWEEP_JOB": name, "SWEEP_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        job = _Job(process, name, marks, began)
        struck = job.follow(strike, find)
        has_hung = not job.wait()
        stacks = _where(folder, name, attempt) if has_hung else ""
        left = job.remains()
        lines = [_lines(folder / f"log.{attempt}.{rank}") for rank in range(num_ranks)]
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
        for pid in _members(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        os.close(marks)


def _where(folder: Path, name: str, attempt: int) -> str:
    """What a run that hangs is at: its processes, and the stacks that they wrote."""
    said = []
    for pid in _members(name):
        with contextlib.suppress(OSError):
            waits = Path(f"/proc/{pid}/wchan").read_text()
            parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
            said.append(f"{pid} (of {parent}) waits in {waits}: {_command(pid)}")
    for file in sorted(folder.glob(f"stacks.{attempt}.*")):
        said.append(f"{file.name}:\n{file.read_text()}")
    return "\n".join(["", *said])


class _Job:
    def __init__(self, process: subprocess.Popen, name: str, fifo: int, began: float) -> None:
        self.process, self.name, self.fifo, self.began = process, name, fifo, began
        self.marks: list[tuple[Mark, float]] = [(("import", "0"), 0.0)]
        self.compute_deadline = began + PATIENCE
        self._rest = b""
        self._pids: dict[str, int] = {}

    def follow(self, strike: Strike | None, find: Callable[[Strike], tuple[Mark, float] | None]) -> Mark | None:
        """Until it has been struck, or ends by itself."""
        wanted = None if strike is None else find(strike)
        while self.process.poll() is None and time.monotonic() < self.compute_deadline:
            if strike is not None and wanted is not None and (at := self._time_of(wanted[0])) is not None:
                time.sleep(max(0.0, self.began + at + wanted[1] - time.monotonic()))
                self._send(strike)
                self.compute_deadline = time.monotonic() + PATIENCE
                return wanted[0]
            self._read(0.05)
        self._read(0)
        return None

    def wait(self) -> bool:
        """Until the launcher has ended; False: it does not."""
        while self.process.poll() is None:
            if time.monotonic() > self.compute_deadline:
                return False
            self._read(0.05)
        self._read(0)
        return True

    def remains(self) -> list[str]:
        """What is left of the job some time after the launcher's end."""
        deadline = time.monotonic() + GONE
        while (left := _members(self.name)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [_command(pid) for pid in left]

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
            pids = _members(self.name)
        else:
            rank = strike.target.split()[1]
            pids = [pid for pid in _members(self.name) if _environment(pid).get("RANK") == rank and _is_rank(pid)]
            pids = pids[:1] or [self.process.pid]  # one process is its own launcher; ranks that are not there yet
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, strike.number)


@contextlib.contextmanager
def _interruptible():
    """A background shell ignores SIGINT, and what it starts would do so too."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _members(name: str) -> list[int]:
    """The pids of a job, the oldest first: whoever has its name in the environment, wherever it was put."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _environment(int(entry.name)).get("SWEEP_JOB") == name:
            found.append(int(entry.name))
    return sorted(found)


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def _is_rank(pid: int) -> bool:
    """Is it the rank itself, and not a worker that it forked?"""
    with contextlib.suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return "RANK" not in _environment(parent)
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    return str(pid)


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
