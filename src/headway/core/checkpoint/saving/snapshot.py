"""The tensors that a rank writes in a save, copied to host memory if the save runs in the background.

A rank writes some of the unsharded tensors, and boxes of the sharded ones. A box is a rectangular block of a tensor.

The placements of a DTensor determine how it is split, so every rank knows the grid of all boxes. Therefore rank 0 needs
no list of boxes from other ranks. It only needs a hash, which shows that they have computed the same grid. For shards
that are not DTensors, each rank knows only its own boxes and sends a list of them.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.core.checkpoint import _torch
from headway.core.checkpoint.format.chunks import ChunkGrid, TensorChunk, make_file_name
from headway.core.checkpoint.format.manifest import TensorEntry
from headway.core.runtime import copy_stream, pinned_memory
from headway.core.runtime.copy_stream import CopyStream, StreamPoint
from headway.core.runtime.pinned_sizes import plan_arenas
from headway.core.weights.pieces import ShardPiece, TensorSplit
from headway.core.weights.shards import get_dtype_name, view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_UNLIMITED = 1 << 62
_Key = tuple[str, int]
"""Pair of (tensor name, index of a box of the tensor on this rank). The index is 0 for an unsharded tensor."""


class SteadyTensors:
    """Host tensors that must not change until a background save has read or copied them, with a check for changes.

    The check uses torch's count of in-place changes, which does not include changes through `.data`.

    Args:
        tensors: Tensors to check, by (name, index of the box).
    """

    def __init__(self, tensors: Mapping[_Key, torch.Tensor]) -> None:
        self._tensors = [(name, tensor, _torch.read_version(tensor)) for (name, _), tensor in tensors.items()]

    def ensure_unchanged(self) -> None:
        """Raise `CheckpointError` if any of the tensors has been changed since this object was created.

        Raises:
            CheckpointError: If a tensor has changed. The message names the first one.
        """
        for name, tensor, version in self._tensors:
            if _torch.read_version(tensor) != version:
                raise CheckpointError(
                    f"{name} was changed while it was saved, and not by an optimizer of this Accelerator; nothing was saved"
                )


class OverlappedCopy:
    """Copies between host tensors, made while the next forward and backward pass runs.

    The thread that writes the checkpoint makes them, unless another thread calls `protect_copies` first.

    Args:
        pairs: Pairs of (target, source).
        steady: The sources, with a check that they do not change before they have been copied.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], steady: SteadyTensors) -> None:
        self._pairs = list(pairs)
        self._steady = steady
        self._lock = threading.Lock()
        self._failure: CheckpointError | None = None

    def protect_copies(self) -> None:
        """Make the copies now if they have not been made yet. They are complete when this method returns.

        If a source was changed before this call, `wait` raises an error.
        """
        with self._lock:
            if not self._pairs:
                return
            for target, source in self._pairs:
                view_as_bits(target).copy_(view_as_bits(source))
            self._pairs.clear()
            try:
                self._steady.ensure_unchanged()
            except CheckpointError as error:
                self._failure = error

    def wait(self) -> None:
        """Make the copies now if they have not been made yet. Called by the thread that writes them to the disk.

        Raises:
            CheckpointError: If a tensor was changed before it was copied.
        """
        self.protect_copies()
        if self._failure is not None:
            raise self._failure


@dataclass(frozen=True)
class QueuedCopy:
    """Copies from a device to host memory that were queued on a separate stream.

    Attributes:
        done: Event at the end of the copies on that stream.
        device: Device that holds the sources.
        sources: Tensors that are copied. They must not be freed before the copies are complete.
    """

    done: StreamPoint
    device: torch.device
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Block the calling thread until the copies are complete."""
        self.done.wait()

    def protect_copies(self) -> None:
        """Make later work on the device's current stream wait for the copies, without blocking the host."""
        torch.accelerator.current_stream(self.device).wait_event(self.done.event)


