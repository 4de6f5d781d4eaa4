"""The highest use of a device's memory, for several readers at once: the allocator has one counter, and resetting it is for all."""

import weakref

import torch

from headway.common import scope
from headway.runtime.device import Hardware


class _Readers(weakref.WeakSet["PeakReader"]):
    """All readers of this process that somebody still holds."""


class PeakReader:
    """The highest use of one device since this reader's own last reset.

    A reset takes the allocator's counter back for everybody, so what it held is noted for the other readers first. A script's
    own `torch.cuda.reset_peak_memory_stats()` is not seen here: readers then know what was used since it, and what they noted.

    Args:
        hardware: what kind of device.
        device: which one; without an index, the current one.
    """

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._tell, self._start_over = map(hardware.memory_ability, ("max_memory_allocated", "reset_peak_memory_stats"))
        current = hardware.ability("current_device")
        is_whole = device.index is not None or current is None
        self._device = device if is_whole or current is None else torch.device(device.type, current())
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
