"""What a rank writes: its boxes of sharded tensors, and its part in host memory where a save runs behind the loop.

What a rank writes of tensors that are sharded across ranks, and what the manifest says about them.

How a DTensor is cut follows from its placements: every rank knows the whole grid, and rank 0 needs no list of boxes from the
others, only that they found the same (a hash). Of other pieces each rank knows its own boxes, and lists them.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.checkpoint.format.chunks import ChunkGrid, TensorChunk, file_of
from headway.checkpoint.format.manifest import TensorEntry
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime import transfers
from headway.runtime.transfers import CopyStream, StreamPoint, arenas
from headway.weights.pieces import ShardPiece, TensorSplit
from headway.weights.shards import bits, dtype_name

log = get_logger(__name__)

_UNLIMITED = 1 << 62
_Key = tuple[str, int]
"""A tensor's name, and the number of its box."""


class SteadyTensors:
    """Tensors of the host that are read behind the loop, while nothing should change them.

    Torch counts the changes of a tensor in place, but for those through `.data`.

    Args:
        tensors: what is read.
    """

    def __init__(self, tensors: Mapping[_Key, torch.Tensor]) -> None:
        self._tensors = [(name, tensor, tensor._version) for (name, _), tensor in tensors.items()]

    def confirm(self) -> None:
        """They are as they were.

        Raises:
            CheckpointError: naming the first that is not.
        """
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise CheckpointError(
                    f"{name} was changed while it was saved, and not by an optimizer of this Accelerator; nothing was saved"
                )


class OverlappedCopy:
    """Copies from host to host, made by the thread of a save beside the loop's next forward and backward, or by whoever comes first.

    Args:
        pairs: (where to, where from).
        steady: those that are copied.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], steady: SteadyTensors) -> None:
        self._pairs = list(pairs)
        self._steady = steady
        self._lock = threading.Lock()
        self._failure: CheckpointError | None = None

    def settle(self) -> None:
        """They are made when this returns."""
        with self._lock:
            if not self._pairs:
                return
            for target, source in self._pairs:
                bits(target).copy_(bits(source))
            self._pairs.clear()
            try:
                self._steady.confirm()
            except CheckpointError as error:
                self._failure = error

    def wait(self) -> None:
        """The same, for who writes them.

        Raises:
            CheckpointError: a tensor had changed meanwhile.
        """
        self.settle()
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True)
class QueuedCopy:
    """Copies from a device in a queue of their own.

    Attributes:
        done: where they end.
        device: the device.
        sources: what is copied, which must not be freed before.
    """

    done: StreamPoint
    device: torch.device
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Hold the calling thread until they are made."""
        self.done.wait()

    def settle(self) -> None:
        """Let what the device computes from now on wait for them; the host goes on."""
        torch.accelerator.current_stream(self.device).wait_event(self.done.event)


SavePoint = StreamPoint | OverlappedCopy | QueuedCopy
"""What a save waits for."""


@dataclass(frozen=True)
class StateSnapshot:
    """A snapshot.

    Attributes:
        tensors: copies on the host; tensors without memory (meta) stand for those of other ranks, and for their boxes.
        arrivals: the copies are complete when every device has come to its point.
        steady: what was not copied.
    """

    tensors: dict[str, torch.Tensor | ShardPiece]
    arrivals: tuple[SavePoint, ...]
    steady: SteadyTensors


