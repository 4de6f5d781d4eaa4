"""Write safetensors files from several threads, in ranges that are hashed as they are written.

A range is 16 MiB of a file, so that one large file keeps several threads busy. Each thread collects the bytes of a
range from the tensors, hashes them, and writes them to their offset. There is one hash for each piece of a file. A
piece has a fixed number of bytes. After the last range of a file, a thread flushes the file to the disk (fsync), while
the others write the next file. The calling thread writes small files itself, and flushes them when all are written.

Values that are contiguous in host memory are written without a copy. Contiguous values on a device are copied
through one small buffer per thread. Other values are first copied to host memory. `MAX_COPIES` limits these copies.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import xxhash

from headway.common.object_path import THREADS, ObjectPath
from headway.common.task_threads import TaskThreads
from headway.core.runtime.copy_stream import allocate_pinned
from headway.core.weights.file_sinks import DiskSink, FileSink, ObjectSink
from headway.core.weights.ranged_file import RANGE, RangedFile
from headway.core.weights.safetensors_format import BLOCK, encode_header
from headway.core.weights.tensor_bytes import TensorSpec, get_raw_bytes, is_in_order, view_bytes
from headway.errors import CheckpointError

MAX_COPIES = 64 * 2**20
"""Maximum bytes of host copies of values that cannot be written without a copy. A single larger copy is allowed."""
_MIN_THREADED_BYTES = 64 * 2**20
"""Smallest total size in bytes for which a save starts threads."""
_STAGING_BYTES = 4 * 2**20
"""Size in bytes of each thread's buffer for values on a device."""
_MIN_UNCOPIED_BYTES = 64 * 1024
"""Smallest size in bytes of values that are hashed and written without a copy. Smaller ones are collected in a buffer."""


class LazyFullTensor(Protocol):
    """Interface of a full tensor that is assembled in memory only on request.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its values.
    """

    shape: torch.Size
    dtype: torch.dtype

    def assemble(self) -> torch.Tensor:
        """Return the full tensor, assembled in memory."""


class _HostCopyLimit:
    """Limit on the bytes of host copies that are not written yet. A thread that makes copies waits at the limit."""

    def __init__(self, threads: TaskThreads) -> None:
        self._threads = threads
        self._state_change = threading.Condition()
        self._num_bytes = 0

    def reserve_memory(self, num_bytes: int, num_unsubmitted: int) -> None:
        """Reserve bytes for a host copy, and wait until they fit into `MAX_COPIES`. Call `release` when the copy has been written.

        A copy that exceeds the limit by itself is admitted once all submitted copies have been written.

        Args:
            num_bytes: Size of the copy in bytes.
            num_unsubmitted: Bytes that the caller has already reserved for the range that it is still filling. They are written only
                when the range is full, so waiting for them would never end.

        Raises:
            BaseException: The error of a task that failed during the wait.
        """
        with self._state_change:
            while self._num_bytes > num_unsubmitted and self._num_bytes + num_bytes > MAX_COPIES:
                self._state_change.wait(0.05)  # after a failed task, some copies might never be released
                self._threads.raise_first_error()
            self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Reduce the total of unwritten copies by the number of bytes that have been written."""
        with self._state_change:
            self._num_bytes -= num_bytes
            self._state_change.notify_all()


@dataclass(frozen=True)
class _Segment:
    """Bytes of one tensor that belong to one range of a file.

    Attributes:
        values: The bytes, as a contiguous uint8 tensor on any device.
        copy_limit: Limit that counts the bytes if they belong to a host copy, else None.
    """

    values: torch.Tensor
    copy_limit: _HostCopyLimit | None


class _Range:
    """Range of a file's bytes. One thread writes it. Its bytes come from segments of tensors, in order.

    Args:
        start: Offset in the file.

    Attributes:
        num_bytes: Number of bytes added so far.
        segments: Segments added so far.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.num_bytes = 0
        self.segments: list[_Segment] = []

    def add(self, segment: _Segment) -> None:
        """Append a segment (bytes of one tensor) to the range."""
        self.segments.append(segment)
        self.num_bytes += segment.values.numel()

    def separate_copies(self) -> int:
        """Copy the parts of larger host copies that this range contains, so that the large copies can be freed early.

        Returns:
            Number of bytes of this range that are host copies.
        """
        for index, segment in enumerate(self.segments):
            values, is_view = segment.values, segment.values.untyped_storage().nbytes() > segment.values.numel()
            if segment.copy_limit is not None and is_view:
                self.segments[index] = _Segment(values.clone(), segment.copy_limit)
        return sum(each.values.numel() for each in self.segments if each.copy_limit is not None)


