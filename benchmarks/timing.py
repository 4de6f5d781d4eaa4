"""Interleaved timing shared by all benchmarks: repeats in turn, medians, spread, and the machine they ran on."""

import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway.version import __version__ as headway_version

FOLDER = Path(__file__).parent
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
ACCELERATE_MISSING = "accelerate is not installed"


def children() -> float:
    """CPU seconds of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interleave(
    passes: Mapping[str, Callable[[], Any]],
    repeats: int,
    cpu_clock: Callable[[], float] = time.process_time,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[tuple[float, float]]]:
    """Run each pass once as a warm-up, then all of them in turn, `repeats` times, each time from another one on.

    Args:
        passes: Functions to measure, by name.
        repeats: Number of measured calls of each function.
        cpu_clock: Function that returns the CPU seconds used so far. Default: those of this process.
        before: Function called before each pass, outside of the measured time. Default: a function that does nothing.

    Returns:
        For each name, (wall, CPU) seconds of every repeat; repeat i of all names ran side by side.
    """
    for run in passes.values():
        run()
    names, found = list(passes), {name: [] for name in passes}
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            before()
            wall, cpu = time.perf_counter(), cpu_clock()
            passes[name]()
            found[name].append((time.perf_counter() - wall, cpu_clock() - cpu))
    return found


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Median, quartiles and number of repeats, in units of `scale` seconds."""
    low, middle, high = statistics.quantiles([value * scale for value in values], n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "repeats": len(values)}


def added(values: list[float], floor: list[float], scale: float = 1.0) -> dict[str, float]:
    """What each repeat took beyond the floor's repeat beside it."""
    return summary([value - base for value, base in zip(values, floor)], scale)


def rows_of(found: dict[str, list[tuple[float, float]]], scale: float) -> dict[str, Any]:
    """A row for each name: wall and CPU time, and what they are beyond the first name's, in units of 1 / `scale` s."""
    walls = {name: [wall for wall, _ in times] for name, times in found.items()}
    cpus = {name: [cpu for _, cpu in times] for name, times in found.items()}
    floor = next(iter(found))
    rows: dict[str, Any] = {
        name: {
            "wall": summary(walls[name], scale), "cpu": summary(cpus[name], scale),
            "added wall": added(walls[name], walls[floor], scale), "added cpu": added(cpus[name], cpus[floor], scale),
        }
        for name in found
    }  # fmt: skip
    return rows if HAS_ACCELERATE else {**rows, "accelerate": ACCELERATE_MISSING}


def start_command(command: list[str]) -> Callable[[], Any]:
    """Return a function that runs a command from start to end, and raises if it fails."""
    # Bytecode is cached, as it is after any installation: the warm-up writes it where it is missing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return lambda: subprocess.run(command, check=True, capture_output=True, env=environment)


def whole_processes(commands: Mapping[str, list[str]], repeats: int) -> dict[str, Any]:
    """Return rows for commands that are run from start to end, in seconds. Every command must succeed."""
    passes = {name: start_command(command) for name, command in commands.items()}
    return rows_of(interleave(passes, repeats, children), 1.0)


def tool(name: str) -> str:
    """The command of that name in this interpreter's environment."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def num_repeats(default: int) -> int:
    """The number given on the command line, else `default`."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def machine() -> dict[str, Any]:
    """The machine and the versions that were measured."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": model,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": version("torch"),
        "headway": headway_version,  # which need not be installed
        **({"accelerate": version("accelerate")} if HAS_ACCELERATE else {}),
    }


def save(question: str, unit: str, rows: dict[str, Any], note: str = "") -> None:
    """Write the question's result beside its script, and print it."""
    result = {"date": date.today().isoformat(), "machine": machine(), "unit": unit, "note": note, "rows": rows}
    text = json.dumps(result, indent=2)
    (FOLDER / question / "result.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
