"""The allocator model against a card's own record: `torch.cuda.memory._snapshot()` replayed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError
from headway.forecasting.device.allocator import Allocator, round_to_block

_TAKEN = ("segment_alloc", "segment_map")
_GIVEN = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Compared:
    """What the card recorded, and what the model says of the same requests; bytes.

    Attributes:
        allocated: the most in use, by the record.
        reserved: the most taken from the card, by the record.
        model_allocated: by the model.
        model_reserved: by the model.
        num_events: requests and returns that were replayed.
        unknown: returns of memory that was asked for before the record began; not 0: the comparison is not fair.
    """

    allocated: int
    reserved: int
    model_allocated: int
    model_reserved: int
    num_events: int
    unknown: int

    @property
    def error(self) -> float:
        """Of the model's reserved peak, as a share of the record's."""
        return (self.model_reserved - self.reserved) / self.reserved if self.reserved else 0.0


def compare(snapshot: Mapping[str, Any], device: int = 0, expandable: bool = False) -> Compared:
    """Replay what a card recorded.

    Record it from before the first allocation, with room for all of it::

        torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python", context=None)
        ...  # the run
        compared = compare(torch.cuda.memory._snapshot())

    Args:
        snapshot: what `torch.cuda.memory._snapshot()` returned.
        device: the index of the card.
        expandable: the run used expandable segments.

    Raises:
        DataError: it holds no record of that card.
    """
    traces = snapshot.get("device_traces") or []
    if device >= len(traces) or not traces[device]:
        raise DataError(
            f"the snapshot holds no record of card {device}; call torch.cuda.memory._record_memory_history() before the first "
            "tensor is made on it"
        )
    return _replayed(traces[device], Allocator(expandable=expandable))


def _replayed(entries: Iterable[Mapping[str, Any]], model: Allocator) -> Compared:
    live: dict[int, int] = {}
    held = taken = most_held = most_taken = unknown = count = 0
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action in _TAKEN:
            taken += size
            most_taken = max(most_taken, taken)
        elif action in _GIVEN:
            taken -= size
        elif action == "alloc":
            count += 1
            live[address] = round_to_block(size)
            held += live[address]
            most_held = max(most_held, held)
            model.allocate(address, size, entry.get("stream", 0))
        elif action == "free_completed":
            count += 1
            unknown += address not in live
            held -= live.pop(address, 0)
            model.free(address)
    return Compared(most_held, most_taken, model.peak_allocated, model.peak_reserved, count, unknown)
