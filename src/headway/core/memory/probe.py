"""Probe of a batch size: the user's function is stopped after two updates, and its peak memory is measured."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.core.memory.monitor import KernelMeter, PeakReader
from headway.core.memory.oom import drop_frames
from headway.core.memory.row_curve import RowCurve, RowPeak
from headway.core.memory.use import read_free_address_space, read_free_bytes, read_host_memory
from headway.core.runtime.device import HARDWARE, Hardware

NUM_UPDATES = 2
"""Number of updates after which a probe ends the function.

The first update creates the optimizer state. The second update therefore has the same memory peak as all later ones.
"""


class BatchProbe:
    """Probe that runs a function at trial batch sizes, and predicts the largest one that fits in this rank's memory."""

    def __init__(self) -> None:
        # By device name: the measured peaks, and the smallest number of bytes that was available to a probe.
        self._curves: dict[str, RowCurve] = {}
        self._available_bytes: dict[str, int] = {}

    def wrap(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that calls `function`, stops it after `NUM_UPDATES` updates, and records its peak memory.

        If torch optimizers make fewer updates, the function runs to its end.

        Args:
            function: Function whose first parameter is the batch size.
        """

        def run_probe(size: int, *args: Any, **kwargs: Any) -> None:
            meters = dict(_start_meters())
            hook = register_optimizer_step_post_hook(_UpdateCounter())
            try:
                function(size, *args, **kwargs)
                self._record_peaks(size, meters)
            except ProbeFinished as finished:
                self._record_peaks(size, meters)  # while the function's objects still exist
                drop_frames(finished)
            finally:
                hook.remove()

        return run_probe

    def predict_largest(self) -> int | None:
        """Return the largest batch size that is predicted to fit on all devices of this rank.

        Return None if no device is measured.
        """
        predictions = [curve.predict_largest(self._available_bytes[name]) for name, curve in self._curves.items()]
        return min((each for each in predictions if each is not None), default=None)

    def _record_peaks(self, size: int, meters: "dict[str, _DeviceMeter | _HostMeter]") -> None:
        """Record the peak of each device that the probe has used, and the memory that was available to it.

        Args:
            size: Batch size of the probe.
            meters: Meters by device name, started before the probe.
        """
        for name, meter in (meters | dict(_find_new_devices(meters))).items():
            peak = meter.read_peak(size)
            if peak.allocated > 0:
                self._curves.setdefault(name, RowCurve()).record_peak(peak)
                self._available_bytes[name] = min(meter.read_available(), self._available_bytes.get(name, 1 << 62))


class ProbeFinished(BaseException):
    """Raised in an optimizer's step to leave the caller's function after a probe's last update.

    It is not an `Exception`, so that an `except Exception` in the function does not catch it. Headway always catches
    it.
    """


class _UpdateCounter:
    """Hook that ends a probe when each optimizer that has stepped at all has stepped `NUM_UPDATES` times."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._counts[id(optimizer)] += 1
        if min(self._counts.values()) >= NUM_UPDATES:
            raise ProbeFinished


@dataclass
class _DeviceMeter:
    """Peak memory of one device during a probe.

    Attributes:
        hardware: Device type.
        device: The device.
        peak: Reader of the allocator's peak.
        base: Bytes of tensors before the probe.
    """

    hardware: Hardware
    device: torch.device
    peak: PeakReader
    base: int

    def read_peak(self, rows: int) -> RowPeak:
        """Return the probe's peak memory as a `RowPeak`, minus the memory that was in use before the probe.

        Args:
            rows: Number of rows with which the probe ran.
        """
        allocated = self.peak.read_peak() - self.base
        return RowPeak(rows, allocated, max(allocated, self._read_reserved() - self.base))

    def read_available(self) -> int:
        """Return the bytes that were available to a probe, including those that it used."""
        return read_free_bytes(self.hardware, self.device) + self._read_reserved() - self.base

    def _read_reserved(self) -> int:
        """Return the bytes that torch's allocator has reserved on the device, or 0 if torch does not count them."""
        read = self.hardware.find_memory_function("memory_reserved")
        return 0 if read is None else int(read(self.device))


class _HostMeter:
    """Peak memory of this process on the host, measured only if its address space is limited (`ulimit -v`).

    Without such a limit, host memory does not run out with an error, so no batch size can be predicted from it.
    """

    def __init__(self) -> None:
        self._peak = KernelMeter()
        self._peak.reset()
        self._start_resident, self._start_mapped = read_host_memory()
        self._available_bytes = read_free_address_space() or 0

    def read_peak(self, rows: int) -> RowPeak:
        """Return the address space that the probe has used, as a `RowPeak`.

        It consists of resident pages and of mapped pages that are not resident. The latter, such as memory arenas of
        threads, hardly depend on the number of rows. So they do not count as fragmentation, which is assumed to grow
        with rows.
        """
        resident, mapped = read_host_memory()
        allocated = max(0, self._peak.read_peak() - self._start_resident)
        unused = max(0, (mapped - self._start_mapped) - (resident - self._start_resident))
        num_bytes = allocated + unused
        return RowPeak(rows, allocated=num_bytes, reserved=num_bytes)  # equal: no fragmentation

    def read_available(self) -> int:
        """Return the bytes of address space that were free before the probe."""
        return self._available_bytes


def _start_meters() -> "Iterator[tuple[str, _DeviceMeter | _HostMeter]]":
    """Yield a meter for each device that torch has initialized, and one for the host if its memory is limited."""
    for hardware, device in _list_counted_devices():
        allocated = hardware.find_memory_function("memory_allocated")
        peak = PeakReader(hardware, device)
        peak.reset()
        yield str(device), _DeviceMeter(hardware, device, peak, 0 if allocated is None else int(allocated(device)))
    if read_free_address_space() is not None:
        yield "cpu", _HostMeter()


def _find_new_devices(meters: "dict[str, _DeviceMeter | _HostMeter]") -> Iterator[tuple[str, _DeviceMeter]]:
    """Yield meters for the devices that torch has initialized since the given meters started.

    The peaks of these devices count from zero bytes.
    """
    for hardware, device in _list_counted_devices():
        if str(device) not in meters:
            yield str(device), _DeviceMeter(hardware, device, PeakReader(hardware, device), 0)


def _list_counted_devices() -> Iterator[tuple[Hardware, torch.device]]:
    """Yield the devices that torch has initialized in this process, and whose peak and free memory it can read."""
    names = ("max_memory_allocated", "reset_peak_memory_stats", "memory_reserved", "mem_get_info")
    for hardware in HARDWARE.values():
        is_initialized = None if hardware.kind == "cpu" else hardware.find_function("is_initialized")
        if is_initialized is None or not hardware.is_available() or not is_initialized():
            continue
        if all(hardware.find_memory_function(name) is not None for name in names):
            for index in range(hardware.count_devices()):
                yield hardware, torch.device(hardware.kind, index)
