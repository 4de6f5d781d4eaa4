"""Environment of a step: the device, the size, the clock, and the report of its rows."""

import gc
import importlib.util
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from benchmarks.gpu.plan import SIZES
from benchmarks.gpu.record import format_row
from benchmarks.timing import describe_machine, summarize, time_interleaved
from headway import MemoryMonitor

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes:
        name: Name of the figure, unique within the step.
        value: Value in `unit`, or None if there is none; `note` then gives the reason.
        unit: Unit of `value` and `reference`.
        reference: Value to compare with.
        reference_name: Name of the reference, such as "by hand".
        target: Target in words; empty without a target.
        is_met: Whether the target is met.
        note: Further remarks.
    """

    name: str
    value: float | None = None
    unit: str = ""
    reference: float | None = None
    reference_name: str = ""
    target: str = ""
    is_met: bool | None = None
    note: str = ""


class Bench:
    """The run of one step.

    Args:
        device: torch's name of the device.
        size: "full" on an accelerator, "small" on a CPU, "smallest" in tests.
        rows: File that rows are appended to.

    Attributes:
        has_failed: Whether a part of the step has failed.
    """

    def __init__(self, device: str, size: str, rows: Path) -> None:
        self.device = _add_index(torch.device(device))
        self.size = size
        self.has_failed = False
        self._rows = rows
        if self.is_cpu:
            torch.set_num_threads(1)  # as in all benchmarks here: threads on busy cores mostly wait for each other
        self._write({"machine": self._describe_machine()})

    @property
    def is_cpu(self) -> bool:
        """Whether the step runs without an accelerator."""
        return self.device.type == "cpu"

    @property
    def is_simulated(self) -> bool:
        """Whether torch runs on tests/simulated_cuda: without a real GPU, so no time or speed means anything."""
        return not self.is_cpu and importlib.util.find_spec("simulated_cuda") is not None

    @property
    def missing_compiler(self) -> str:
        """Reason why torch.compile cannot generate code for this device, or "" if it can."""
        if self.is_cpu:
            return (
                ""
                if shutil.which("g++")
                else "left out: torch.compile needs a C++ compiler on a CPU, and there is none"
            )
        if self.is_simulated and os.environ.get("SIMULATED_CUDA_VALUES") != "0":
            return "left out: Triton's kernels compute nothing on the simulated runtime, and this run computes values"
        return "" if importlib.util.find_spec("triton") else "left out: triton is not installed"

    @property
    def module(self) -> Any:
        """torch's module for this kind of device, such as `torch.cuda`."""
        return torch.get_device_module(self.device.type)

    def choose(self, full: T, small: T, smallest: T) -> T:
        """Return the argument that belongs to this run's size."""
        return (full, small, smallest)[SIZES.index(self.size)]

    # ---------------------------------------------------------------- reporting

    def print_line(self, text: str) -> None:
        """Print a line at once."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def add_row(self, row: Row) -> None:
        """Print a row and save it at once, so that it is kept even if the step does not finish."""
        fields = asdict(row)
        for key in ("value", "reference"):  # JSON has neither nan nor infinity
            if fields[key] is not None and not isfinite(fields[key]):
                fields[key], fields["note"] = None, f"{key} was {fields[key]}; {fields['note']}"
        self._write(fields)
        self.print_line("  " + format_row(fields))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Run a part of the step. If it raises, report the error as a row named `what`, and let the step go on."""
        try:
            yield
        except Exception as error:
            self.has_failed = True
            traceback.print_exc(file=sys.stdout)
            self.add_row(
                Row(what, note=f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}")
            )
        self.release()

    def _write(self, line: dict[str, Any]) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _describe_machine(self) -> dict[str, Any]:
        description = {"device": str(self.device), **describe_machine()}
        if self.is_simulated:
            description["simulated"] = (
                "with values" if os.environ.get("SIMULATED_CUDA_VALUES", "1") != "0" else "without values"
            )
        for key, name, convert in (("device", "get_device_name", str), ("device_GiB", "mem_get_info", _get_total_gib)):
            query = None if self.is_cpu else getattr(self.module, name, None)
            if query is not None:
                description[key] = convert(query(self.device))
        return description

    # ---------------------------------------------------------------- measuring

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if not self.is_cpu:
            self.module.synchronize()

    def release(self) -> None:
        """Free memory without references, including cuBLAS's workspaces, which would otherwise stay from case to case."""
        gc.collect()
        if self.device.type == "cuda":
            self.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
        if not self.is_cpu:
            self.module.empty_cache()

    def measure_seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds that a function takes, including the device's work."""
        self.synchronize()
        start = perf_counter()
        run()
        self.synchronize()
        return perf_counter() - start

    def measure_rates(
        self, passes: dict[str, Callable[[], Any]], items: float, repeats: int
    ) -> dict[str, dict[str, float]]:
        """Time functions in turn, after one warm-up of each, and return items per second: median and quartiles by name."""

        def synchronized(run: Callable[[], Any]) -> Callable[[], None]:
            def run_and_synchronize() -> None:
                run()
                self.synchronize()

            return run_and_synchronize

        times = time_interleaved({name: synchronized(run) for name, run in passes.items()}, repeats)
        return {name: summarize([items / wall for wall, _ in pairs]) for name, pairs in times.items()}

    def measure_peak(self, run: Callable[[], Any]) -> int:
        """Return the peak bytes of tensors while `run` runs; on a CPU, the peak resident memory of this process."""
        self.synchronize()
        with MemoryMonitor(self.device, by_phase=False) as monitor:
            run()
            self.synchronize()
        return int(monitor.peak)


def _add_index(device: torch.device) -> torch.device:
    """Return the device with the index in use, if its kind of device has indices."""
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    get_index = getattr(module, "current_device", None)
    return device if get_index is None or device.index is not None else torch.device(device.type, get_index())


def _get_total_gib(free_and_total: tuple[int, int]) -> float:
    return round(free_and_total[1] / 2**30, 1)


def get_scratch_folder() -> Path:
    """Return a folder that is removed when the step is over, however it ends."""
    return Path(os.environ["TMPDIR"])
