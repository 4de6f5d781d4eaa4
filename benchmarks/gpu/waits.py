"""Counts how often the host waits for the device: by torch's own watch on CUDA, elsewhere by the operations that read values."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import Bench

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"}
COPIES = {"aten::_to_copy", "aten::copy_"}

Places = Counter[str]
"""How often, by the line of Python that it came from."""


def waits(bench: Bench, run: Callable[[], Any]) -> Places:
    """Every wait in `run`.

    On CUDA these are torch's warnings of `set_sync_debug_mode`. On another device they are operations that hand a value of
    the device to the host; on a CPU, operations that would do so if its tensors lay on a device, while copies from a device cannot be
    seen.
    """
    return _warned(run) if bench.device.type == "cuda" else _read(run)


def _warned(run: Callable[[], Any]) -> Places:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        _short(warning.filename, warning.lineno) for warning in caught if "synchronizing" in str(warning.message)
    )


def _read(run: Callable[[], Any]) -> Places:
    with _Reads() as mode:
        run()
    return mode.places


class _Reads(TorchDispatchMode):
    """Notes operations that read what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Places = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in READS or (name in COPIES and _comes_home(result, args)):
            self.places[_caller()] += 1
        return result


def _comes_home(result: Any, args: Any) -> bool:
    sources = [each for each in args if isinstance(each, torch.Tensor)]
    return result.device.type == "cpu" and bool(sources) and sources[-1].device.type != "cpu"


def _caller() -> str:
    """The innermost line that is not torch's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return _short(frame.f_code.co_filename, frame.f_lineno)


def _short(file: str, line: int) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line}"
