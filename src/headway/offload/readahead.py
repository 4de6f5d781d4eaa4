"""Read weights ahead on the CPU: a thread loads the pages of the next weights while the current ones are used."""

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from headway.core.weights.locations import TensorLocation

# Arguments of madvise that exist from Linux 5.14 and 5.4 on. Python's mmap module has no names for them.
_MADV_POPULATE_READ = 22
_MADV_PAGEOUT = 21
_STEP = 8 << 20
"""Number of bytes to read with one system call."""


class ReadOrder:
    """Predictor of the order in which weights are used.

    A unit is a group of tensors that are used together. The next unit is predicted from the last two: it is the unit
    that followed when these two were last used in this order. The order can differ from that of a plain forward, as in
    a decoding loop, an encoder that is called alone, or a module that is used twice. Before any use is observed, the
    predicted order is that of registration.

    Args:
        num_units: Number of units.
    """

    def __init__(self, num_units: int) -> None:
        # The unit that followed each unit, and each pair of successive units, when they were last used.
        self._next_after = {unit: (unit + 1) % num_units for unit in range(num_units)}
        self._next_after_pair: dict[tuple[int, int], int] = {}
        # The last two units that were used, and the last one.
        self._last_pair: tuple[int, int] | None = None
        self._current: int | None = None

    def record_use(self, unit: int) -> None:
        """Record that the computation uses a unit, which is a group of tensors that are used together.

        Predictions are learned from these records.

        Args:
            unit: Index of the unit.
        """
        if self._current is not None:
            self._next_after[self._current] = unit
            if self._last_pair is not None:
                self._next_after_pair[self._last_pair] = unit
            self._last_pair = (self._current, unit)
        self._current = unit

    def predict_next(self, after: Sequence[int] = ()) -> Iterator[int]:
        """Yield the units (groups of tensors) that are predicted to be used next, without end.

        Nothing is yielded if no use has been recorded and `after` is empty.

        Args:
            after: Units that are expected to be used before the first unit that is yielded. Default: none.
        """
        used = self._last_pair or (self._current,)
        recent = [unit for unit in (*used, *after) if unit is not None][-2:]
        if not recent:
            return
        while True:
            unit = self._next_after_pair.get((recent[0], recent[1])) if len(recent) == 2 else None
            if unit is None:
                unit = self._next_after[recent[-1]]
            yield unit
            recent = [recent[-1], unit]


@cache
def _load_libc() -> Any:
    """Return the C library, or None on systems other than Linux. Calls of its functions release Python's GIL."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def _get_page_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and length of the memory pages that contain a tensor's data."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def measure_resident_share(tensor: torch.Tensor) -> float | None:
    """Return the fraction of a tensor's pages that is in memory.

    Return None if the tensor has no elements, or the system does not report its pages.
    """
    libc = _load_libc()
    if libc is None or not tensor.numel():
        return None
    start, length = _get_page_range(tensor)
    pages = ctypes.create_string_buffer(length // mmap.PAGESIZE)
    if libc.mincore(start, length, pages):
        return None
    if not pages.raw.strip(b"\1"):  # all pages are resident, which is the usual case and fast to check
        return 1.0
    # The lowest bit of each byte is set if the page is resident. The other bits are reserved.
    return sum(byte & 1 for byte in pages.raw) / len(pages.raw)


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether all pages of the tensor are known to be in memory. False if the system does not report its pages."""
    return not tensor.numel() or measure_resident_share(tensor) == 1.0


def read_pages(tensor: torch.Tensor) -> None:
    """Read a tensor's pages from its file in order, and map them into memory.

    The call returns when all pages are in memory. Other Python threads can run during the call.
    """
    libc = _load_libc()
    start, length = _get_page_range(tensor)
    for offset in range(0, length, _STEP):
        if libc is None or libc.madvise(start + offset, min(_STEP, length - offset), _MADV_POPULATE_READ):
            _touch_pages(tensor, offset)


def _touch_pages(tensor: torch.Tensor, offset: int) -> None:
    """Read one byte of every page in a range of `_STEP` bytes, so that the system loads these pages.

    This is slower than `madvise`, but works on any system.

    Args:
        tensor: Tensor in a mapped file.
        offset: Offset in bytes at which the range begins.
    """
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[offset : offset + _STEP : mmap.PAGESIZE].sum()


def release_pages(tensor: torch.Tensor) -> None:
    """Advise the operating system that a tensor's pages are not needed soon.

    The tensor's values are kept, even if they were changed in memory.
    """
    libc = _load_libc()
    # Only whole pages are released, because the pages at the ends are shared with neighboring tensors.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and end > start:
        libc.madvise(start, end - start, _MADV_PAGEOUT)


