"""The memory monitor: peaks of each phase of a training step, read from the device's allocator or the host's kernel.

The highest use of a device's memory, for several readers at once: the allocator has one counter, and resetting it is for all.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch

from headway.common import scope
from headway.common.optional import Later
from headway.common.text import format_bytes
from headway.errors import StateError
from headway.memory.oom import is_out_of_memory
from headway.memory.report import explain
from headway.memory.use import device_of, host_peak, memory_use
from headway.runtime import events
from headway.runtime.device import HARDWARE, Hardware

psutil = Later("psutil")


class PeakMeter(Protocol):
    """Reads the highest use since its last reset, in bytes."""

    source: str

    def peak(self) -> int:
        """The highest use since the last reset."""

    def reset(self) -> None:
        """Start over from the present use."""

    def close(self) -> None:
        """End what measures."""
        return  # mostly nothing runs


class _Readers(weakref.WeakSet["PeakReader"]):
    """All readers of this process that somebody still holds."""


class PeakReader(PeakMeter):
    """The highest use of one device, by its own allocator, since this reader's own last reset.

    A reset takes the allocator's counter back for everybody, so what it held is noted for the other readers first. A script's
    own `torch.cuda.reset_peak_memory_stats()` is not seen here: readers then know what was used since it, and what they noted.

    Args:
        hardware: what kind of device.
        device: which one; without an index, the current one.
    """

    source = "torch's allocator"

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._tell, self._start_over = map(hardware.memory_ability, ("max_memory_allocated", "reset_peak_memory_stats"))
        if device.index is None and (current := hardware.ability("current_device")) is not None:
            device = torch.device(device.type, current())
        self._device = device
        self._noted = 0
        scope.own(_Readers).add(self)

    def peak(self) -> int:
        """Bytes that tensors held at most."""
        return max(self._noted, 0 if self._tell is None else int(self._tell(self._device)))

    def reset(self) -> None:
        """Start over from the present use."""
        others = [each for each in scope.own(_Readers) if each is not self and each._device == self._device]
        if others and self._tell is not None:
            highest = int(self._tell(self._device))
            for other in others:
                other._noted = max(other._noted, highest)
        if self._start_over is not None:
            self._start_over(self._device)
        self._noted = 0


class KernelMeter(PeakMeter):
    """Linux counts the process's peak of resident memory, and lets a process reset its own."""

    source = "the kernel's count of resident memory"

    def peak(self) -> int:
        """The process's highest resident memory."""
        return host_peak()

    def reset(self) -> None:
        """5 resets the peak and nothing else (proc_pid_clear_refs)."""
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


class SampledMeter(PeakMeter):
    """Where nothing counts peaks, a thread looks every few milliseconds; shorter peaks are missed."""

    source = "samples of resident memory"

    def __init__(self, interval: float = 0.005) -> None:
        self._process = psutil.Process()
        self._highest = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval,), name="headway-memory", daemon=True)
        self._thread.start()

    def _now(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self, interval: float) -> None:
        while not self._is_over.wait(interval):
            self._highest = max(self._highest, self._now())

    def peak(self) -> int:
        """The highest sample."""
        return max(self._highest, self._now())

    def reset(self) -> None:
        """Start over from the present use."""
        self._highest = self._now()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()


def choose_meter(device: torch.device) -> PeakMeter:
    """The best meter for a device that works here."""
    if device.type != "cpu":
        hardware = HARDWARE[device.type]
        return PeakReader(hardware, device) if hardware.memory_ability("max_memory_allocated") else SampledMeter()
    meter = KernelMeter()
    try:
        meter.reset()
    except OSError:  # another system, or a sandbox that hides the file
        return SampledMeter()
    return meter


