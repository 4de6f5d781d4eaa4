"""Counts how often the host waits for the device: by torch's warnings on CUDA, elsewhere by the operations that read values."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import Bench

READING_OPERATIONS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
}
COPYING_OPERATIONS = {"aten::_to_copy", "aten::copy_"}

WaitCounts = Counter[str]
"""Number of waits by the line of Python code that caused them."""


def count_waits(bench: Bench, run: Callable[[], Any]) -> WaitCounts:
    """Count every wait in `run`, by the line that caused it.

    On CUDA, torch's `set_sync_debug_mode` reports the waits. On other devices, operations count that hand a value of the device to
    the host. On a CPU, those operations count that would do so with tensors on a device; copies from a device cannot be seen.
    """
    return _count_warnings(run) if bench.device.type == "cuda" else _count_reads(run)


def _count_warnings(run: Callable[[], Any]) -> WaitCounts:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        _shorten(warning.filename, warning.lineno) for warning in caught if "synchronizing" in str(warning.message)
    )


def _count_reads(run: Callable[[], Any]) -> WaitCounts:
    with _ReadCounter() as mode:
        run()
    return mode.counts


class _ReadCounter(TorchDispatchMode):
    """Dispatch mode that counts operations that read values of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: WaitCounts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in READING_OPERATIONS or (name in COPYING_OPERATIONS and _is_copy_to_host(result, args)):
            self.counts[_find_caller()] += 1
        return result


def _is_copy_to_host(result: Any, args: Any) -> bool:
    """Whether an operation copied from a device to the host."""
    sources = [argument for argument in args if isinstance(argument, torch.Tensor)]
    return result.device.type == "cpu" and bool(sources) and sources[-1].device.type != "cpu"


def _find_caller() -> str:
    """Return the innermost line that does not belong to torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return _shorten(frame.f_code.co_filename, frame.f_lineno)


def _shorten(file: str, line: int) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line}"