@dataclass
class ReadTraffic:
    """Statistics of weight transfers: bytes, durations and waiting time.

    Attributes:
        num_bytes: Bytes of all transfers that have been started.
        timed_bytes: Bytes of the transfers whose duration is known.
        seconds: Total duration of the transfers that `timed_bytes` counts, in seconds.
        wait_seconds: Time for which the computing thread waited for transfers, in seconds.
    """

    num_bytes: int = 0
    timed_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    def add_transfer(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer, with its number of bytes and its duration in seconds."""
        self.num_bytes += num_bytes
        self.add_time(num_bytes, seconds)

    def add_time(self, num_bytes: int, seconds: float) -> None:
        """Count the duration, in seconds, of a transfer whose bytes are already included in `num_bytes`."""
        self.timed_bytes += num_bytes
        self.seconds += seconds

    @property
    def bandwidth(self) -> float | None:
        """Bandwidth during transfers in bytes per second, or None if no transfer has been timed."""
        return self.timed_bytes / self.seconds if self.seconds > 0 else None


class UnitReader:
    """Base class of readers that load weights ahead of use, in an order that they learn.

    Args:
        units: Groups of tensors that are used together, called units.
        window: Bytes to load ahead of use. If the largest unit is larger, its size is used instead.

    Attributes:
        window: Bytes to load ahead of use.
        order: Predictor of the order in which units are used.
    """

    _NOT_COPIED: tuple[str, ...] = ()
    """Names of the attributes that are created anew when the model is copied.

    Examples are threads and transfers in progress.
    """

    def __init__(self, units: list[list[TensorLocation]], window: int) -> None:
        self._units = units
        self._sizes = [sum(p.tensor.numel() * p.tensor.element_size() for p in unit) for unit in units]
        self.window = max(window, *self._sizes, 1)
        self.order = ReadOrder(len(units))

    def _reset_state(self) -> None:
        """Create or reset the attributes that are left out when the reader is copied or pickled."""

    @property
    def num_bytes(self) -> int:
        """Total bytes of all weights that the reader loads."""
        return sum(self._sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The modules are copied at the same time, so they might not have their tensors yet.
        self.__dict__.update(state)
        self._reset_state()


class ReadAhead(UnitReader):
    """Reader of weights that are used in place in mapped files. A thread reads ahead in the order of use.

    Nothing is copied. The only memory is the page cache, which the kernel can reclaim at any time. If the weights
    exceed `budget`, the first ones stay in memory, and the others are released after use. The kernel itself would drop
    the least recently used pages, which in a loop are the next ones needed.

    Args:
        units: Groups of tensors that are used together, called units, in the order of registration.
        window: Bytes to read ahead of use.
        budget: Bytes of page cache to fill.

    Attributes:
        traffic: Statistics of the reads.
    """

    _NOT_COPIED = ("_changed", "_thread", "_read_queue", "_ready_units", "_release_queue")

    def __init__(self, units: list[list[TensorLocation]], window: int, budget: int) -> None:
        super().__init__(units, window)
        # Units that stay in memory after use; None if all units fit into the budget. The budget also contains the
        # window, and units that have been used but not yet released.
        self._resident_units: set[int] | None = None
        if sum(self._sizes) > budget:
            self._resident_units = _choose_resident_units(self._sizes, budget - 2 * self.window)
        self.traffic = ReadTraffic()
        self._previous_unit: int | None = None
        self._reset_state()

    def _reset_state(self) -> None:
        """Create empty queues and a lock, also in a process that was forked or has unpickled the object."""
        self._changed = threading.Condition()
        # Units to read, in order. A unit stays in the queue until it is used.
        self._read_queue: deque[int] = deque()
        # Bytes of the window that the units in the queue do not need.
        self._free_bytes = self.window
        # Units that have been read ahead.
        self._ready_units: set[int] = set()
        # Units whose pages are to be released.
        self._release_queue: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    def enter_unit(self, unit: int) -> None:
        """Wait until the tensors of a unit are in memory, and request reads of the next units.

        Call it before the computation uses the unit.

        Args:
            unit: Index of a group of tensors that are used together.
        """
        if self._process_id != os.getpid():
            self._reset_state()  # a forked child has no reader
        with self._changed:
            self.order.record_use(unit)
            self._move_window(unit)
            if not all(is_resident(place.tensor) for place in self._units[unit]):
                if unit in self._ready_units:
                    self._ready_units.clear()  # the kernel has dropped pages that were read ahead
                self._wait_for_unit(unit)
            self._ready_units.discard(unit)
            if self._resident_units is not None and self._previous_unit not in (None, unit):
                self._release_queue.append(self._previous_unit)
            self._previous_unit = unit
            if self._get_next_task() is not None:
                self._start_reader()
                self._changed.notify_all()

    def _move_window(self, unit: int) -> None:
        """Advance the read-ahead window past a unit, which is a group of tensors that are used together.

        The units that are predicted to be used next are added, as long as their bytes fit into the window.

        Args:
            unit: Index of the unit that the computation uses now.
        """
        if self._read_queue and self._read_queue[0] == unit:
            self._free_bytes += self._sizes[self._read_queue.popleft()]
        else:
            self._read_queue.clear()
            self._free_bytes = self.window
        expected = set(self._read_queue)
        for following in self.order.predict_next(list(self._read_queue)[-2:]):
            if following == unit or following in expected or self._sizes[following] > self._free_bytes:
                break
            self._read_queue.append(following)
            expected.add(following)
            self._free_bytes -= self._sizes[following]
        self._ready_units &= expected | {unit}

    def _wait_for_unit(self, unit: int) -> None:
        """Put a unit at the front of the reader thread's queue, and wait until its tensors are in memory.

        Args:
            unit: Index of a group of tensors that are used together.
        """
        start = time.perf_counter()
        self._read_queue.appendleft(unit)
        self._start_reader()
        self._changed.notify_all()
        # Page faults of this thread would slow down the reader thread, which reads in order at the disk's full speed.
        while unit not in self._ready_units and self._thread is not None and self._thread.is_alive():
            self._changed.wait(timeout=1.0)
        if self._read_queue and self._read_queue[0] == unit:
            self._read_queue.popleft()
        self.traffic.wait_seconds += time.perf_counter() - start

    def _start_reader(self) -> None:
        """Start the reader thread unless it is running."""
        if self._thread is None or not self._thread.is_alive():
            # The thread must not keep the model alive, so it has only a weak reference to this object.
            name = "headway-read-ahead"
            self._thread = threading.Thread(
                target=_run_reader, args=(weakref.ref(self), self._changed), name=name, daemon=True
            )
            self._thread.start()

    def _get_next_task(self) -> tuple[int, bool] | None:
        """Return the reader thread's next task, or None if there is no work.

        A task is a unit (group of tensors), and whether to read its pages. If False, the pages are released. The caller
        must hold the lock.
        """
        for unit in self._read_queue:
            if unit not in self._ready_units:
                return unit, True
        return (self._release_queue.popleft(), False) if self._release_queue else None

    def _run_task(self, unit: int, is_read: bool) -> None:
        """Read the pages of a unit's tensors from their files, or release the pages. The caller must not hold the lock.

        Args:
            unit: Index of a group of tensors that are used together.
            is_read: Whether to read the pages. If False, they are released.
        """
        tensors = [place.tensor for place in self._units[unit]]
        if not is_read:
            if self._resident_units is not None and unit not in self._resident_units and unit not in self._ready_units:
                for tensor in tensors:
                    release_pages(tensor)
            return
        for tensor in tensors:
            if not is_resident(tensor):
                start = time.perf_counter()
                read_pages(tensor)
                self.traffic.add_transfer(tensor.nbytes, time.perf_counter() - start)
        with self._changed:
            if unit in self._read_queue:
                self._ready_units.add(unit)
            self._changed.notify_all()


def _choose_resident_units(sizes: list[int], budget: int) -> set[int]:
    """Return the indices of the first groups of tensors (units) whose total size fits into a budget.

    Args:
        sizes: Bytes of each unit, in the order of registration.
        budget: Available bytes.
    """
    units = set()
    total = 0
    for unit, size in enumerate(sizes):
        total += size
        if total > budget:
            break
        units.add(unit)
    return units


def _run_reader(reference: "weakref.ref[ReadAhead]", changed: threading.Condition) -> None:
    """Run the loop of the reader thread until the `ReadAhead` object is garbage-collected.

    Args:
        reference: Weak reference to the `ReadAhead` object.
        changed: Condition that is notified when there is work.
    """
    while True:
        ahead = reference()
        if ahead is None:
            return
        with changed:
            task = ahead._get_next_task()
            if task is None:
                del ahead
                # The next use of weights wakes the thread. The timeout is for checking whether the model still exists.
                changed.wait(timeout=5.0)
                continue
        ahead._run_task(*task)
        del ahead
