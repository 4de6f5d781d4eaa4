"""Reading ahead on the CPU: a thread brings the pages of the next weights in while the present ones compute."""

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

from headway.weights.names import TensorLocation


class ReadOrder:
    """Predicts what is used next from what came after the last two uses.

    There are no passes to find: a decoding loop, an encoder called on its own, a module used twice and a change of mind
    are all the same to it. Until something was seen, the order of registration is the guess.
    """

    def __init__(self, num_units: int) -> None:
        self._after = {unit: (unit + 1) % num_units for unit in range(num_units)}
        self._after_pair: dict[tuple[int, int], int] = {}
        self._last: tuple[int, int] | None = None
        self._current: int | None = None

    def note(self, unit: int) -> None:
        """`unit` is used now."""
        if self._current is not None:
            self._after[self._current] = unit
            if self._last is not None:
                self._after_pair[self._last] = unit
            self._last = (self._current, unit)
        self._current = unit

    def ahead(self, after: Sequence[int] = ()) -> Iterator[int]:
        """What comes next, without end; `after`: what is already expected to come first."""
        recent = [unit for unit in (*(self._last or (self._current,)), *after[-2:]) if unit is not None][-2:]
        if not recent:
            return
        while True:
            unit = self._after_pair.get((recent[0], recent[-1])) if len(recent) == 2 else None
            if unit is None:
                unit = self._after[recent[-1]]
            yield unit
            recent = [recent[-1], unit]


# Linux 5.14 and 5.4; Python's mmap module does not name them.
_MADV_POPULATE_READ = 22
_MADV_PAGEOUT = 21
_STEP = 8 << 20


