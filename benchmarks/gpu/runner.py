"""The runner: each step in a process and a scratch folder of its own, with a limit; what fails does not end the others."""

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import Signals
from time import monotonic

import psutil

from benchmarks.gpu.plan import Step, lacking
from benchmarks.gpu.record import Record
from headway.launch.agent.processes import end_sessions

ROOT = Path(__file__).resolve().parents[2]
NUM_LAST_LINES = 15


def run_all(
    steps: Sequence[Step], device: str, size: str, record: Record, total: float, path: Sequence[str] = ()
) -> bool:
    """Run the steps one after the other; returns whether all of them ended well.

    Args:
        steps: in their order.
        device: what they compute on: torch's name.
        size: "full", "small" or "smallest".
        record: where rows go, as they come.
        total: seconds for all. A step may use what is not promised to those after it.
        path: more folders to import from, behind the project's own.
    """
    begun, ended_well = monotonic(), True
    for index, step in enumerate(steps):
        if missing := lacking(step.needs):
            record.begin(step.name, step.question, size)
            record.end(step.name, f"left out: {', '.join(missing)} not installed", 0.0)
            ended_well = False
            continue
        promised = sum(later.seconds for later in steps[index + 1 :])
        limit = max(step.seconds, total - (monotonic() - begun) - promised)
        sys.stdout.write(f"\n== {step.name}: {step.question} (at most {limit:.0f} s)\n")
        record.begin(step.name, step.question, size)
        state, seconds, last_lines = _run(step, device, size, limit, partial(record.found, step.name), path)
        record.end(step.name, state, seconds, [] if state == "done" else last_lines)
        sys.stdout.write(f"== {step.name}: {state}, {seconds:.0f} s\n")
        sys.stdout.flush()
        ended_well &= state == "done"
    return ended_well


def _run(
    step: Step, device: str, size: str, limit: float, tell: Callable[[list[str]], None], path: Sequence[str]
) -> tuple[str, float, list[str]]:
    """(how it ended, seconds, its last lines)."""
    with tempfile.TemporaryDirectory(prefix=f"headway-{step.name}-", ignore_cleanup_errors=True) as folder:
        rows = Path(folder, "rows.jsonl")
        rows.touch()
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.step",
            step.place,
            "--device",
            device,
            "--size",
            size,
            "--rows",
            str(rows),
        ]
        begun = monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(scratch, path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        reader = threading.Thread(target=_follow, args=(process, rows, tell, last_lines), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
            state = (
                "done"
                if code == 0
                else f"failed with exit code {code}"
                if code > 0
                else f"ended by {Signals(-code).name}"
            )
        except subprocess.TimeoutExpired:
            state = f"ended at its limit of {limit:.0f} s"
        finally:  # also where this process is told to end
            _end(process)
            reader.join(10)
            tell(_whole_lines(rows))
        return state, monotonic() - begun, list(last_lines)


def _environment(scratch: Path, path: Sequence[str]) -> dict[str, str]:
    found = [str(ROOT / "src"), str(ROOT), *path, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}


def _follow(
    process: subprocess.Popen[str], rows: Path, tell: Callable[[list[str]], None], last_lines: deque[str]
) -> None:
    """Print what the step prints, and hand on its rows when there are more of them."""
    assert process.stdout is not None
    size = 0
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        last_lines.append(line.rstrip())
        if rows.exists() and rows.stat().st_size != size:
            size = rows.stat().st_size
            tell(_whole_lines(rows))


def _whole_lines(rows: Path) -> list[str]:
    """Without one that is being written."""
    return [line for line in rows.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _end(process: subprocess.Popen[str]) -> None:
    """End the step and all that it started, in sessions of their own too."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    end_sessions([process.pid], 0.0)  # what it left when it was ended by others
