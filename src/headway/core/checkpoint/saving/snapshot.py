"""Copy the tensors that a rank writes to host memory, so that a background save has a consistent state.

A rank writes some of the unsharded tensors, and boxes of the sharded ones (`file_plan`). A box is a rectangular block of
a tensor. The copies are complete once the save has waited for each `PendingCopy` of the snapshot.
"""

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from headway.core.checkpoint import _torch
from headway.core.runtime import copy_stream, pinned_memory
from headway.core.runtime.copy_stream import CopyStream, StreamPoint
from headway.core.runtime.pinned_sizes import plan_arenas
from headway.core.weights.pieces import ShardPiece
from headway.core.weights.tensor_bytes import view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_UNLIMITED = 1 << 62
"""Limit in bytes that no plan of pinned memory reaches."""
_Key = tuple[str, int]
"""Pair of (tensor name, index of a box of the tensor on this rank). The index is 0 for an unsharded tensor."""


class TensorVersions:
    """Recorded version counters of host tensors, which show whether a tensor has been changed since.

    A background save reads or copies these tensors later, so they must not change until then. torch's version counter
    increases with each in-place change, except for changes through `.data`.

    Args:
        tensors: Tensors to check, by (name, index of the box).
    """

    def __init__(self, tensors: Mapping[_Key, torch.Tensor]) -> None:
        self._versions = [(name, tensor, _torch.read_version(tensor)) for (name, _), tensor in tensors.items()]

    def ensure_unchanged(self) -> None:
        """Raise `CheckpointError` if any of the tensors has been changed since this object was created.

        Raises:
            CheckpointError: If a tensor has changed. The message names the first one.
        """
        for name, tensor, version in self._versions:
            if _torch.read_version(tensor) != version:
                raise CheckpointError(
                    f"{name} was changed while it was saved, and not by an optimizer of this Accelerator; nothing was saved"
                )


class OverlappedCopy:
    """Copies between host tensors, made while the next forward and backward pass runs.

    The thread that writes the checkpoint makes them, unless another thread calls `protect_copies` first.

    Args:
        pairs: Pairs of (target, source).
        versions: Version counters of the sources, which must not change before they have been copied.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], versions: TensorVersions) -> None:
        self._pairs = list(pairs)
        self._versions = versions
        self._lock = threading.Lock()
        self._failure: CheckpointError | None = None

    def protect_copies(self) -> None:
        """Make the copies now if they have not been made yet. They are complete when this method returns.

        If a source was changed before this call, this method raises no error, but `wait` does. So the save fails, and
        training continues.
        """
        with self._lock:
            if not self._pairs:
                return
            for target, source in self._pairs:
                view_as_bits(target).copy_(view_as_bits(source))
            self._pairs.clear()
            try:
                self._versions.ensure_unchanged()
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
        end: Event at the end of the copies on that stream.
        device: Device that holds the sources.
        sources: Tensors that are copied. They must not be freed before the copies are complete.
    """

    end: StreamPoint
    device: torch.device
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Block the calling thread until the copies are complete."""
        self.end.wait()

    def protect_copies(self) -> None:
        """Make later work on the device's current stream wait for the copies, without blocking the host."""
        torch.accelerator.current_stream(self.device).wait_event(self.end.event)


PendingCopy = StreamPoint | OverlappedCopy | QueuedCopy
"""Copies to host memory, or an event at their end. A save calls `wait` before it writes the copied tensors."""


@dataclass(frozen=True)
class StateSnapshot:
    """State in host memory, with the copies to wait for until it is complete.

    Attributes:
        tensors: Tensors that this rank writes, in host memory, by name. Meta tensors represent tensors and shards that
            other ranks write.
        pending_copies: Copies and events to wait for. The snapshot is complete once they have finished.
        uncopied_versions: Version counters of the tensors that were not copied. They must not change until they are
            written.
    """

    tensors: dict[str, torch.Tensor | ShardPiece]
    pending_copies: tuple[PendingCopy, ...]
    uncopied_versions: TensorVersions


