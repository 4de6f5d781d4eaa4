"""What a save behind the loop writes: this rank's part of the state in host memory, which later saves use again."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from headway.log import get_logger
from headway.runtime import side_streams
from headway.runtime.arenas import arenas
from headway.runtime.side_streams import StreamPoint
from headway.weights.pieces import ShardPiece
from headway.weights.shards import bits

log = get_logger(__name__)

_UNLIMITED = 1 << 62
_Key = tuple[str, int]
"""A tensor's name, and the number of its box."""


@dataclass(frozen=True)
class StateSnapshot:
    """A snapshot.

    Attributes:
        tensors: copies on the host; tensors without memory (meta) stand for those of other ranks, and for their boxes.
        arrivals: the copies are complete when every device has come to its point.
    """

    tensors: dict[str, torch.Tensor | ShardPiece]
    arrivals: tuple[StreamPoint, ...]


class HostCopies:
    """Copies of tensors in host memory, which is kept and used again by the next save of the same shapes.

    Args:
        mark: how far a device's queue has come.
        allocate: gives so many bytes that a device can write to by itself, as uint8, or raises RuntimeError.
    """

    def __init__(
        self,
        mark: Callable[[torch.device], StreamPoint] = side_streams.point,
        allocate: Callable[[int], torch.Tensor] = side_streams.pinned,
    ) -> None:
        self._mark = mark
        self._allocate = allocate
        self._buffers: dict[_Key, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str]) -> StateSnapshot:
        """Copy those of the names, and of pieces the boxes that this rank writes.

        On every device that holds any, the copies are queued, and not waited for.
        Whatever changes a tensor later is queued behind its copy, on the stream that is current now for its device.
        """
        own = {key: tensor.detach() for key, tensor in _written(tensors, names)}
        buffers = self._buffers if self._fit(own) else self._make(own)
        for key, tensor in own.items():
            bits(buffers[key]).copy_(bits(tensor), non_blocking=True)
        devices = dict.fromkeys(tensor.device for tensor in own.values() if tensor.device.type != "cpu")
        arrivals = tuple(point for device in devices if (point := self._arrival(device)) is not None)
        return StateSnapshot({name: _taken(name, each, buffers) for name, each in tensors.items()}, arrivals)

    def _arrival(self, device: torch.device) -> StreamPoint | None:
        try:
            return self._mark(device)
        except NotImplementedError:  # a backend without events is waited for here
            torch.accelerator.synchronize(device)
            return None

    def _fit(self, own: Mapping[_Key, torch.Tensor]) -> bool:
        found = self._buffers
        return found.keys() == own.keys() and all(
            found[name].shape == tensor.shape and found[name].dtype == tensor.dtype for name, tensor in own.items()
        )

    def _make(self, own: Mapping[_Key, torch.Tensor]) -> dict[_Key, torch.Tensor]:
        """Memory for each of them: for a device's, pinned; the former memory goes first."""
        self._buffers = {}
        made: dict[_Key, torch.Tensor] = {}
        on_device = [(name, each) for name, each in own.items() if each.device.type != "cpu"]
        for num_bytes, part in arenas([each.nbytes for _, each in on_device], _UNLIMITED):
            try:
                arena = self._allocate(num_bytes)
            except RuntimeError as error:
                log.warning_once(
                    "memory for background saves could not be pinned (%s): the loop waits for copies to pageable memory",
                    error,
                )
                break
            for index, start in part:
                name, tensor = on_device[index]
                piece = arena[start : start + tensor.nbytes]
                made[name] = piece.view(tensor.dtype).view(tensor.shape)
        for name, tensor in own.items():
            if name not in made:
                made[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._buffers = made
        return made


def _written(
    tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str]
) -> Iterator[tuple[_Key, torch.Tensor]]:
    for name, each in tensors.items():
        if isinstance(each, ShardPiece):
            yield from (((name, i), box.values) for i, box in enumerate(each.boxes) if box.is_written)
        elif name in names:
            yield (name, 0), each


def _taken(
    name: str, each: torch.Tensor | ShardPiece, buffers: Mapping[_Key, torch.Tensor]
) -> torch.Tensor | ShardPiece:
    if not isinstance(each, ShardPiece):
        return buffers[name, 0] if (name, 0) in buffers else _without_memory(each)
    boxes = tuple(
        replace(box, values=buffers[name, i] if box.is_written else _without_memory(box.values))
        for i, box in enumerate(each.boxes)
    )
    return replace(each, boxes=boxes, local=None)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
