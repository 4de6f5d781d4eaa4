"""Copies between host and device: side streams, how much pinned memory to ask for, and values that are read later.

A device's second queue, for copies beside the computation, on any accelerator that torch knows: streams, events, pinned memory.

How much pinned memory to ask for at a time: torch rounds each piece up to a power of two, so pieces are powers of two.

Values on their way from a device to the host: asked for now, read later, so that the host need not wait in between.

A module moved to a device as the same parameters, so that an optimizer made before goes on holding them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StreamPoint:
    """How far a queue had come when it was asked: an event, and the stream that it was recorded in."""

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

    def seconds_until(self, later: "StreamPoint") -> float | None:
        """From here to a later point, both of them reached; None where the device does not tell."""
        try:
            return self.event.elapsed_time(later.event) / 1000
        except RuntimeError:  # a backend without clocks in its events
            return None


def point(device: torch.device) -> StreamPoint:
    """How far the present stream of `device` has queued its work."""
    return _point(torch.accelerator.current_stream(device))


def _point(stream: torch.Stream) -> StreamPoint:
    event = torch.Event(device=stream.device, enable_timing=True, blocking=True)
    event.record(stream)
    return StreamPoint(event, stream)


def pinned(num_bytes: int) -> torch.Tensor:
    """Host memory that an accelerator reads and writes by itself, as uint8.

    Raises:
        RuntimeError: the system gives none.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class CopyStream:
    """A queue for copies to a device, beside the one that computes there; on MPS, which has one queue, that one.

    Memory belongs to the queue that computes: what is freed serves work that is queued behind. So a copy into it begins
    after all that the computation had queued when the memory was allocated, and the computation waits for the copy
    before it uses or frees it. Nothing else is needed for safety, and no allocator has to be told of a second queue.

    Args:
        device: an accelerator; without an index, the one that is current for the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._stream = torch.Stream(device=self.device)

    def __reduce__(self) -> tuple[type["CopyStream"], tuple[torch.device]]:
        return CopyStream, (self.device,)

    def bind(self) -> None:
        """Make the device that of the calling thread: a new thread begins with device 0, and would open a context there."""
        torch.accelerator.set_device_index(self.device)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory on the device, for the thread that computes."""
        # A tensor made in inference mode could not be saved for backward by a later forward.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(like, device=self.device, requires_grad=False)

    def here(self) -> StreamPoint:
        """How far the computation has queued its work."""
        return point(self.device)

    def begin(self, after: StreamPoint) -> StreamPoint:
        """Copies from now on run after `after`; where they begin."""
        self._stream.wait_event(after.event)
        return _point(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; from memory that is not pinned it is complete on return."""
        with self._stream:
            target.copy_(source, non_blocking=True)

    def end(self) -> StreamPoint:
        """Where the copies that have been queued end."""
        return _point(self._stream)

    def admit(self, copy: torch.Tensor, allocated: StreamPoint, done: StreamPoint) -> None:
        """Let the computation wait for a copy.

        Args:
            copy: what it will use.
            allocated: `here()` when its memory was allocated.
            done: `end()` when it was queued.
        """
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(done.event)
        if stream != allocated.stream:
            copy.record_stream(stream)  # a caller's own second stream, which its memory does not belong to

    def drain(self) -> None:
        """Hold the calling thread until nothing is queued."""
        self._stream.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from by itself, as uint8.

        Raises:
            RuntimeError: the system gives none.
        """
        return pinned(num_bytes)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Does the tensor lie in such memory?"""
        return tensor.is_pinned()


ARENA = 1 << 30
"""The most bytes of one piece, unless one tensor alone is larger."""
_ALIGNED = 256


def arenas(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Pieces of memory for tensors of these sizes, as (bytes, [(which tensor, where it begins)]), in order.

    Each is the largest power of two that the rest fills, up to `ARENA`; a tensor that is larger gets one of its own.

    Args:
        sizes: of the tensors, in bytes.
        limit: bytes of all pieces together; tensors beyond it get no place.
    """
    needed = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    index, rest = 0, sum(needed)
    while index < len(needed):
        num_bytes = min(max(min(_floor(rest), ARENA), _ceil(needed[index])), _floor(limit))
        part, offset = [], 0
        while index < len(needed) and offset + needed[index] <= num_bytes:
            part.append((index, offset))
            offset += needed[index]
            index += 1
        if not part:
            return
        rest -= offset
        limit -= num_bytes
        yield num_bytes, part


def pieces(size: int) -> list[int]:
    """Sizes of pieces that hold `size` bytes: powers of two, and a last one that is rounded up by less than an eighth of them all."""
    found: list[int] = []
    rest = size
    while rest > 0:
        found.append(_floor(rest) if 8 * rest > size else rest)
        rest -= found[-1]
    return found


def _floor(number: int) -> int:
    """The largest power of two that is not larger; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _ceil(number: int) -> int:
    """The smallest power of two that is not smaller; 0 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


class Readback:
    """A small tensor's value as of now, on the host when it is asked for.

    Where the tensor lies on an accelerator, its copy goes into pinned memory behind what the current stream has queued; a host
    that comes back after more work was queued finds it there, or waits while the device goes on working. A device without
    events is waited for at once.

    Args:
        tensor: what to read; it may change afterwards.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._value = tensor.clone()
            return
        try:
            event = torch.Event(device=tensor.device)
            self._value = tensor.to("cpu", non_blocking=True)
            event.record(torch.accelerator.current_stream(tensor.device))
        except RuntimeError:
            self._value = tensor.to("cpu")
        else:
            self._event = event

    @property
    def is_there(self) -> bool:
        """Can it be read without waiting?"""
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        """The value, a tensor on the host; waits where it is not there yet."""
        if not self.is_there:
            self._event.synchronize()
        return self._value


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the same objects, and tied ones stay tied.

    torch's `module.to` gives a parameter new data in place only on kinds of device that it lists in its own source (CPU, CUDA,
    XPU, MPS, HPU and their like). On one that a package registers it makes new parameters: an optimizer made before keeps
    the old ones. There the contents are exchanged instead (`torch.utils.swap_tensors`).

    Raises:
        RuntimeError: a parameter cannot be exchanged, because a weak reference or a graph that was not run back holds it.
    """
    here = next(iter(module.parameters()), None)
    with _exchanged(here is not None and not _takes_data_of(here.device, device)):
        module.to(device)


def _takes_data_of(old: torch.device, new: torch.device) -> bool:
    """Can a tensor of the one device be given data on the other in place?"""
    made = (torch.empty(0, device=device) for device in (old, new))
    return old.type == new.type or torch._has_compatible_shallow_copy_type(*made)


@contextmanager
def _exchanged(is_on: bool) -> Iterator[None]:
    was_on = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(was_on or is_on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_on)