class _FileInProgress:
    """File whose ranges are being written by several threads.

    Args:
        file: Path, length and hashes of the file.
        sink: Target of its bytes.
        piece: Number of bytes that one hash covers.
        on_written: Function called by a thread when the file is complete.
    """

    def __init__(self, file: RangedFile, sink: FileSink, piece: int, on_written: Callable[[RangedFile], None]) -> None:
        self.file = file
        self.sink = sink
        self.piece = piece
        self._on_written = on_written
        self._lock = threading.Lock()
        self._num_unfinished = -(-file.num_bytes // sink.range_bytes)

    def finish_range(self) -> bool:
        """Record that a range has been written. Return True if it is the last one, after which `finish` must be called."""
        with self._lock:
            self._num_unfinished -= 1
            return self._num_unfinished == 0

    def finish(self) -> None:
        """Complete the file."""
        self.sink.finish()
        self._on_written(self.file)


class ParallelWriter:
    """Context manager that writes files from several threads. All files are complete on exit without an error.

    An error of a thread is raised by a later call of `write`, or on exit. Each thread uses a buffer of 1 MiB, or of 16
    MiB for object stores, and 4 MiB of pinned memory if values are on a device. Host copies of all threads together
    take at most `MAX_COPIES` bytes, unless a single value is larger.

    Args:
        num_threads: Number of threads. 0: the calling thread writes, which `count_threads` recommends for few
            bytes. Default: 4.
    """

    def __init__(self, num_threads: int = THREADS) -> None:
        # Waiting tasks hold views, and host copies have their own limit. So the limit of 4 tasks per thread only bounds
        # how far the calling thread runs ahead.
        self._threads = TaskThreads(num_threads, "headway-write", 4 * num_threads)
        self._copy_limit = _HostCopyLimit(self._threads)
        self._num_unsubmitted = 0
        """Bytes of host copies in the range that the calling thread is filling."""
        self._local = threading.local()  # each thread's buffer, and its pinned memory for copies from devices
        self._device_lock = threading.Lock()  # held during a copy from a device
        self._synchronized_devices: set[torch.device] = set()  # devices whose earlier work has ended
        self._files: list[_FileInProgress] = []

    def __enter__(self) -> "ParallelWriter":
        self._threads.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._threads.wait()  # tasks may add further tasks until all have ended
        except BaseException as failure:
            self._threads.__exit__(type(failure), failure, at)
            raise
        else:
            self._threads.__exit__(kind, error, at)
        finally:
            for each in self._files:
                each.sink.abort()

    def write(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        values: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]],
        metadata: Mapping[str, str] | None = None,
        piece: int = RANGE,
        syncs_to_disk: bool = False,
        on_written: Callable[[RangedFile], None] = lambda file: None,
    ) -> RangedFile:
        """Start to write a safetensors file. The values must not change until the context exits.

        Args:
            path: File to write. It is not replaced atomically.
            specs: Shape and dtype of each tensor, in the order of the file.
            values: Pairs of (name, tensor) in the order of `specs`. Tensors that are not in memory are assembled by the
                calling thread, one after the other.
            metadata: Entries for the metadata in the file's header, in addition to `{"format": "pt"}`. Default: None,
                no other entries.
            piece: Number of bytes that one hash covers, a power of two up to 16 MiB. Default: 16 MiB.
            syncs_to_disk: Whether to flush the file to the disk with fsync. Default: False.
            on_written: Function called with the file by a thread when the file is complete. Default: a function that
                does nothing.

        Returns:
            The file. Its hashes are complete when it has been written.

        Raises:
            OSError: If the file cannot be created.
            CheckpointError: If the format lacks a dtype, a name cannot be encoded, or the values differ from `specs`.
            BaseException: The error of a thread that has failed before, such as `OSError` if the disk is full.
        """
        header, _ = encode_header(specs, metadata or {})
        num_bytes = len(header) + sum(spec.num_bytes for spec in specs.values())
        file = RangedFile(path, num_bytes, [""] * -(-num_bytes // piece))
        sink: FileSink = ObjectSink(path, piece) if isinstance(path, ObjectPath) else DiskSink(path, syncs_to_disk)
        progress = _FileInProgress(file, sink, piece, on_written)
        self._files.append(progress)
        current = _Range(0)
        for segment in self._list_segments(path, header, specs, values):
            begin = 0
            while begin < segment.values.numel():
                end = min(segment.values.numel(), begin + sink.range_bytes - current.num_bytes)
                current.add(_Segment(segment.values[begin:end], segment.copy_limit))
                begin = end
                if current.num_bytes == sink.range_bytes:
                    self._threads.submit(partial(self._write_range, progress, current))
                    current = _Range(current.start + sink.range_bytes)
                    self._num_unsubmitted = 0
            if segment.copy_limit is not None:
                self._num_unsubmitted = current.separate_copies()
            del segment
        if current.num_bytes:
            self._threads.submit(partial(self._write_range, progress, current))
        self._num_unsubmitted = 0
        return file

    def add_task(self, task: Callable[[], None]) -> None:
        """Run a task on one of the threads, before the context exits. An `on_written` function may call this method."""
        self._threads.add(task)

    def _list_segments(
        self,
        path: Path,
        header: bytes,
        specs: Mapping[str, TensorSpec],
        values: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]],
    ) -> Iterator[_Segment]:
        """Yield the bytes of a file in order, as segments of tensors.

        Args:
            path: Path of the file, for messages.
            header: First bytes of the file.
            specs: Shape and dtype of each tensor, in the order of the file.
            values: Pairs of (name, tensor) in the order of `specs`.

        Raises:
            CheckpointError: If the values differ from `specs`.
        """
        yield _Segment(torch.frombuffer(bytearray(header), dtype=torch.uint8), None)
        remaining = iter(specs.items())
        for name, value in values:
            expected_name, spec = next(remaining, ("", None))
            if name != expected_name or spec is None or (tuple(value.shape), value.dtype) != (spec.shape, spec.dtype):
                raise CheckpointError(
                    f"{name} is to be written as {list(value.shape)} {value.dtype}, but the file was planned with {spec}"
                )
            if isinstance(value, torch.Tensor) and (is_in_order(value) or not spec.num_bytes):
                self._synchronize_device(value.device)
                if spec.num_bytes:
                    yield _Segment(view_bytes(value), None)
                continue
            self._copy_limit.reserve_memory(spec.num_bytes, self._num_unsubmitted)
            copy = value if isinstance(value, torch.Tensor) else value.assemble()
            del value
            yield _Segment(get_raw_bytes(copy), self._copy_limit)
            del copy
        missing_name, _ = next(remaining, (None, None))
        if missing_name is not None:
            raise CheckpointError(f"{path}: no values were passed for {missing_name}")

    def _synchronize_device(self, device: torch.device) -> None:
        """Wait for the work on a device that produces the values to write.

        The writer's threads copy on another stream, which does not wait for this work.
        """
        if device.type != "cpu" and device not in self._synchronized_devices:
            torch.accelerator.current_stream(device).synchronize()
            self._synchronized_devices.add(device)

    # ---------------------------------------------------------------- in the threads

    def _write_range(self, progress: _FileInProgress, file_range: _Range) -> None:
        """Write one range, hash it piece by piece, and finish the file if it is the last range."""
        sink, file, piece = progress.sink, progress.file, progress.piece
        offset, digests = file_range.start, []
        digest, filled = xxhash.xxh3_128(), 0
        block_bytes = min(sink.range_bytes if sink.needs_single_block else BLOCK, file_range.num_bytes)
        for view in self._gather_blocks(file_range.segments, block_bytes, sink.needs_single_block):
            if self._threads.has_failed:
                return
            sink.write(view, offset)
            offset += len(view)
            while view:
                part = view[: piece - filled]
                digest.update(part)
                filled += len(part)
                view = view[len(part) :]
                if filled == piece:
                    digests.append(digest.hexdigest())
                    digest, filled = xxhash.xxh3_128(), 0
        if filled:
            digests.append(digest.hexdigest())
        first_piece = file_range.start // piece
        file.digests[first_piece : first_piece + len(digests)] = digests
        del view, part  # they hold the memory of the last segment
        num_copied_bytes = sum(each.values.numel() for each in file_range.segments if each.copy_limit is not None)
        file_range.segments.clear()  # frees the copies before others are made, and before the fsync
        self._copy_limit.release(num_copied_bytes)
        sink.end_range(file_range.start, file_range.num_bytes)
        if progress.finish_range():
            self._threads.add(progress.finish)

    def _gather_blocks(
        self, segments: Sequence[_Segment], num_bytes: int, needs_single_block: bool
    ) -> Iterator[memoryview]:
        """Yield the bytes of the segments in blocks of at most `num_bytes`.

        Large values in host memory are yielded without a copy. Others are copied to a buffer that is reused by the next
        block.

        Args:
            segments: Bytes of the tensors.
            num_bytes: Maximum size of a block in bytes.
            needs_single_block: Whether all bytes must be in one block, as an object store requires.
        """
        buffer = self._get_buffer(num_bytes)
        filled = 0
        for segment in segments:
            for view in self._read_blocks(segment.values):
                while view:
                    if not needs_single_block and not filled and len(view) >= _MIN_UNCOPIED_BYTES:
                        yield view[:num_bytes]
                        view = view[num_bytes:]
                        continue
                    part = view[: num_bytes - filled]
                    buffer[filled : filled + len(part)] = part
                    filled += len(part)
                    view = view[len(part) :]
                    if filled == num_bytes or (not needs_single_block and len(view) >= _MIN_UNCOPIED_BYTES):
                        yield buffer[:filled]
                        filled = 0
        if filled:
            yield buffer[:filled]

    def _read_blocks(self, values: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor. Values on a device are copied in blocks through a small buffer."""
        if values.device.type == "cpu":
            yield _view_memory(values)
            return
        # A new thread without a current device would create a context on device 0.
        with torch.accelerator.device_index(values.device.index):
            staging = self._get_staging()
        for start in range(0, values.numel(), staging.numel()):
            part = values[start : start + staging.numel()]
            # Not every backend allows copies from several threads, and one thread saturates a disk.
            with self._device_lock, torch.accelerator.device_index(values.device.index):
                staging[: part.numel()].copy_(part)
            yield _view_memory(staging[: part.numel()])

    def _get_buffer(self, num_bytes: int) -> memoryview:
        """Return this thread's buffer in host memory, of at least `num_bytes` bytes."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._local.buffer = memoryview(bytearray(num_bytes))
        return buffer

    def _get_staging(self) -> torch.Tensor:
        """Return this thread's buffer for copies from a device, in pinned memory if possible."""
        staging: torch.Tensor | None = getattr(self._local, "staging", None)
        if staging is None:
            try:
                staging = allocate_pinned(_STAGING_BYTES)
            except RuntimeError:  # no memory can be pinned: copies are then slower, but still faster than a disk
                staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8)
            self._local.staging = staging
        return staging


def _view_memory(values: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous uint8 tensor on the CPU."""
    return memoryview(values.numpy())  # type: ignore[arg-type]


def count_threads(num_bytes: int) -> int:
    """Return the number of threads that should write the given number of bytes to a disk: 4, or 0 for fewer than 64 MiB.

    The result is 0 if the address space of the process is limited. A new thread that gets no memory would then end the
    process.
    """
    return THREADS if num_bytes >= _MIN_THREADED_BYTES and not _is_address_space_limited() else 0


def _is_address_space_limited() -> bool:
    """Whether this process has a limit on its virtual memory (`ulimit -v`), which mapping a large file could exceed."""
    if not sys.platform.startswith("linux"):
        return False
    resource: Any = importlib.import_module("resource")  # exists on Unix only
    return bool(resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY)
