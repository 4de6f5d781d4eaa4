"""Reading ahead on the CPU: a thread brings the pages of the next weights in while the present ones compute."""

import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from headway.bigmodel.names import Place
from headway.bigmodel.order import Order
from headway.bigmodel.pages import bring_in, give_back, is_resident


@dataclass
class Traffic:
    """What moved, and how long it took.

    Attributes:
        num_bytes: moved so far.
        seconds: the moving itself took.
        waited: seconds that the computation stood still for it.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0


class ReadAhead:
    """Weights in mapped files, used where they lie; a thread reads ahead of the computation, in the order of use.

    Nothing is copied: the memory that this takes is the page cache, which the kernel has back whenever it needs it.
    Where the weights exceed `budget`, the first of them stay and those after them are given back after use, since the
    kernel's own choice, the least recently used, is in a loop the one that is needed next.

    Args:
        units: the tensors that are used together, unit by unit, in the order of registration.
        window: bytes to read ahead.
        budget: bytes of page cache to fill.
    """

    def __init__(self, units: list[list[Place]], window: int, budget: int) -> None:
        self._units = units
        self._sizes = [sum(p.tensor.numel() * p.tensor.element_size() for p in unit) for unit in units]
        self.window = max(window, *self._sizes, 1)
        self._kept = _kept(self._sizes, budget - 2 * self.window) if sum(self._sizes) > budget else None
        self.order = Order(len(units))
        self.traffic = Traffic()
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all units."""
        return sum(self._sizes)

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
                self.traffic.seconds += time.perf_counter() - start
                self.traffic.num_bytes += tensor.numel() * tensor.element_size()
        with self._changed:
            if unit in self._wanted:
                self._ready.add(unit)
            self._changed.notify_all()

    def __getstate__(self) -> dict[str, Any]:
        """Without the thread: a copy of the model starts its own."""
        dropped = ("_changed", "_thread", "_wanted", "_ready", "_used")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


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