class HostCopies:
    """Copies of tensors in host memory, which is kept and used again by the next save of the same shapes.

    Args:
        mark: how far a device's queue has come.
        allocate: gives so many bytes that a device can write to by itself, as uint8, or raises RuntimeError.
    """

    def __init__(
        self,
        mark: Callable[[torch.device], StreamPoint] = transfers.point,
        allocate: Callable[[int], torch.Tensor] = transfers.pinned,
    ) -> None:
        self._mark = mark
        self._allocate = allocate
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._under_way: list[OverlappedCopy | QueuedCopy] = []
        self._streams: dict[torch.device, CopyStream] = {}

    def settle(self) -> None:
        """Before something changes what `overlap` copies: wait for it, on the host or in the device's queue."""
        while self._under_way:
            self._under_way.pop().settle()

    def overlap(
        self, tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str], steady: Container[str]
    ) -> StateSnapshot:
        """As `take`, but `steady` ones are copied beside what follows, until `settle`.

        The thread that waits for the snapshot's arrivals does it, or the device in a queue of its own.
        """
        self.settle()
        own = {key: tensor.detach() for key, tensor in _written(tensors, names)}
        later = {key: each for key, each in own.items() if key[0] in steady and not each.is_inference()}
        buffers = self._room_for(own)
        now = {key: each for key, each in own.items() if key not in later}
        arrivals: list[SavePoint] = [*self._queue(now, buffers)]
        for device in dict.fromkeys(each.device for each in later.values()):
            here = {key: each for key, each in later.items() if each.device == device}
            pairs = [(buffers[key], each) for key, each in here.items()]
            copy = OverlappedCopy(pairs, SteadyTensors(here)) if device.type == "cpu" else self._aside(device, pairs)
            arrivals.append(copy)
            self._under_way.append(copy)
        taken = {name: _taken(name, each, buffers) for name, each in tensors.items()}
        return StateSnapshot(taken, tuple(arrivals), SteadyTensors({}))

    def _aside(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> QueuedCopy:
        stream = self._streams.setdefault(device, CopyStream(device))
        stream.begin(stream.here())
        for target, source in pairs:
            stream.copy(bits(target), bits(source))
        return QueuedCopy(stream.end(), device, tuple(source for _, source in pairs))

    def take(
        self, tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str], steady: Container[str] = ()
    ) -> StateSnapshot:
        """Copy those of the names, and of pieces the boxes that this rank writes; on the host, `steady` ones are left where they are.

        On every device that holds any, the copies are queued, and not waited for.
        Whatever changes a tensor later is queued behind its copy, on the stream that is current now for its device.
        """
        written = {key: tensor.detach() for key, tensor in _written(tensors, names)}
        kept = {key: each for key, each in written.items() if key[0] in steady and _is_countable(each)}
        own = {key: each for key, each in written.items() if key not in kept}
        buffers = self._room_for(own)
        arrivals = self._queue(own, buffers)
        found = {**buffers, **kept}
        taken = {name: _taken(name, each, found) for name, each in tensors.items()}
        return StateSnapshot(taken, arrivals, SteadyTensors(kept))

    def _queue(self, own: Mapping[_Key, torch.Tensor], buffers: Mapping[_Key, torch.Tensor]) -> tuple[StreamPoint, ...]:
        for key, tensor in own.items():
            bits(buffers[key]).copy_(bits(tensor), non_blocking=True)
        devices = dict.fromkeys(tensor.device for tensor in own.values() if tensor.device.type != "cpu")
        return tuple(point for device in devices if (point := self._arrival(device)) is not None)

    def _arrival(self, device: torch.device) -> StreamPoint | None:
        try:
            return self._mark(device)
        except NotImplementedError:  # a backend without events is waited for here
            torch.accelerator.synchronize(device)
            return None

    def _room_for(self, own: Mapping[_Key, torch.Tensor]) -> dict[_Key, torch.Tensor]:
        """Memory for each of them: the former where it fits; else new, for a device's pinned, and the former goes first."""
        if self._buffers.keys() == own.keys() and all(
            (self._buffers[key].shape, self._buffers[key].dtype) == (each.shape, each.dtype)
            for key, each in own.items()
        ):
            return self._buffers
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


def _is_countable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_inference()


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


def pattern_of(name: str) -> str:
    """The files that a tensor of that name lies in, with `*` for the number of the part."""
    return f"{name.split('/', 1)[0]}-*.safetensors"


