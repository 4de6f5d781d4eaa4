"""What a step is given: the device, the size, the clock, and the way to tell what it found."""

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
from benchmarks.gpu.record import shown
from benchmarks.timing import interleave, machine, summary
from headway import MemoryMonitor

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: was measured.
        value: in `unit`; None: there is none, and `note` says why.
        unit: of both figures.
        beside: what it is compared with; `beside_what` says what that is.
        wanted: what should hold, in words; empty: nothing in particular.
        holds: does it?
        note: anything else.
    """

    what: str
    value: float | None = None
    unit: str = ""
    beside: float | None = None
    beside_what: str = ""
    wanted: str = ""
    holds: bool | None = None
    note: str = ""


class Bench:
    """One step's run.

    Args:
        device: what it computes on.
        size: "full" on an accelerator, "small" on a CPU, "smallest" in tests.
        rows: the file that found rows are added to.

    Attributes:
        has_failed: some part of the step did.
    """

    def __init__(self, device: str, size: str, rows: Path) -> None:
        self.device = _indexed(torch.device(device))
        self.size = size
        self.has_failed = False
        self._rows = rows
        if self.is_cpu:
            torch.set_num_threads(1)  # as all benchmarks here: threads that share busy cores mostly wait for each other
        self._add({"machine": self._machine()})

    @property
    def is_cpu(self) -> bool:
        """No accelerator."""
        return self.device.type == "cpu"

    @property
    def is_simulated(self) -> bool:
        """torch's CUDA build over tests/simulated_cuda: no card, and nothing is as fast as one."""
        return not self.is_cpu and importlib.util.find_spec("simulated_cuda") is not None

    @property
    def no_compiler(self) -> str:
        """Why inductor cannot generate code for this device; empty where it can."""
        if self.is_cpu:
            return (
                ""
                if shutil.which("g++")
                else "left out: torch.compile needs a C++ compiler on a CPU, and there is none"
            )
        if self.is_simulated and os.environ.get("SIMULATED_CUDA_VALUES") != "0":
            return "left out: Triton's kernels compute nothing on the simulated runtime, which has values here"
        return "" if importlib.util.find_spec("triton") else "left out: triton is not installed"

    @property
    def module(self) -> Any:
        """torch's module for this kind of device."""
        return torch.get_device_module(self.device.type)

    def choose(self, full: T, small: T, smallest: T) -> T:
        """What belongs to this run's size."""
        return (full, small, smallest)[SIZES.index(self.size)]

    # ---------------------------------------------------------------- telling

    def say(self, text: str) -> None:
        """A line for who looks on."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def row(self, row: Row) -> None:
        """One figure is known: printed, and kept even where the step does not end."""
        told = asdict(row)
        for key in ("value", "beside"):  # JSON has neither nan nor infinity
            if told[key] is not None and not isfinite(told[key]):
                told[key], told["note"] = None, f"{key} was {told[key]}; {told['note']}"
        self._add(told)
        self.say("  " + shown(told))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A part of the step: where it fails, a row says so, and the step goes on."""
        try:
            yield
        except Exception as error:
            self.has_failed = True
            traceback.print_exc(file=sys.stdout)
            self.row(
                Row(what, note=f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}")
            )
        self.release()

    def _add(self, line: dict[str, Any]) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _machine(self) -> dict[str, Any]:
        about = {"device": str(self.device), **machine()}
        if self.is_simulated:
            about["simulated"] = (
                "with values" if os.environ.get("SIMULATED_CUDA_VALUES", "1") != "0" else "without values"
            )
        for key, name, told in (("device", "get_device_name", str), ("device_GiB", "mem_get_info", _whole_gib)):
            ask = None if self.is_cpu else getattr(self.module, name, None)
            if ask is not None:
                about[key] = told(ask(self.device))
        return about

    # ---------------------------------------------------------------- measuring

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if not self.is_cpu:
            self.module.synchronize()

    def release(self) -> None:
        """Give back memory that nothing refers to, cuBLAS's workspaces included, which otherwise stay from case to case."""
        gc.collect()
        if self.device.type == "cuda":
            self.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
        if not self.is_cpu:
            self.module.empty_cache()

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long it takes, the device's work included."""
        self.synchronize()
        begun = perf_counter()
        run()
        self.synchronize()
        return perf_counter() - begun

    def rates(self, passes: dict[str, Callable[[], Any]], items: float, repeats: int) -> dict[str, dict[str, float]]:
        """Items a second of passes that run in turn, after one of each to warm up: median and quartiles."""

        def whole(run: Callable[[], Any]) -> Callable[[], None]:
            def timed() -> None:
                run()
                self.synchronize()

            return timed

        found = interleave({name: whole(run) for name, run in passes.items()}, repeats)
        return {name: summary([items / wall for wall, _ in times]) for name, times in found.items()}

    def peak(self, run: Callable[[], Any]) -> int:
        """The most bytes that tensors held meanwhile; on a CPU the most resident memory of this process."""
        self.synchronize()
        with MemoryMonitor(self.device, by_phase=False) as monitor:
            run()
            self.synchronize()
        return int(monitor.peak)


def _indexed(device: torch.device) -> torch.device:
    """With the number of the device in use, where such devices have numbers."""
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device.type), "current_device", None)
    return device if ask is None or device.index is not None else torch.device(device.type, ask())


def _whole_gib(free_and_total: tuple[int, int]) -> float:
    return round(free_and_total[1] / 2**30, 1)


def scratch() -> Path:
    """A folder that is removed when the step is over, however it ends."""
    return Path(os.environ["TMPDIR"])