class HostBuffers(Mapping[_Key, torch.Tensor]):
    """Host memory for copies of tensors. The memory is pinned for tensors that are on a device.

    Several threads pin it in large blocks (arenas). An access to a buffer waits only for the arena that contains it,
    so that copies begin while later arenas are still being pinned.

    Args:
        sources: Tensors that will be copied, in the order of the copies.
        allocate: Function that returns pinned memory of a given number of bytes as uint8, or raises RuntimeError.
        reserved: Futures of arenas of `pinned_memory.MAX_ARENA_BYTES` bytes. They are used before new arenas are pinned, and
            removed from the list.
    """

    def __init__(
        self,
        sources: Mapping[_Key, torch.Tensor],
        allocate: Callable[[int], torch.Tensor],
        reserved: list[Future[torch.Tensor]],
    ) -> None:
        self._layouts = {key: (tensor.shape, tensor.dtype) for key, tensor in sources.items()}
        on_device = [(key, tensor.nbytes) for key, tensor in sources.items() if tensor.device.type != "cpu"]
        plan = list(plan_arenas([num_bytes for _, num_bytes in on_device], _UNLIMITED, pinned_memory.MAX_ARENA_BYTES))
        reused = {
            number: reserved.pop(0)
            for number, (size, _) in enumerate(plan)
            if size == pinned_memory.MAX_ARENA_BYTES and reserved
        }
        missing = [number for number in range(len(plan)) if number not in reused]
        pinned = pinned_memory.start_allocations([plan[number][0] for number in missing], allocate)
        self._arenas = reused | dict(zip(missing, pinned))
        self._slots: dict[_Key, tuple[int, int]] = {}
        """Pair of (index of the arena, offset in the arena in bytes) for each tensor on a device."""
        for arena, (_, part) in enumerate(plan):
            for index, start in part:
                key, _ = on_device[index]
                self._slots[key] = (arena, start)
        self._buffers: dict[_Key, torch.Tensor] = {}

    def has_layout_of(self, tensors: Mapping[_Key, torch.Tensor]) -> bool:
        """Whether the buffers have exactly the names, shapes and dtypes of the given tensors."""
        return self._layouts == {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}

    def __getitem__(self, key: _Key) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._allocate_buffer(key)
        return buffer

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def _allocate_buffer(self, key: _Key) -> torch.Tensor:
        """Return memory for one tensor: a part of its arena, or unpinned memory for a host tensor or if pinning has failed."""
        shape, dtype = self._layouts[key]
        if key in self._slots:
            number, start = self._slots[key]
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
    """Copier of the tensors that this rank writes to host memory.

    The memory is reused by the next save if shapes and dtypes are unchanged.

    Args:
        record_event: Function that records an event on a device's current stream and returns it.
        allocate: Function that returns pinned memory of a given number of bytes as uint8, or raises RuntimeError. It is
            called by several threads.
    """

    def __init__(
        self,
        record_event: Callable[[torch.device], StreamPoint] = copy_stream.record_point,
        allocate: Callable[[int], torch.Tensor] = pinned_memory.allocate_arena,
    ) -> None:
        self._record_event = record_event
        self._allocate = allocate
        self._buffers: HostBuffers | None = None  # memory of the last copies, which the next ones use again
        self._reserved_arenas: list[Future[torch.Tensor]] = []  # pinned memory that `start_pinning` allocates
        self._overlapped_copies: list[OverlappedCopy | QueuedCopy] = []  # copies that are not protected yet
        self._streams: dict[torch.device, CopyStream] = {}

    def start_pinning(self, num_bytes: int) -> None:
        """Start to pin memory for the first copies, in the background. Later copies reuse it.

        Do nothing if memory has already been reserved, or copies have been made.

        Args:
            num_bytes: Number of bytes that will be copied from devices. Only whole blocks of `pinned_memory.MAX_ARENA_BYTES`
                bytes are pinned. The first copies pin the remainder.
        """
        if self._buffers is None and not self._reserved_arenas:
            sizes = [pinned_memory.MAX_ARENA_BYTES] * (num_bytes // pinned_memory.MAX_ARENA_BYTES)
            # Training continues meanwhile, so only a few threads are used.
            self._reserved_arenas = pinned_memory.start_allocations(sizes, self._allocate, max_threads=2)

    def protect_copies(self) -> None:
        """Ensure that later changes of the source tensors cannot affect the copies that `copy_overlapped` has started.

        Copies between host tensors are completed. The current stream of each device waits for copies from that device.
        This method must be called before the sources change.
        """
        while self._overlapped_copies:
            self._overlapped_copies.pop().protect_copies()

    def copy_overlapped(
        self,
        tensors: Mapping[str, torch.Tensor | ShardPiece],
        own_names: Container[str],
        deferrable_names: Container[str],
    ) -> StateSnapshot:
        """Copy the tensors that this rank writes. Deferrable copies overlap with the next forward and backward pass.

        Deferrable host tensors are copied by the thread that waits for the snapshot's pending copies. Deferrable device
        tensors are copied on a separate stream. `protect_copies` must be called before these tensors change. All other
        tensors, and inference tensors, are copied as in `copy_tensors`.

        Args:
            tensors: The state to save, by name.
            own_names: Names of the unsharded tensors that this rank writes.
            deferrable_names: Names of tensors that change only in an optimizer step.
        """
        self.protect_copies()
        sources = {key: tensor.detach() for key, tensor in _iterate_written(tensors, own_names)}
        # Inference tensors have no version counter, so a change during the save could not be detected.
        deferred = {
            key: each for key, each in sources.items() if key[0] in deferrable_names and not each.is_inference()
        }
        buffers = self._prepare_buffers(sources)
        immediate = {key: each for key, each in sources.items() if key not in deferred}
        pending: list[PendingCopy] = [*self._queue_copies(immediate, buffers)]
        for device in dict.fromkeys(each.device for each in deferred.values()):
            on_device = {key: each for key, each in deferred.items() if each.device == device}
            pairs = [(buffers[key], each) for key, each in on_device.items()]
            copy = (
                OverlappedCopy(pairs, TensorVersions(on_device))
                if device.type == "cpu"
                else self._copy_on_side_stream(device, pairs)
            )
            pending.append(copy)
            self._overlapped_copies.append(copy)
        copied = {name: _replace_values(name, each, buffers) for name, each in tensors.items()}
        return StateSnapshot(copied, tuple(pending), TensorVersions({}))

    def _copy_on_side_stream(
        self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> QueuedCopy:
        """Queue copies of tensors on a separate stream of their device, and return without waiting for them.

        Args:
            device: Device of the tensors.
            pairs: Pairs of (target, source).
        """
        stream = self._streams.setdefault(device, CopyStream(device))
        stream.begin_copies(stream.record_position())
        for target, source in pairs:
            stream.copy(view_as_bits(target), view_as_bits(source))
        return QueuedCopy(stream.end_copies(), device, tuple(source for _, source in pairs))

    def copy_tensors(
        self,
        tensors: Mapping[str, torch.Tensor | ShardPiece],
        own_names: Container[str],
        constant_names: Container[str] = (),
    ) -> StateSnapshot:
        """Copy the tensors that this rank writes: the unsharded tensors in `own_names`, and its shards of the others.

        Copies from devices are queued without waiting. Later changes of a tensor must be queued behind its copy, on
        the stream that is current for its device during this call.

        Args:
            tensors: The state to save, by name.
            own_names: Names of the unsharded tensors that this rank writes.
            constant_names: Names of tensors that do not change until the end of the save. Those in host memory are not
                copied, except inference tensors, whose changes cannot be detected. Default: (), none.
        """
        sources = {key: tensor.detach() for key, tensor in _iterate_written(tensors, own_names)}
        uncopied = {key: each for key, each in sources.items() if key[0] in constant_names and _can_stay_uncopied(each)}
        copied = {key: each for key, each in sources.items() if key not in uncopied}
        buffers = self._prepare_buffers(copied)
        pending = self._queue_copies(copied, buffers)
        values = {**buffers, **uncopied}
        snapshot = {name: _replace_values(name, each, values) for name, each in tensors.items()}
        return StateSnapshot(snapshot, pending, TensorVersions(uncopied))

    def _queue_copies(
        self, sources: Mapping[_Key, torch.Tensor], buffers: Mapping[_Key, torch.Tensor]
    ) -> tuple[StreamPoint, ...]:
        """Copy tensors into their buffers, and return an event at the end of the copies from each device."""
        for key, tensor in sources.items():
            view_as_bits(buffers[key]).copy_(view_as_bits(tensor), non_blocking=True)
        devices = dict.fromkeys(tensor.device for tensor in sources.values() if tensor.device.type != "cpu")
        return tuple(point for device in devices if (point := self._record_end(device)) is not None)

    def _record_end(self, device: torch.device) -> StreamPoint | None:
        """Record the current end of a device's work queue, to wait for it later.

        Return None if the device's backend has no events. This call then waits itself.
        """
        try:
            return self._record_event(device)
        except NotImplementedError:  # this backend has no events: wait here
            torch.accelerator.synchronize(device)
            return None

    def _prepare_buffers(self, sources: Mapping[_Key, torch.Tensor]) -> "HostBuffers":
        """Return host memory for each tensor, pinned for tensors on a device.

        The buffers of the previous save are used if they fit. Otherwise they are freed before new ones are allocated.
        """
        if self._buffers is None or not self._buffers.has_layout_of(sources):
            self._buffers = None
            self._buffers = HostBuffers(sources, self._allocate, self._reserved_arenas)
            self._reserved_arenas.clear()  # the rest would not be used by later saves either
        return self._buffers


def _can_stay_uncopied(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in host memory and has a version counter, which shows later changes."""
    return tensor.device.type == "cpu" and not tensor.is_inference()


def _iterate_written(
    tensors: Mapping[str, torch.Tensor | ShardPiece], own_names: Container[str]
) -> Iterator[tuple[_Key, torch.Tensor]]:
    """Yield each unsharded tensor in `own_names`, and each box of a sharded tensor that this rank writes."""
    for name, each in tensors.items():
        if isinstance(each, ShardPiece):
            yield from (((name, i), box.values) for i, box in enumerate(each.boxes) if box.is_written)
        elif name in own_names:
            yield (name, 0), each


def _replace_values(
    name: str, each: torch.Tensor | ShardPiece, copies: Mapping[_Key, torch.Tensor]
) -> torch.Tensor | ShardPiece:
    """Return a tensor or `ShardPiece` with its values replaced by their copies in host memory.

    Values that this rank does not write are replaced by meta tensors.

    Args:
        name: Name of the tensor.
        each: Tensor or `ShardPiece`.
        copies: Tensors in host memory by (name, index of the box).
    """
    if not isinstance(each, ShardPiece):
        return copies[name, 0] if (name, 0) in copies else _make_meta(each)
    boxes = tuple(
        replace(box, values=copies[name, i] if box.is_written else _make_meta(box.values))
        for i, box in enumerate(each.boxes)
    )
    return replace(each, boxes=boxes, local=None)


def _make_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