def own_part(tensors: Mapping[str, Any], part: int) -> tuple[dict[str, list[tuple[str, torch.Tensor]]], dict[str, Any]]:
    """One rank's part of what is spread: what it writes, by file (key, values); and what rank 0 must know of it, as JSON.

    Args:
        tensors: the state; plain tensors are none of it.
        part: this rank's number.

    Raises:
        CheckpointError: a tensor does not lie here as its placements say.
    """
    files: dict[str, list[tuple[str, torch.Tensor]]] = {}
    listed: dict[str, list[list[Any]]] = {}
    for name, piece in _pieces(tensors).items():
        file = file_of(pattern_of(name), part)
        own = [box for box in piece.boxes if box.is_written and box.values.numel()]
        if piece.split is not None:
            keys = {chunk.offsets: chunk.key for chunk in _own_chunks(name, piece.split, tensors, file, part)}
            if keys.keys() != {box.offsets for box in own}:
                raise CheckpointError(f"{name} is laid out on this rank differently from its placements")
            values = [(keys[box.offsets], box.values) for box in own]
        else:
            values = [(_key(name, number, tensors), box.values) for number, box in enumerate(own)]
            listed[name] = [[box.offsets, tuple(box.values.shape), file, key] for box, (key, _) in zip(own, values)]
        if values:
            files.setdefault(file, []).extend(values)
    return files, {"grids": _digest(tensors), "boxes": listed}


def _pieces(tensors: Mapping[str, Any]) -> dict[str, ShardPiece]:
    return {name: each for name, each in tensors.items() if isinstance(each, ShardPiece)}


def _own_chunks(name: str, split: TensorSplit, tensors: Mapping[str, Any], file: str, part: int) -> list[TensorChunk]:
    if _is_regular(split):
        number = split.numbers.get(part)
        return [] if number is None else [_grid(name, split)[number]]
    return [chunk for chunk in _chunks(name, split, tensors) if chunk.file == file]


def _is_regular(split: TensorSplit) -> bool:
    """Does each rank write one box at the most?"""
    return len(split.numbers) == len(split.writers)


def _grid(name: str, split: TensorSplit) -> ChunkGrid:
    return ChunkGrid(name, split.rows, pattern_of(name), split.steps)


def _chunks(name: str, split: TensorSplit, tensors: Mapping[str, Any]) -> Iterator[TensorChunk]:
    """The boxes of a tensor of which a rank writes several."""
    for number, (writer, offsets, shape) in enumerate(split.boxes()):
        yield TensorChunk(offsets, shape, file_of(pattern_of(name), writer), _key(name, number, tensors))


def _key(name: str, number: int, tensors: Mapping[str, Any]) -> str:
    """Under which a box lies in a file: no tensor has that name."""
    key = f"{name}@{number}"
    while key in tensors:
        key += "@"
    return key


def _entry(name: str, piece: ShardPiece, split: TensorSplit, tensors: Mapping[str, Any]) -> TensorEntry:
    chunks = _grid(name, split) if _is_regular(split) else tuple(_chunks(name, split, tensors))
    return TensorEntry(piece.shape, dtype_name(piece.dtype), chunks)


def _digest(tensors: Mapping[str, Any]) -> str:
    found = {
        name: _entry(name, each, each.split, tensors).encode()
        for name, each in _pieces(tensors).items()
        if each.split is not None
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def entries(tensors: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """The manifest's entries of what is spread.

    Args:
        tensors: the state, as the rank that commits has it.
        told: what each part says.

    Raises:
        CheckpointError: ranks hold different states.
    """
    differing = [part for part, each in enumerate(told) if each["grids"] != told[0]["grids"]]
    if differing:
        raise CheckpointError(
            f"rank {differing[0]} has different sharded tensors or placements than rank 0: a checkpoint needs the same model "
            "and optimizer, sharded in the same way, on every rank"
        )
    listed: dict[str, list[TensorChunk]] = {}
    for each in told:
        for name, boxes in each["boxes"].items():
            chunks = [TensorChunk(tuple(offsets), tuple(shape), file, key) for offsets, shape, file, key in boxes]
            listed.setdefault(name, []).extend(chunks)
    return {
        name: _entry(name, piece, piece.split, tensors)
        if piece.split is not None
        else TensorEntry(piece.shape, dtype_name(piece.dtype), tuple(listed.get(name, ())))
        for name, piece in _pieces(tensors).items()
    }
