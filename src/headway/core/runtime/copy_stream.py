"""Separate stream for copies between host and device that overlap with computation, and events that order streams."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StreamPoint:
    """Position in a stream: an event and the stream in which it was recorded."""

    event: torch.Event
    stream: torch.Stream

    def is_reached(self) -> bool:
        """Whether the device has executed all work up to this position of the stream."""
        return self.event.query()

    def wait(self) -> None:
        """Block the calling thread until the device has reached this position."""
        # A thread without a current device would create a context on device 0.
        with torch.accelerator.device_index(self.stream.device_index):
            self.event.synchronize()

    def measure_seconds_until(self, later: "StreamPoint") -> float | None:
        """Return the seconds from this position to a later one; None if the device has no timing events.

        The device must have reached both positions.
        """
        try:
            return self.event.elapsed_time(later.event) / 1000
        except RuntimeError:  # a backend without timing events
            return None


def record_point(device: torch.device) -> StreamPoint:
    """Record an event in the current stream of `device`, and return it as a position."""
    return _record_point_in(torch.accelerator.current_stream(device))


def _record_point_in(stream: torch.Stream) -> StreamPoint:
    """Record an event in a stream, and return it as a point to wait for."""
    event = torch.Event(device=stream.device, enable_timing=True, blocking=True)
    event.record(stream)
    return StreamPoint(event, stream)


def allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned host memory as a uint8 tensor.

    Args:
        num_bytes: Size in bytes.

    Raises:
        RuntimeError: If the system cannot provide the memory.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class CopyStream:
    """Stream for copies to a device, separate from the stream in which the computation runs.

    The memory of copies is allocated in the computation's stream, because the allocator does not know about the second
    stream. The allocator gives freed memory to work that is queued later. Two rules make this safe: A copy starts after
    all work that was queued when its memory was allocated. The computation waits for the copy before it uses or frees
    the memory. MPS has only one stream, which then serves both purposes.

    Args:
        device: Accelerator device. If it has no index, the current device of the calling thread is used.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._stream = torch.Stream(device=self.device)

    def __reduce__(self) -> tuple[type["CopyStream"], tuple[torch.device]]:
        return CopyStream, (self.device,)

    def bind_device(self) -> None:
        """Make this stream's device the current device of the calling thread.

        In a new thread, device 0 is current, and using the stream would create a CUDA context on it.
        """
        torch.accelerator.set_device_index(self.device)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate an uninitialized tensor on the device, in memory that belongs to the computation's stream.

        Args:
            like: Tensor with the shape, dtype and layout of the new tensor.
        """
        # A tensor created in inference mode could not be saved for backward by a later forward.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(like, device=self.device, requires_grad=False)

    def record_position(self) -> StreamPoint:
        """Return the current position in the computation's stream, the current stream of the calling thread."""
        return record_point(self.device)

    def begin_copies(self, dependency: StreamPoint) -> StreamPoint:
        """Make copies that are queued from now on wait for a position. Return the position at which they start.

        Args:
            dependency: Position, usually in the computation's stream, that the device must reach before the copies.
        """
        self._stream.wait_event(dependency.event)
        return _record_point_in(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from `source` to `target`. If `source` is not pinned, the copy is complete on return."""
        with self._stream:
            target.copy_(source, non_blocking=True)

    def end_copies(self) -> StreamPoint:
        """Return the position in the copy stream after all copies queued so far."""
        return _record_point_in(self._stream)

    def order_after_copy(self, copy: torch.Tensor, allocation: StreamPoint, copy_end: StreamPoint) -> None:
        """Make the computation wait for a copy before it uses the tensor.

        Args:
            copy: Tensor that the computation in the current stream will use.
            allocation: Position at which the tensor's memory was allocated, from `record_position()`.
            copy_end: Position after the copy was queued, from `end_copies()`.
        """
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(copy_end.event)
        if stream != allocation.stream:
            # The memory belongs to another stream, so tell the allocator not to reuse it before this stream is done.
            copy.record_stream(stream)

    def drain(self) -> None:
        """Block the calling thread until all queued copies are done."""
        self._stream.synchronize()

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned host memory as a uint8 tensor, so that the device can copy from it asynchronously.

        Args:
            num_bytes: Size in bytes.

        Raises:
            RuntimeError: If the system cannot provide the memory.
        """
        return allocate_pinned(num_bytes)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in pinned host memory."""
        return tensor.is_pinned()
