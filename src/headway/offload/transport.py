"""Copy weights to a device: through a ring of pinned buffers, directly from pinned memory, or within host memory."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headway.core.runtime.copy_stream import CopyStream, StreamPoint
from headway.log import get_logger
from headway.offload.readahead import ReadTraffic

logger = get_logger(__name__)

RING = 3
"""Number of pinned buffers that copies use in turn."""
CHUNK = 64 << 20
"""Size of a pinned buffer in bytes."""


class HostTransport:
    """Synchronous copies of weights within host memory, or to a device that has no separate copy stream.

    Copies within host memory serve to run the streaming logic on a machine without an accelerator. `start_copy` runs in
    a separate thread. All other methods run in the thread that computes.

    Args:
        device: Target device, or None for the device on which the weights already are. Default: None.

    Attributes:
        traffic: Statistics of the copies.
        pinned: Function that allocates a given number of bytes of pinned memory, as a uint8 tensor. None if memory
            cannot be pinned.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.traffic = ReadTraffic()
        self.pinned: Callable[[int], torch.Tensor] | None = None
        self._device = device

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """Allocate memory on the target device for a copy of the tensor `source`."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(source, device=self._device, requires_grad=False)

    def mark_progress(self) -> Any:
        """Return the current position in the device's compute stream, or None if the device computes synchronously.

        A copy into newly allocated memory must wait for this position, because earlier work might still use that
        memory.
        """
        return None

    def start_copy(self, source: torch.Tensor, copy: torch.Tensor, after: Any) -> Any:
        """Start to copy `source` into `copy`. Return a ticket, which must be passed to `finish_copy`.

        This class copies at once, and its ticket is None.

        Args:
            source: Original tensor.
            copy: Target tensor.
            after: Position in the compute stream from `mark_progress`. The copy begins when the computation has reached
                it.
        """
        start_time = time.perf_counter()
        copy.copy_(source.detach())
        self.traffic.add_transfer(source.nbytes, time.perf_counter() - start_time)

    def finish_copy(self, copy: torch.Tensor, ticket: Any) -> None:
        """Make the computation wait for the copy that is identified by `ticket`. In this class, do nothing.

        Call this before the copy is used, or before it is dropped without having been used.

        Args:
            copy: Target tensor of the copy.
            ticket: Return value of `start_copy`.
        """

    def drain(self) -> None:
        """Wait until all copies that have been started are complete. Can be called from any thread."""


@dataclass(frozen=True)
class PendingCopy:
    """Handle of an asynchronous copy in progress.

    Attributes:
        allocated: Position in the compute stream at which the copy's memory was allocated.
        done: Position in the copy stream at which the copy ends.
    """

    allocated: StreamPoint
    done: StreamPoint


class _UntimedCopy(NamedTuple):
    """Copy whose duration is not known yet.

    Attributes:
        start: Position in the copy stream at which the copy begins.
        end: Position in the copy stream at which the copy ends.
        num_bytes: Size of the copy.
    """

    start: StreamPoint
    end: StreamPoint
    num_bytes: int


class RingTransport(HostTransport):
    """Asynchronous copies to an accelerator, through pinned buffers unless the weights are already in pinned memory.

    While one buffer is copied, the next is filled from the page cache or the disk. Pinned tensors are copied directly.
    If no memory can be pinned, tensors are copied from pageable memory, which is slower.

    Args:
        stream: Copy stream of the device.
        chunk: Size of a buffer in bytes. Default: `CHUNK`.
    """

    def __init__(self, stream: CopyStream, chunk: int = CHUNK) -> None:
        super().__init__()
        self.pinned = stream.allocate_pinned
        self._stream = stream
        self._chunk = chunk
        self._reset_ring()

    def _reset_ring(self) -> None:
        """Discard the ring of pinned buffers. It is allocated again at the next copy."""
        self._buffers: list[torch.Tensor] | None = None
        # Position in the copy stream after the last copy from each buffer, or None if the buffer was not used.
        self._last_copies: list[StreamPoint | None] = [None] * RING
        self._next_buffer = 0
        self._untimed: deque[_UntimedCopy] = deque()

    # A copy of the model gets its own buffers.
    def __reduce__(self) -> tuple[type["RingTransport"], tuple[CopyStream, int]]:
        return RingTransport, (self._stream, self._chunk)

    def allocate(self, source: torch.Tensor) -> torch.Tensor:
        """Allocate device memory for a copy of `source`, from the allocator's pool for the compute stream."""
        return self._stream.allocate(source)

    def mark_progress(self) -> StreamPoint:
        """Return the current position in the compute stream."""
        return self._stream.record_position()

    def start_copy(self, source: torch.Tensor, copy: torch.Tensor, after: StreamPoint) -> PendingCopy:
        """Queue a copy that begins once the compute stream has reached `after`, and return the ticket of the copy.

        The call returns when the last buffer of the copy is queued.

        Args:
            source: Original tensor.
            copy: Target tensor on the device.
            after: Position in the compute stream from `mark_progress`.
        """
        self._stream.bind_device()
        self._record_times()
        start = self._stream.begin_copies(after)
        try:
            if self._stream.is_pinned(source) or not source.is_contiguous() or not self._get_ring():
                self._stream.copy(copy, source.detach())
            else:
                self._copy_through_ring(source.detach(), copy)
        except BaseException:
            self.drain()  # copies in progress must not write into memory that is about to be freed
            raise
        done = self._stream.end_copies()
        self.traffic.num_bytes += source.nbytes
        self._untimed.append(_UntimedCopy(start, done, source.nbytes))
        return PendingCopy(after, done)

    def _record_times(self) -> None:
        """Record the durations of the copies that are complete. Copies end in the order in which they were queued."""
        while self._untimed and self._untimed[0].end.is_reached():
            copy = self._untimed.popleft()
            seconds = copy.start.measure_seconds_until(copy.end)
            if seconds is not None:
                self.traffic.add_time(copy.num_bytes, seconds)

    def _get_ring(self) -> list[torch.Tensor]:
        """Return the pinned buffers, which are allocated at the first call.

        The list is empty if no memory could be pinned.
        """
        if self._buffers is None:
            try:
                self._buffers = [self._stream.allocate_pinned(self._chunk) for _ in range(RING)]
            except RuntimeError as error:
                self._buffers = []
                logger.warning_once(
                    "%d buffers of %d bytes could not be pinned (%s): weights are copied from pageable memory, which is slower",
                    RING,
                    self._chunk,
                    error,
                )
        return self._buffers

    def _copy_through_ring(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Copy a tensor in chunks, each through the next pinned buffer of the ring.

        Args:
            source: Contiguous original tensor.
            copy: Target tensor on the device.
        """
        buffers, chunk = self._get_ring(), self._chunk
        source_bytes, target_bytes = source.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        for start in range(0, source_bytes.numel(), chunk):
            piece = source_bytes[start : start + chunk]
            last_copy = self._last_copies[self._next_buffer]
            if last_copy is not None:
                last_copy.wait()  # until the buffer's former contents have been copied
            buffer = buffers[self._next_buffer][: piece.numel()]
            buffer.copy_(piece)
            self._stream.copy(target_bytes[start : start + chunk], buffer)
            self._last_copies[self._next_buffer] = self._stream.end_copies()
            self._next_buffer = (self._next_buffer + 1) % RING

    def finish_copy(self, copy: torch.Tensor, ticket: PendingCopy) -> None:
        """Make the device wait for a copy. The host does not wait.

        Args:
            copy: Target tensor of the copy.
            ticket: Return value of `start_copy`.
        """
        self._stream.order_after_copy(copy, ticket.allocated, ticket.done)

    def drain(self) -> None:
        """Wait until the copy stream is empty."""
        with contextlib.suppress(RuntimeError):  # a device that has failed no longer writes to memory
            self._stream.drain()


def make_transport(device: torch.device) -> HostTransport:
    """Return the transport of copies to an accelerator: asynchronous if the device has streams, else synchronous."""
    try:
        stream = CopyStream(device)
    except RuntimeError as error:
        logger.warning_once("%s has no streams (%s): weights cannot be copied while the device computes", device, error)
        return HostTransport(device)
    return RingTransport(stream)