@cache
def _libc() -> Any:
    """The C library; its calls run without Python's lock. None where it has not what is needed here."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The whole pages a tensor touches: address and length."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def share_resident(tensor: torch.Tensor) -> float | None:
    """The share of a tensor's pages that are in memory, 0 to 1; None where the system does not say."""
    libc = _libc()
    if libc is None or not tensor.numel():
        return None
    start, length = _range(tensor)
    pages = ctypes.create_string_buffer(length // mmap.PAGESIZE)
    if libc.mincore(start, length, pages):
        return None
    # The lowest bit says it; the others are reserved.
    return sum(map((1).__and__, pages.raw)) / len(pages.raw) if pages.raw.strip(b"\1") else 1.0


def is_resident(tensor: torch.Tensor) -> bool:
    """Is every page of the tensor in memory? False where the system does not say."""
    return not tensor.numel() or share_resident(tensor) == 1.0


def bring_in(tensor: torch.Tensor) -> None:
    """Read a tensor's pages from its file, in order, and map them; returns when they are there. Other threads run meanwhile."""
    libc = _libc()
    start, length = _range(tensor)
    for offset in range(0, length, _STEP):
        if libc is None or libc.madvise(start + offset, min(_STEP, length - offset), _MADV_POPULATE_READ):
            _touch(tensor, offset)


def _touch(tensor: torch.Tensor, offset: int) -> None:
    """Read a byte of every page: slower, and does on any system."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[offset : offset + _STEP : mmap.PAGESIZE].sum()


def give_back(tensor: torch.Tensor) -> None:
    """Tell the kernel that the tensor's pages are not needed soon. Its values stay: pages changed in memory are kept."""
    libc = _libc()
    # Whole pages of its own only: those at its ends also hold its neighbours.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and end > start:
        libc.madvise(start, end - start, _MADV_PAGEOUT)


@dataclass
class ReadTraffic:
    """What moved, and how long it took.

    Attributes:
        num_bytes: moved so far, or on their way.
        timed_bytes: those of them of which it is known how long they took.
        seconds: the moving of these itself took.
        waited: seconds that the thread which computes stood still for it.
    """

    num_bytes: int = 0
    timed_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes have moved, in so many seconds."""
        self.num_bytes += num_bytes
        self.time(num_bytes, seconds)

    def time(self, num_bytes: int, seconds: float) -> None:
        """So many of the bytes that are counted already took so many seconds."""
        self.timed_bytes += num_bytes
        self.seconds += seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second while something moved; None before anything did."""
        return self.timed_bytes / self.seconds if self.seconds > 0 else None


class UnitReader:
    """What brings the weights of a model's units in ahead of their use, in an order that is learnt.

    Args:
        units: the tensors of each unit.
        window: bytes to bring in ahead of use, unless one unit alone is larger.
    """

    _NOT_COPIED: tuple[str, ...] = ()
    """What a copy of the model makes anew: threads, and what is under way."""

    def __init__(self, units: list[list[TensorLocation]], window: int) -> None:
        self._units = units
        self._sizes = [sum(p.tensor.numel() * p.tensor.element_size() for p in unit) for unit in units]
        self.window = max(window, *self._sizes, 1)
        self.order = ReadOrder(len(units))

    def _reset(self) -> None:
        """Begin with nothing under way."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self._sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The modules are being copied as well, and may not hold their tensors yet.
        self.__dict__.update(state)
        self._reset()


class ReadAhead(UnitReader):
    """Weights in mapped files, used where they lie; a thread reads ahead of the computation, in the order of use.

    Nothing is copied: the memory that this takes is the page cache, which the kernel has back whenever it needs it.
    Where the weights exceed `budget`, the first of them stay and those after them are given back after use, since the
    kernel's own choice, the least recently used, is in a loop the one that is needed next.

    Args:
        units: the tensors that are used together, unit by unit, in the order of registration.
        window: bytes to read ahead.
        budget: bytes of page cache to fill.
    """

    _NOT_COPIED = ("_changed", "_thread", "_wanted", "_ready", "_used")

    def __init__(self, units: list[list[TensorLocation]], window: int, budget: int) -> None:
        super().__init__(units, window)
        self._kept = _kept(self._sizes, budget - 2 * self.window) if sum(self._sizes) > budget else None
        self.traffic = ReadTraffic()
        self._previous: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._wanted: deque[int] = deque()
        self._room = self.window
        self._ready: set[int] = set()
        self._used: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def enter(self, unit: int) -> None:
        """The computation comes to `unit`: wait until it is in memory, and have the next ones read."""
        if self._process != os.getpid():
            self._reset()  # a forked child has no reader
        with self._changed:
            self.order.note(unit)
            self._expect(unit)
            if not all(is_resident(place.tensor) for place in self._units[unit]):
                if unit in self._ready:
                    self._ready.clear()  # the kernel has taken back what was read ahead
                self._wait_for(unit)
            self._ready.discard(unit)
            if self._kept is not None and self._previous not in (None, unit):
                self._used.append(self._previous)
            self._previous = unit
            if self._next() is not None:
                self._start()
                self._changed.notify_all()

    def _expect(self, unit: int) -> None:
        """Move the window on: `unit` leaves it, and as many bytes come in at its end."""
        if self._wanted and self._wanted[0] == unit:
            self._room += self._sizes[self._wanted.popleft()]
        else:
            self._wanted.clear()
            self._room = self.window
        expected = set(self._wanted)
        for following in self.order.ahead(list(self._wanted)[-2:]):
            if following == unit or following in expected or self._sizes[following] > self._room:
                break
            self._wanted.append(following)
            expected.add(following)
            self._room -= self._sizes[following]
        self._ready &= expected | {unit}

    def _wait_for(self, unit: int) -> None:
        start = time.perf_counter()
        self._wanted.appendleft(unit)
        self._start()
        self._changed.notify_all()
        # The reader reads in order at the full speed of the disk; faults on the same pages would only disturb it.
        while unit not in self._ready and self._thread is not None and self._thread.is_alive():
            self._changed.wait(timeout=1.0)
        if self._wanted and self._wanted[0] == unit:
            self._wanted.popleft()
        self.traffic.waited += time.perf_counter() - start

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # The thread must not keep the model alive: it holds this object only while it works.
            name = "headway-read-ahead"
            self._thread = threading.Thread(
                target=_read, args=(weakref.ref(self), self._changed), name=name, daemon=True
            )
            self._thread.start()

    def _next(self) -> tuple[int, bool] | None:
        """(unit, is it to be read?) or None where there is nothing to do. Called with the lock held."""
        for unit in self._wanted:
            if unit not in self._ready:
                return unit, True
        return (self._used.popleft(), False) if self._used else None

    def _work(self, unit: int, is_read: bool) -> None:
        """Bring a unit in, or give it back. Called without the lock."""
        tensors = [place.tensor for place in self._units[unit]]
        if not is_read:
            if self._kept is not None and unit not in self._kept and unit not in self._ready:
                for tensor in tensors:
                    give_back(tensor)
            return
        for tensor in tensors:
            if not is_resident(tensor):
                start = time.perf_counter()
                bring_in(tensor)
                self.traffic.note(tensor.nbytes, time.perf_counter() - start)
        with self._changed:
            if unit in self._wanted:
                self._ready.add(unit)
            self._changed.notify_all()


def _kept(sizes: list[int], budget: int) -> set[int]:
    kept = set()
    for unit, size in enumerate(sizes):
        budget -= size
        if budget < 0:
            break
        kept.add(unit)
    return kept


def _read(reference: "weakref.ref[ReadAhead]", changed: threading.Condition) -> None:
    """The reader's loop; ends when the model is gone."""
    while True:
        ahead = reference()
        if ahead is None:
            return
        with changed:
            task = ahead._next()
            if task is None:
                del ahead
                # Notified by the next use; now and then it looks whether the model is still there.
                changed.wait(timeout=5.0)
                continue
        ahead._work(*task)
        del ahead
