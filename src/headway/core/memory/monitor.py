"""Memory monitor: peak memory of each phase of a training step, from the device's allocator or the host's kernel.

Several readers can measure one device at once. The allocator has a single peak counter, and resetting it affects all
readers.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch

from headway.common import scope
from headway.common.optional import LazyModule
from headway.common.text import format_bytes
from headway.core import extensions
from headway.core.memory.oom import is_out_of_memory
from headway.core.memory.use import check_device, memory_use, read_host_peak
from headway.core.runtime import events
from headway.core.runtime.device import HARDWARE, Hardware
from headway.errors import StateError

psutil = LazyModule("psutil")


class PeakMeter(Protocol):
    """Base class of meters for the peak memory use since the last reset, in bytes.

    Attributes:
        source: Origin of the numbers, such as the device's allocator or the kernel, as text.
    """

    source: str

    def read_peak(self) -> int:
        """Return the highest memory use in bytes since the last reset."""

    def reset(self) -> None:
        """Start a new measurement. The peak is then the current memory use."""

    def close(self) -> None:
        """Stop measuring. Only meters that run a thread have something to stop."""
        return  # by default there is nothing to stop


class MemoryMonitor:
    """Context manager that measures peak memory per training phase, and per phase that you name.

    Example::

        with MemoryMonitor() as monitor:
            train()
        print(monitor)

    Phases are forward (everything up to backward: batch, model, loss), backward, and step (from the last backward of
    an accumulation window to the end of the optimizer's step). Prepared objects mark these phases. Without prepared
    objects everything counts as "forward". An out-of-memory error that leaves the block gets a memory report as a note.

    Enter it on the ranks that should be measured; ranks do not communicate. It can be entered again, which resets the
    peaks. Several monitors may be active at once. Do not call torch's `reset_peak_memory_stats` in the block.

    Args:
        device: Device to measure. None (the default): the one that this process computes on. "cpu": the host.
        by_phase: Whether to split the peak by training phases. False: only by phases that you name, at no cost to the
            training step. Default: True.

    Attributes:
        peaks: Peak use in bytes by phase, since the block was last entered. On a device, the memory of tensors; on the
            host, resident memory.
        source: Origin of the numbers: the device's allocator, the kernel, or samples. "" before the block is entered.

    Raises:
        ConfigError: On entering the block, if the device's memory cannot be measured.
        DeviceUnavailable: On entering the block, if this machine does not have the device.
        StateError: If the monitor is entered while it is already measuring.
    """

    def __init__(self, device: torch.device | str | None = None, by_phase: bool = True) -> None:
        self._requested_device = device
        self._by_phase = by_phase
        self.peaks: dict[str, int] = {}
        self.source = ""
        self._phase = "forward"  # phase in progress
        self._meter: PeakMeter | None = None  # None while this monitor does not measure
        self._stack = ExitStack()  # what must be undone when the block ends

    def __enter__(self) -> "MemoryMonitor":
        """Start measuring.

        Raises:
            StateError: If this monitor is already measuring.
            ConfigError: If the device's memory cannot be measured.
            DeviceUnavailable: If this machine does not have the device.
        """
        if self._meter is not None:
            raise StateError("this MemoryMonitor is already measuring; create another one for an inner block")
        self.device = check_device(self._requested_device)
        # The new meter resets the device's peak counter, which other monitors may share.
        for monitor in scope.get_or_create(_ActiveMonitors):
            monitor._read_peak()
        self._meter = meter = choose_meter(self.device)
        meter.reset()
        self.source = meter.source
        self._phase = "forward"
        self.peaks = {}
        scope.get_or_create(_ActiveMonitors).append(self)
        self._stack.callback(self._end_measuring, meter)
        if self._by_phase:
            self._stack.enter_context(events.listen_to_phases(self._begin_phase))
        events.get_progress_texts().append(self._format_peak)
        self._stack.callback(events.get_progress_texts().remove, self._format_peak)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop measuring. Add a memory report to an out-of-memory error."""
        self._stack.close()
        if error is not None and is_out_of_memory(error) and hasattr(error, "add_note"):
            error.add_note(extensions.load("feature", "memory_report").explain(error))

    def _end_measuring(self, meter: PeakMeter) -> None:
        """Record the last peak, and stop the meter."""
        self._read_peak()
        scope.get_or_create(_ActiveMonitors).remove(self)
        self._meter = None
        meter.close()

    def _read_peak(self) -> None:
        """Record the current peak in every active monitor of this device, unless this monitor has ended."""
        if self._meter is None:
            return
        peak = self._meter.read_peak()
        for monitor in scope.get_or_create(_ActiveMonitors):
            if monitor.device == self.device:
                monitor.peaks[monitor._phase] = max(monitor.peaks.get(monitor._phase, 0), peak)

    def _begin_phase(self, phase: str) -> None:
        """Record the peak of the current phase, and begin to measure the phase `phase`."""
        assert self._meter is not None
        self._read_peak()
        self._meter.reset()
        self._phase = phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that is measured as a separate phase, such as "evaluation".

        Training phases inside it are still counted separately. Several blocks of one name count as one phase.

        Args:
            name: Name of the phase, which becomes a key of `peaks`.

        Raises:
            StateError: If this monitor is not measuring.
        """
        if self._meter is None:
            raise StateError("monitor.phase() was called outside `with monitor:`; enter the monitor first")
        before = self._phase
        self._begin_phase(name)
        try:
            yield
        finally:
            if self._meter is not None:
                self._begin_phase(before)

    @property
    def peak(self) -> int:
        """Highest memory use so far, in bytes."""
        self._read_peak()
        return max(self.peaks.values(), default=0)

    def summary(self) -> dict[str, float]:
        """Return this process's measured bytes by name, for example for `accelerator.log`.

        The names are memory/used and memory/reserved (at this moment), memory/peak and memory/peak_<phase> (in the
        block). Call it inside the block or after it.
        """
        highest, now = self.peak, memory_use(self.device)
        values = {"memory/used": float(now.used), "memory/reserved": float(now.reserved), "memory/peak": float(highest)}
        return values | {f"memory/peak_{phase}": float(peak) for phase, peak in self.peaks.items()}

    def _format_peak(self) -> str:
        """Return the highest peak and its phase as text, for progress bars."""
        highest = self.peak
        return f"peak {format_bytes(highest)} in {max(self.peaks, key=self.peaks.__getitem__)}"

    def __str__(self) -> str:
        highest = self.peak
        parts = [f"{phase} {format_bytes(peak)}" for phase, peak in self.peaks.items()]
        return f"peak memory {format_bytes(highest)} on {self.device} ({', '.join(parts)}), by {self.source}"


class _ActiveMonitors(list[MemoryMonitor]):
    """Registry of the monitors that are measuring.

    If one monitor resets the device's counter, it is reset for all monitors. So each reading is recorded in all of
    them.
    """


def choose_meter(device: torch.device) -> PeakMeter:
    """Create the most accurate meter of peak memory that works for a device on this system.

    For a device whose allocator counts no peak, this process's resident memory on the host is sampled.
    """
    if device.type != "cpu":
        hardware = HARDWARE[device.type]
        return PeakReader(hardware, device) if hardware.find_memory_function("max_memory_allocated") else SampledMeter()
    meter = KernelMeter()
    try:
        meter.reset()
    except OSError:  # another system, or a sandbox that hides the file
        return SampledMeter()
    return meter


class PeakReader(PeakMeter):
    """Meter of one device's peak memory use since the meter's last reset, as counted by torch's allocator.

    A reset clears the allocator's counter for all readers, so the peak so far is first recorded for the other readers.
    A call to `torch.cuda.reset_peak_memory_stats()` by the script is not noticed. Afterwards, a reader knows only its
    recorded peak and the memory use since that call.

    Args:
        hardware: Device type.
        device: The device. Without an index, the current one.
    """

    source = "torch's allocator"

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._read_max_allocated, self._reset_peak_stats = map(
            hardware.find_memory_function, ("max_memory_allocated", "reset_peak_memory_stats")
        )
        if device.index is None and (current := hardware.find_function("current_device")) is not None:
            device = torch.device(device.type, current())
        self._device = device
        self._recorded_peak = 0
        scope.get_or_create(_PeakReaders).add(self)

    def read_peak(self) -> int:
        """Return the highest number of bytes that tensors used since the last reset."""
        return max(
            self._recorded_peak, 0 if self._read_max_allocated is None else int(self._read_max_allocated(self._device))
        )

    def reset(self) -> None:
        """Start a new measurement, after recording the peak for the other readers of this device."""
        other_readers = [
            each for each in scope.get_or_create(_PeakReaders) if each is not self and each._device == self._device
        ]
        if other_readers and self._read_max_allocated is not None:
            peak = int(self._read_max_allocated(self._device))
            for reader in other_readers:
                reader._recorded_peak = max(reader._recorded_peak, peak)
        if self._reset_peak_stats is not None:
            self._reset_peak_stats(self._device)
        self._recorded_peak = 0


class _PeakReaders(weakref.WeakSet["PeakReader"]):
    """Registry of all `PeakReader` objects of this process, as weak references."""


class KernelMeter(PeakMeter):
    """Peak resident memory of this process, as counted by the Linux kernel."""

    source = "the kernel's count of resident memory"

    def read_peak(self) -> int:
        """Return the process's peak resident memory in bytes."""
        return read_host_peak()

    def reset(self) -> None:
        """Reset the kernel's peak counter.

        Writing 5 to clear_refs resets only this counter (see proc_pid_clear_refs(5)).

        Raises:
            OSError: If the file is missing or not writable, as on other systems and in some sandboxes.
        """
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


class SampledMeter(PeakMeter):
    """Peak resident memory of this process, sampled by a thread, for systems without a peak counter.

    Peaks shorter than the interval are missed.

    Args:
        interval: Seconds between two samples. Default: 0.005.
    """

    source = "samples of resident memory"

    def __init__(self, interval: float = 0.005) -> None:
        self._process = psutil.Process()
        self._highest_resident = self._read_resident()
        self._should_stop = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_until_stopped, args=(interval,), name="headway-memory", daemon=True
        )
        self._thread.start()

    def _read_resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _sample_until_stopped(self, interval: float) -> None:
        """Record the highest resident memory, as a thread that reads it every `interval` seconds until it is stopped."""
        while not self._should_stop.wait(interval):
            self._highest_resident = max(self._highest_resident, self._read_resident())

    def read_peak(self) -> int:
        """Return the highest resident memory that was sampled since the last reset, in bytes."""
        return max(self._highest_resident, self._read_resident())

    def reset(self) -> None:
        """Start a new measurement. The peak is then the current memory use."""
        self._highest_resident = self._read_resident()

    def close(self) -> None:
        """Stop the sampling thread."""
        self._should_stop.set()
        self._thread.join()
