"""Compares the allocator model with the allocator's own record: it replays `torch.cuda.memory._snapshot()`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError
from headway.forecasting.device.allocator import Allocator, round_to_block

_RESERVING_ACTIONS = ("segment_alloc", "segment_map")
_RETURNING_ACTIONS = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Comparison:
    """Peaks of the recorded requests, and of the same requests in the allocator model; in bytes.

    Attributes:
        allocated: Recorded peak of allocated memory.
        reserved: Recorded peak of memory reserved from the device.
        model_allocated: The model's peak of allocated memory.
        model_reserved: The model's peak of reserved memory.
        num_events: Number of allocations and frees that were replayed.
        unknown: Number of frees of memory that was allocated before the record began. If not 0, the comparison is not fair.
    """

    allocated: int
    reserved: int
    model_allocated: int
    model_reserved: int
    num_events: int
    unknown: int

    @property
    def error(self) -> float:
        """Relative error of the model's reserved peak."""
        return (self.model_reserved - self.reserved) / self.reserved if self.reserved else 0.0


def compare_with_model(snapshot: Mapping[str, Any], device: int = 0, expandable: bool = False) -> Comparison:
    """Replay a device's recorded requests in the allocator model.

    The record must start before the first allocation, and have space for all events::

        torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python", context=None)
        ...  # the run
        comparison = compare_with_model(torch.cuda.memory._snapshot())

    Args:
        snapshot: Result of `torch.cuda.memory._snapshot()`.
        device: Index of the device.
        expandable: Whether the run used expandable segments.

    Raises:
        DataError: If the snapshot has no record of the device.
    """
    traces = snapshot.get("device_traces") or []
    if device >= len(traces) or not traces[device]:
        raise DataError(
            f"the snapshot has no record of device {device}; call torch.cuda.memory._record_memory_history() before the first "
            "tensor is created on it"
        )
    return _replay(traces[device], Allocator(expandable=expandable))


def _replay(entries: Iterable[Mapping[str, Any]], model: Allocator) -> Comparison:
    live: dict[int, int] = {}
    allocated = reserved = peak_allocated = peak_reserved = unknown = count = 0
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action in _RESERVING_ACTIONS:
            reserved += size
            peak_reserved = max(peak_reserved, reserved)
        elif action in _RETURNING_ACTIONS:
            reserved -= size
        elif action == "alloc":
            count += 1
            live[address] = round_to_block(size)
            allocated += live[address]
            peak_allocated = max(peak_allocated, allocated)
            model.allocate_memory(address, size, entry.get("stream", 0))
        elif action == "free_completed":
            count += 1
            unknown += address not in live
            allocated -= live.pop(address, 0)
            model.free_memory(address)
    return Comparison(peak_allocated, peak_reserved, model.peak_allocated, model.peak_reserved, count, unknown)
