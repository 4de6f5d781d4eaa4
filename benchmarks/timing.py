"""Interleaved timing for all benchmarks: variants run in turn, and results are medians with quartiles."""

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


def get_children_cpu_seconds() -> float:
    """Return the CPU seconds of the child processes of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_interleaved(
    passes: Mapping[str, Callable[[], Any]],
    repeats: int,
    cpu_clock: Callable[[], float] = time.process_time,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[tuple[float, float]]]:
    """Run each variant once as a warm-up, then time all variants in turn, `repeats` times.

    Each repeat starts with a different variant, so that other activity on the machine affects all of them.

    Args:
        passes: Function to time, by name of the variant.
        repeats: Number of timed calls of each function.
        cpu_clock: Clock that returns CPU seconds. Default: that of this process.
        before: Function to call before each timed call, outside of the measured time. Default: it does nothing.

    Returns:
        By name, (wall, CPU) seconds of every repeat. Entries with the same index ran side by side.
    """
    for run in passes.values():
        run()
    names, times = list(passes), {name: [] for name in passes}
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            before()
            wall, cpu = time.perf_counter(), cpu_clock()
            passes[name]()
            times[name].append((time.perf_counter() - wall, cpu_clock() - cpu))
    return times


def summarize(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median, the quartiles and the number of repeats; values are multiplied by `scale`."""
    low, middle, high = statistics.quantiles([value * scale for value in values], n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "repeats": len(values)}


def summarize_added(values: list[float], floor: list[float], scale: float = 1.0) -> dict[str, float]:
    """Summarize the difference between each value and the floor's value of the same repeat, multiplied by `scale`."""
    return summarize([value - base for value, base in zip(values, floor)], scale)


def make_rows(times: dict[str, list[tuple[float, float]]], scale: float) -> dict[str, Any]:
    """Return a result row for each variant: its wall and CPU time, and what they add to those of the first variant.

    Args:
        times: Result of `time_interleaved`. The first variant is the floor.
        scale: Factor from seconds per repeat to the unit of the result, such as 1e6 / batches for microseconds per batch.
    """
    walls = {name: [wall for wall, _ in pairs] for name, pairs in times.items()}
    cpus = {name: [cpu for _, cpu in pairs] for name, pairs in times.items()}
    floor = next(iter(times))
    rows: dict[str, Any] = {
        name: {
            "wall": summarize(walls[name], scale), "cpu": summarize(cpus[name], scale),
            "added wall": summarize_added(walls[name], walls[floor], scale),
            "added cpu": summarize_added(cpus[name], cpus[floor], scale),
        }
        for name in times
    }  # fmt: skip
    return rows if HAS_ACCELERATE else {**rows, "accelerate": ACCELERATE_MISSING}


def make_command_runner(command: list[str]) -> Callable[[], Any]:
    """Return a function that runs a command to its end, and raises `CalledProcessError` if it fails."""
    # Allow cached bytecode, as in an ordinary installation: the warm-up writes what is missing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return lambda: subprocess.run(command, check=True, capture_output=True, env=environment)


def time_commands(commands: Mapping[str, list[str]], repeats: int) -> dict[str, Any]:
    """Time commands as whole processes, and return result rows in seconds. Raise `CalledProcessError` if one fails."""
    passes = {name: make_command_runner(command) for name, command in commands.items()}
    return make_rows(time_interleaved(passes, repeats, get_children_cpu_seconds), 1.0)


def find_command(name: str) -> str:
    """Return the path of a command, preferably the one in this interpreter's environment."""
    installed = Path(sys.executable).with_name(name)
    return str(installed) if installed.exists() else shutil.which(name) or name


def get_num_repeats(default: int) -> int:
    """Return the number of repeats from the command line, or `default`."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine and of the versions that are measured."""
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
        "headway": headway_version,  # not from package metadata: Headway need not be installed
        **({"accelerate": version("accelerate")} if HAS_ACCELERATE else {}),
    }


def save_result(question: str, unit: str, rows: dict[str, Any], note: str = "") -> None:
    """Write result.json into the question's folder, and print it."""
    result = {"date": date.today().isoformat(), "machine": describe_machine(), "unit": unit, "note": note, "rows": rows}
    text = json.dumps(result, indent=2)
    (FOLDER / question / "result.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")
