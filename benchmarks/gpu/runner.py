"""Runner: starts each step in a separate process with a scratch folder and a time limit. A failing step does not end the others."""

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

from benchmarks.gpu.plan import Step, find_missing
from benchmarks.gpu.record import Record
from headway.launch.agent.processes import end_sessions

ROOT = Path(__file__).resolve().parents[2]
NUM_LAST_LINES = 15


def run_all(
    steps: Sequence[Step], device: str, size: str, record: Record, total: float, path: Sequence[str] = ()
) -> bool:
    """Run the steps one after the other, and return whether all of them ended well.

    Args:
        steps: Steps to run, in this order.
        device: torch's name of the device.
        size: "full", "small" or "smallest".
        record: Record that receives the rows as soon as they are measured.
        total: Seconds for all steps. A step may use all time that is not reserved for later steps.
        path: More folders to import from, after the project's own.
    """
    start, ended_well = monotonic(), True
    for index, step in enumerate(steps):
        if missing := find_missing(step.needs):
            record.begin_step(step.name, step.question, size)
            record.end_step(step.name, f"left out: {', '.join(missing)} not installed", 0.0)
            ended_well = False
            continue
        reserved = sum(later.seconds for later in steps[index + 1 :])
        limit = max(step.seconds, total - (monotonic() - start) - reserved)
        sys.stdout.write(f"\n== {step.name}: {step.question} (at most {limit:.0f} s)\n")
        record.begin_step(step.name, step.question, size)
        state, seconds, last_lines = _run_step(step, device, size, limit, partial(record.set_rows, step.name), path)
        record.end_step(step.name, state, seconds, [] if state == "done" else last_lines)
        sys.stdout.write(f"== {step.name}: {state}, {seconds:.0f} s\n")
        sys.stdout.flush()
        ended_well &= state == "done"
    return ended_well


def _run_step(
    step: Step, device: str, size: str, limit: float, save_rows: Callable[[list[str]], None], path: Sequence[str]
) -> tuple[str, float, list[str]]:
    """Run one step, and return (how it ended, seconds, last lines of its output)."""
    with tempfile.TemporaryDirectory(prefix=f"headway-{step.name}-", ignore_cleanup_errors=True) as folder:
        rows = Path(folder, "rows.jsonl")
        rows.touch()
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.step",
            step.module_name,
            "--device",
            device,
            "--size",
            size,
            "--rows",
            str(rows),
        ]
        start = monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=_make_environment(scratch, path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        reader = threading.Thread(target=_forward_output, args=(process, rows, save_rows, last_lines), daemon=True)
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
        finally:  # also if this process is terminated
            _kill_step(process)
            reader.join(10)
            save_rows(_read_complete_lines(rows))
        return state, monotonic() - start, list(last_lines)


def _make_environment(scratch: Path, path: Sequence[str]) -> dict[str, str]:
    folders = [str(ROOT / "src"), str(ROOT), *path, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}


def _forward_output(
    process: subprocess.Popen[str], rows: Path, save_rows: Callable[[list[str]], None], last_lines: deque[str]
) -> None:
    """Print the step's output, and save its rows when the file has grown."""
    assert process.stdout is not None
    size = 0
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        last_lines.append(line.rstrip())
        if rows.exists() and rows.stat().st_size != size:
            size = rows.stat().st_size
            save_rows(_read_complete_lines(rows))


def _read_complete_lines(rows: Path) -> list[str]:
    """Return the complete lines, without one that is still being written."""
    return [line for line in rows.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _kill_step(process: subprocess.Popen[str]) -> None:
    """Kill the step and all processes that it has started, including those in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
    end_sessions([process.pid], 0.0)  # processes that remain if the step was killed from outside
