"""A device's second queue, for copies beside the computation, on any accelerator that torch knows: streams, events, pinned memory."""

from dataclasses import dataclass
from typing import Protocol

import torch


class StreamPoint(Protocol):
    """How far a queue had come when it was asked."""

    def is_reached(self) -> bool:
        """Has the device come to it?"""

    def wait(self) -> None:
        """Hold the calling thread until the device has come to it."""

    def seconds_until(self, later: "StreamPoint") -> float | None:
        """From here to a later point, both of them reached; None where the device does not tell."""


class CopyStream(Protocol):
    """A queue for copies to a device, beside the one that computes there.

    Memory belongs to the queue that computes: what is freed serves work that is queued behind. So a copy into it begins
    after all that the computation had queued when the memory was allocated, and the computation waits for the copy
    before it uses or frees it. Nothing else is needed for safety, and no allocator has to be told of a second queue.
    """

    def bind(self) -> None:
        """Make the device that of the calling thread: a new thread begins with device 0, and would open a context there."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory on the device, for the thread that computes."""

    def here(self) -> StreamPoint:
        """How far the computation has queued its work."""

    def begin(self, after: StreamPoint) -> StreamPoint:
        """Copies from now on run after `after`; where they begin."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; from memory that is not pinned it is complete on return."""

    def end(self) -> StreamPoint:
        """Where the copies that have been queued end."""

    def admit(self, copy: torch.Tensor, allocated: StreamPoint, done: StreamPoint) -> None:
        """Let the computation wait for a copy.

        Args:
            copy: what it will use.
            allocated: `here()` when its memory was allocated.
            done: `end()` when it was queued.
        """

    def drain(self) -> None:
        """Hold the calling thread until nothing is queued."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from by itself, as uint8.

        Raises:
            RuntimeError: the system gives none.
        """

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Does the tensor lie in such memory?"""


@dataclass(frozen=True)
class EventStreamPoint:
    """A point as torch has it: an event, and the stream that it was recorded in."""

    event: torch.Event
    stream: torch.Stream

    def is_reached(self) -> bool:
        """Has the device come to it?"""
        return self.event.query()

    def wait(self) -> None:
        """Hold the calling thread until the device has come to it."""
        # A thread that has no device yet would open a context on the first one.
        with torch.accelerator.device_index(self.stream.device_index):
            self.event.synchronize()

    def seconds_until(self, later: StreamPoint) -> float | None:
        """From here to a later point."""
        assert isinstance(later, EventStreamPoint)
        try:
            return self.event.elapsed_time(later.event) / 1000
        except RuntimeError:  # a backend without clocks in its events
            return None


def point(device: torch.device) -> EventStreamPoint:
    """How far the present stream of `device` has queued its work."""
    return _point(torch.accelerator.current_stream(device))


def _point(stream: torch.Stream) -> EventStreamPoint:
    event = torch.Event(device=stream.device, enable_timing=True, blocking=True)
    event.record(stream)
    return EventStreamPoint(event, stream)


def pinned(num_bytes: int) -> torch.Tensor:
    """Host memory that an accelerator reads and writes by itself, as uint8.

    Raises:
        RuntimeError: the system gives none.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class DeviceCopyStream:
    """A stream of its own on an accelerator; on MPS, which has one queue, that one.

    Args:
        device: an accelerator; without an index, the one that is current for the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._stream = torch.Stream(device=self.device)

    def __reduce__(self) -> tuple[type["DeviceCopyStream"], tuple[torch.device]]:
        return DeviceCopyStream, (self.device,)

    def bind(self) -> None:
        """Make the device that of the calling thread."""
        torch.accelerator.set_device_index(self.device)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory on the device, of the present stream."""
        # A tensor made in inference mode could not be saved for backward by a later forward.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(like, device=self.device, requires_grad=False)

    def here(self) -> EventStreamPoint:
        """How far the present stream has queued its work."""
        return point(self.device)

    def begin(self, after: StreamPoint) -> EventStreamPoint:
        """Copies from now on run after `after`."""
        assert isinstance(after, EventStreamPoint)
        self._stream.wait_event(after.event)
        return _point(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        with self._stream:
            target.copy_(source, non_blocking=True)

    def end(self) -> EventStreamPoint:
        """Where the copies that have been queued end."""
        return _point(self._stream)

    def admit(self, copy: torch.Tensor, allocated: StreamPoint, done: StreamPoint) -> None:
        """Let the present stream wait for a copy."""
        assert isinstance(allocated, EventStreamPoint)
        assert isinstance(done, EventStreamPoint)
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(done.event)
        if stream != allocated.stream:
            copy.record_stream(stream)  # a caller's own second stream, which its memory does not belong to

    def drain(self) -> None:
        """Hold the calling thread until nothing is queued."""
        self._stream.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned host memory."""
        return pinned(num_bytes)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Does the tensor lie in pinned memory?"""
        return tensor.is_pinned()