class MemoryMonitor:
    """Measures memory in its block: the peak of each phase of training, and of phases that you name.

    Example::

        with MemoryMonitor() as monitor:
            train()
        print(monitor)

    The phases are forward (everything up to backward: the batch, the model, the loss), backward, and step (from a window's last
    backward to the end of the optimizer's step). They are marked by prepared objects; without those all is "forward".
    An out-of-memory error that leaves the block carries a report as a note.

    Args:
        device: None: the one that this process computes on.
        by_phase: False: only the phases that you name; marks are not heard, which costs a training step nothing.

    Attributes:
        peaks: phase -> highest use in bytes.
        source: what measures: the device's allocator, the kernel, or samples.
    """

    def __init__(self, device: torch.device | str | None = None, by_phase: bool = True) -> None:
        self._wanted = device
        self._by_phase = by_phase
        self.peaks: dict[str, int] = {}
        self.source = ""
        self._phase = "forward"
        self._meter: PeakMeter | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "MemoryMonitor":
        """Begin to measure.

        Raises:
            StateError: it measures already.
            ConfigError: the device is none whose memory is measured.
            DeviceUnavailable: this machine does not have it.
        """
        if self._meter is not None:
            raise StateError("this MemoryMonitor measures already; make another one for an inner block")
        self.device = device_of(self._wanted)
        for other in scope.own(_Running):
            other._read()
        self._meter = meter = choose_meter(self.device)
        meter.reset()
        self.source, self._phase, self.peaks = meter.source, "forward", {}
        scope.own(_Running).append(self)
        self._stack.callback(self._end, meter)
        if self._by_phase:
            self._stack.enter_context(events.hearing_phases(self._begin))
        events.facts().append(self._fact)
        self._stack.callback(events.facts().remove, self._fact)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; an out-of-memory error gets its report as a note."""
        self._stack.close()
        if error is not None and is_out_of_memory(error) and hasattr(error, "add_note"):
            error.add_note(explain(error))

    def _end(self, meter: PeakMeter) -> None:
        self._read()
        scope.own(_Running).remove(self)
        self._meter = None
        meter.close()

    def _read(self) -> None:
        """Note the peak so far in every monitor of this device; nothing once this one has ended."""
        if self._meter is None:
            return
        peak = self._meter.peak()
        for monitor in scope.own(_Running):
            if monitor.device == self.device:
                monitor.peaks[monitor._phase] = max(monitor.peaks.get(monitor._phase, 0), peak)

    def _begin(self, phase: str) -> None:
        assert self._meter is not None
        self._read()
        self._meter.reset()
        self._phase = phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase of its own, such as "evaluation"; marks made in it are counted as they are."""
        if self._meter is None:
            raise StateError("monitor.phase() was called outside `with monitor:`; enter the monitor first")
        before = self._phase
        self._begin(name)
        try:
            yield
        finally:
            if self._meter is not None:
                self._begin(before)

    @property
    def peak(self) -> int:
        """The highest use so far, in bytes."""
        self._read()
        return max(self.peaks.values(), default=0)

    def summary(self) -> dict[str, float]:
        """Bytes by name, as a tracker takes them: memory/used, memory/reserved, memory/peak, memory/peak_<phase>."""
        highest, now = self.peak, memory_use(self.device)
        found = {"memory/used": float(now.used), "memory/reserved": float(now.reserved), "memory/peak": float(highest)}
        return found | {f"memory/peak_{phase}": float(peak) for phase, peak in self.peaks.items()}

    def _fact(self) -> str:
        highest = self.peak
        return f"peak {format_bytes(highest)} in {max(self.peaks, key=self.peaks.__getitem__)}"

    def __str__(self) -> str:
        highest = self.peak
        parts = [f"{phase} {format_bytes(peak)}" for phase, peak in self.peaks.items()]
        return f"peak memory {format_bytes(highest)} on {self.device} ({', '.join(parts)}), by {self.source}"


class _Running(list[MemoryMonitor]):
    """The monitors that measure: a reset by one takes its past away from the others, so each reading is given to all."""
