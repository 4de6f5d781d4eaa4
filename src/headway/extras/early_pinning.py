"""Pin host memory for background saves during the first updates, so that the first save does not wait for pinning."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from headway.core.checkpoint.state import StatefulObjects
from headway.core.weights.dtensor_boxes import list_own_boxes
from headway.core.weights.pieces import is_sharded


class EarlyPinning:
    """Hook that runs before each optimizer step, and pins host memory once the optimizer state exists.

    Args:
        list_objects: Function that returns the objects that the saves will contain.
        num_parts: Number of ranks among which the saving of unsharded tensors is divided.
        start_pinning: Function that starts to pin the given number of bytes of host memory in the background.
    """

    def __init__(
        self, list_objects: Callable[[], StatefulObjects], num_parts: int, start_pinning: Callable[[int], None]
    ) -> None:
        self._list_objects = list_objects
        self._num_parts = num_parts
        self._start_pinning = start_pinning
        self._num_calls = 0

    def __call__(self) -> None:
        """Count an optimizer step, and start to pin memory at the second one.

        The first step creates the optimizer state, whose size must be known.
        """
        self._num_calls += 1
        if self._num_calls == 2:
            self._start_pinning(self.measure_bytes())

    def measure_bytes(self) -> int:
        """Return the number of bytes that this rank will copy from devices in a save. No user code is run."""
        unsharded_bytes = sharded_bytes = 0
        for value in self._iterate_values():
            if is_sharded(value):
                sharded_bytes += sum(box.nbytes for _, box in list_own_boxes(value) if box.device.type != "cpu")
            elif isinstance(value, torch.Tensor) and value.device.type != "cpu":
                unsharded_bytes += value.nbytes
        return sharded_bytes + unsharded_bytes // self._num_parts

    def _iterate_values(self) -> Iterator[Any]:
        """Yield the parameters, buffers and optimizer state values of the objects that saves will contain."""
        objects = self._list_objects()
        for model in objects.models:
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in objects.optimizers:
            for state in optimizer.state.values():
                yield from state.values() if isinstance(state, dict) else ()