SavePoint = StreamPoint | OverlappedCopy | QueuedCopy
"""Event or copy that a save waits for before it writes."""


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of the state in host memory, with the events to wait for until the copies are complete.

    Attributes:
        tensors: Copies on the host. Meta tensors represent tensors and shards that other ranks write.
        arrivals: Events and copies to wait for. The snapshot is complete once they have finished.
        steady: Tensors that were not copied, and must not change until they are written.
    """

    tensors: dict[str, torch.Tensor | ShardPiece]
    arrivals: tuple[SavePoint, ...]
    steady: SteadyTensors


class HostBuffers(Mapping[_Key, torch.Tensor]):
    """Host memory for copies of tensors. The memory is pinned for tensors that are on a device.

    Several threads pin it in large blocks (arenas). An access to a buffer waits only for the arena that contains it,
    so that copies begin while later arenas are still being pinned.

    Args:
        own: Tensors that will be copied, in the order of the copies.
        allocate: Function that returns pinned memory of a given number of bytes as uint8, or raises RuntimeError.
        reserved: Futures of arenas of `pinned_memory.MAX_ARENA_BYTES` bytes. They are used before new arenas are pinned, and
            removed from the list.
    """

    def __init__(
        self,
        own: Mapping[_Key, torch.Tensor],
        allocate: Callable[[int], torch.Tensor],
        reserved: list[Future[torch.Tensor]],
    ) -> None:
        self._kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in own.items()}
        on_device = [(key, tensor.nbytes) for key, tensor in own.items() if tensor.device.type != "cpu"]
        plan = list(plan_arenas([num_bytes for _, num_bytes in on_device], _UNLIMITED, pinned_memory.MAX_ARENA_BYTES))
        there = {
            number: reserved.pop(0)
            for number, (size, _) in enumerate(plan)
            if size == pinned_memory.MAX_ARENA_BYTES and reserved
        }
        rest = [number for number in range(len(plan)) if number not in there]
        made = pinned_memory.start_allocations([plan[number][0] for number in rest], allocate)
        self._arenas = there | dict(zip(rest, made))
        self._places = {
            on_device[index][0]: (number, start) for number, (_, part) in enumerate(plan) for index, start in part
        }
        self._made: dict[_Key, torch.Tensor] = {}

    def has_layout_of(self, own: Mapping[_Key, torch.Tensor]) -> bool:
        """Whether the buffers have exactly the names, shapes and dtypes of the given tensors."""
        return self._kinds == {key: (tensor.shape, tensor.dtype) for key, tensor in own.items()}

    def __getitem__(self, key: _Key) -> torch.Tensor:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._allocate_buffer(key)
        return found

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def _allocate_buffer(self, key: _Key) -> torch.Tensor:
        shape, dtype = self._kinds[key]
        if key in self._places:
            number, start = self._places[key]
            try:
                arena = self._arenas[number].result()
            except RuntimeError as error:
                log.warning_once(
                    "memory for background saves could not be pinned (%s): the loop waits for copies to pageable memory",
                    error,
                )
            else:
                return arena[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype)


class HostCopies:
    """Copier of tensors to host memory.

    The memory is reused by the next save if shapes and dtypes are unchanged.

    Args:
        mark: Function that records an event on a device's stream and returns it.
        allocate: Function that returns pinned memory of a given number of bytes as uint8, or raises RuntimeError. It is
            called by several threads.
    """

    def __init__(
        self,
        mark: Callable[[torch.device], StreamPoint] = copy_stream.record_point,
        allocate: Callable[[int], torch.Tensor] = pinned_memory.allocate_arena,
    ) -> None:
        self._mark = mark
        self._allocate = allocate
        self._buffers: HostBuffers | None = None
        self._reserved: list[Future[torch.Tensor]] = []
        self._under_way: list[OverlappedCopy | QueuedCopy] = []
        self._streams: dict[torch.device, CopyStream] = {}

    def start_pinning(self, num_bytes: int) -> None:
        """Start to pin memory for the first copies, in the background. Later copies reuse it.

        Do nothing if memory has already been reserved, or copies have been made.

        Args:
            num_bytes: Number of bytes that will be copied from devices. Only whole blocks of `pinned_memory.MAX_ARENA_BYTES`
                bytes are pinned. The first copies pin the remainder.
        """
        if self._buffers is None and not self._reserved:
            sizes = [pinned_memory.MAX_ARENA_BYTES] * (num_bytes // pinned_memory.MAX_ARENA_BYTES)
            # Training continues meanwhile, so only a few threads are used.
            self._reserved = pinned_memory.start_allocations(sizes, self._allocate, max_threads=2)

    def protect_copies(self) -> None:
        """Ensure that later changes of the source tensors cannot affect the copies that `copy_overlapped` has started.

        Copies between host tensors are completed. The current stream of each device waits for copies from that device.
        This method must be called before the sources change.
        """
        while self._under_way:
            self._under_way.pop().protect_copies()

    def copy_overlapped(
        self, tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str], steady: Container[str]
    ) -> StateSnapshot:
        """Copy the tensors that this rank writes. Copies of tensors in `steady` overlap with later computation.

        Host tensors in `steady` are copied by the thread that waits for the snapshot's arrivals. Device tensors in
        `steady` are copied on a separate stream. `protect_copies` must be called before a tensor in `steady` changes. Other
        tensors, and inference tensors, are copied as in `copy_tensors`.

        Args:
            tensors: The state to save, by name.
            names: Names of the unsharded tensors that this rank writes.
            steady: Names of tensors that change only in an optimizer step.
        """
        self.protect_copies()
        own = {key: tensor.detach() for key, tensor in _iterate_written(tensors, names)}
        later = {key: each for key, each in own.items() if key[0] in steady and not each.is_inference()}
        buffers = self._room_for(own)
        now = {key: each for key, each in own.items() if key not in later}
        arrivals: list[SavePoint] = [*self._queue_copies(now, buffers)]
        for device in dict.fromkeys(each.device for each in later.values()):
            here = {key: each for key, each in later.items() if each.device == device}
            pairs = [(buffers[key], each) for key, each in here.items()]
            copy = (
                OverlappedCopy(pairs, SteadyTensors(here))
                if device.type == "cpu"
                else self._copy_on_side_stream(device, pairs)
            )
            arrivals.append(copy)
            self._under_way.append(copy)
        taken = {name: _replace_values(name, each, buffers) for name, each in tensors.items()}
        return StateSnapshot(taken, tuple(arrivals), SteadyTensors({}))

    def _copy_on_side_stream(
        self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> QueuedCopy:
        stream = self._streams.setdefault(device, CopyStream(device))
        stream.begin_copies(stream.record_position())
        for target, source in pairs:
            stream.copy(view_as_bits(target), view_as_bits(source))
        return QueuedCopy(stream.end_copies(), device, tuple(source for _, source in pairs))

    def copy_tensors(
        self, tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str], steady: Container[str] = ()
    ) -> StateSnapshot:
        """Copy the tensors that this rank writes: the unsharded tensors in `names`, and its shards of the others.

        Copies from devices are queued without waiting. Later changes of a tensor must be queued behind its copy, on
        the stream that is current for its device during this call.

        Args:
            tensors: The state to save, by name.
            names: Names of the unsharded tensors that this rank writes.
            steady: Names of tensors that do not change during the save. Those in host memory are not copied, except
                inference tensors, whose changes cannot be detected. Default: (), none.
        """
        written = {key: tensor.detach() for key, tensor in _iterate_written(tensors, names)}
        kept = {key: each for key, each in written.items() if key[0] in steady and _is_countable(each)}
        own = {key: each for key, each in written.items() if key not in kept}
        buffers = self._room_for(own)
        arrivals = self._queue_copies(own, buffers)
        found = {**buffers, **kept}
        taken = {name: _replace_values(name, each, found) for name, each in tensors.items()}
        return StateSnapshot(taken, arrivals, SteadyTensors(kept))

    def _queue_copies(
        self, own: Mapping[_Key, torch.Tensor], buffers: Mapping[_Key, torch.Tensor]
    ) -> tuple[StreamPoint, ...]:
        for key, tensor in own.items():
            view_as_bits(buffers[key]).copy_(view_as_bits(tensor), non_blocking=True)
        devices = dict.fromkeys(tensor.device for tensor in own.values() if tensor.device.type != "cpu")
        return tuple(point for device in devices if (point := self._record_arrival(device)) is not None)

    def _record_arrival(self, device: torch.device) -> StreamPoint | None:
        try:
            return self._mark(device)
        except NotImplementedError:  # this backend has no events: wait here
            torch.accelerator.synchronize(device)
            return None

    def _room_for(self, own: Mapping[_Key, torch.Tensor]) -> "HostBuffers":
        """Return host memory for each tensor, pinned for tensors on a device.

        The buffers of the previous save are used if they fit. Otherwise they are freed before new ones are allocated.
        """
        if self._buffers is None or not self._buffers.has_layout_of(own):
            self._buffers = None
            self._buffers = HostBuffers(own, self._allocate, self._reserved)
            self._reserved.clear()  # the rest would not be used by later saves either
        return self._buffers


def _is_countable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_inference()


def _iterate_written(
    tensors: Mapping[str, torch.Tensor | ShardPiece], names: Container[str]
) -> Iterator[tuple[_Key, torch.Tensor]]:
    for name, each in tensors.items():
        if isinstance(each, ShardPiece):
            yield from (((name, i), box.values) for i, box in enumerate(each.boxes) if box.is_written)
        elif name in names:
            yield (name, 0), each


def _replace_values(
    name: str, each: torch.Tensor | ShardPiece, buffers: Mapping[_Key, torch.Tensor]
) -> torch.Tensor | ShardPiece:
    """Return a tensor or `ShardPiece` with its values replaced by the buffers to which they were copied.

    Values that this rank does not write are replaced by meta tensors.

    Args:
        name: Name of the tensor.
        each: Tensor or `ShardPiece`.
        buffers: Copies by (name, index of the box).
    """
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
    """Return the name pattern of the files that hold a tensor.

    The pattern contains `*` in place of the part number of the writing rank.

    Args:
        name: Name of the tensor.
    """
    return f"{name.split('/', 1)[0]}-*.safetensors"


def own_part(tensors: Mapping[str, Any], part: int) -> tuple[dict[str, list[tuple[str, torch.Tensor]]], dict[str, Any]]:
    """Return the shards that this rank writes, and a JSON summary of them for the rank that commits.

    Args:
        tensors: The state to save, by name. Plain tensors are skipped.
        part: Number of the part of the checkpoint that this rank writes. The file names contain it.

    Returns:
        Pair of (mapping from each file name to pairs of (key, values), summary).

    Raises:
        CheckpointError: If the local layout of a tensor contradicts its placements.
    """
    files: dict[str, list[tuple[str, torch.Tensor]]] = {}
    listed: dict[str, list[list[Any]]] = {}
    for name, piece in _select_pieces(tensors).items():
        file = make_file_name(pattern_of(name), part)
        own = [box for box in piece.boxes if box.is_written and box.values.numel()]
        if piece.split is not None:
            keys = {chunk.offsets: chunk.key for chunk in _own_chunks(name, piece.split, tensors, file, part)}
            if keys.keys() != {box.offsets for box in own}:
                raise CheckpointError(f"{name} is laid out on this rank differently from its placements")
            values = [(keys[box.offsets], box.values) for box in own]
        else:
            values = [(_make_box_key(name, number, tensors), box.values) for number, box in enumerate(own)]
            listed[name] = [[box.offsets, tuple(box.values.shape), file, key] for box, (key, _) in zip(own, values)]
        if values:
            files.setdefault(file, []).extend(values)
    return files, {"grids": _compute_split_digest(tensors), "boxes": listed}


def _select_pieces(tensors: Mapping[str, Any]) -> dict[str, ShardPiece]:
    return {name: each for name, each in tensors.items() if isinstance(each, ShardPiece)}


def _own_chunks(name: str, split: TensorSplit, tensors: Mapping[str, Any], file: str, part: int) -> list[TensorChunk]:
    if _is_regular(split):
        number = split.numbers.get(part)
        return [] if number is None else [_make_grid(name, split)[number]]
    return [chunk for chunk in _make_chunks(name, split, tensors) if chunk.file == file]


def _is_regular(split: TensorSplit) -> bool:
    """Whether each rank writes at most one box (rectangular block) of a tensor.

    Args:
        split: How the tensor is split among the ranks.
    """
    return len(split.numbers) == len(split.writers)


def _make_grid(name: str, split: TensorSplit) -> ChunkGrid:
    return ChunkGrid(name, split.rows, pattern_of(name), split.steps)


def _make_chunks(name: str, split: TensorSplit, tensors: Mapping[str, Any]) -> Iterator[TensorChunk]:
    """Yield one chunk for each box (rectangular block) of a tensor of which some rank writes several boxes.

    A chunk describes the box, its file, and its key in the file.

    Args:
        name: Name of the tensor.
        split: How the tensor is split among the ranks.
        tensors: The state to save, by name. Keys of boxes must differ from these names.
    """
    for number, (writer, offsets, shape) in enumerate(split.iterate_boxes()):
        yield TensorChunk(
            offsets, shape, make_file_name(pattern_of(name), writer), _make_box_key(name, number, tensors)
        )


def _make_box_key(name: str, number: int, tensors: Mapping[str, Any]) -> str:
    """Return the key under which a file stores a box (rectangular block) of a tensor.

    The key differs from the names of all tensors.
    """
    key = f"{name}@{number}"
    while key in tensors:
        key += "@"
    return key


def _make_entry(name: str, piece: ShardPiece, split: TensorSplit, tensors: Mapping[str, Any]) -> TensorEntry:
    chunks = _make_grid(name, split) if _is_regular(split) else tuple(_make_chunks(name, split, tensors))
    return TensorEntry(piece.shape, get_dtype_name(piece.dtype), chunks)


def _compute_split_digest(tensors: Mapping[str, Any]) -> str:
    found = {
        name: _make_entry(name, each, each.split, tensors).encode()
        for name, each in _select_pieces(tensors).items()
        if each.split is not None
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def make_entries(tensors: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """Return the manifest's entries for the sharded tensors, by name.

    Args:
        tensors: The state to save, by name, on the rank that commits.
        told: JSON summaries that `own_part` has returned, one from each writing rank.

    Raises:
        CheckpointError: If ranks have different sharded tensors or placements.
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
        name: _make_entry(name, piece, piece.split, tensors)
        if piece.split is not None
        else TensorEntry(piece.shape, get_dtype_name(piece.dtype), tuple(listed.get(name, ())))
        for name, piece in _select_pieces(tensors).items()
    }
