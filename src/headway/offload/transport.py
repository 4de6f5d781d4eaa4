"""How a weight travels to a device: through a ring of pinned buffers, straight from pinned memory, or within host memory.

Homes in pinned memory: weights that a device copies from by itself, where the ring would copy them once more on the way.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.common import env
from headway.common.text import format_bytes
from headway.log import get_logger
from headway.offload.placement.budget import available_memory
from headway.offload.readahead import ReadTraffic
from headway.runtime.transfers import CopyStream, StreamPoint, arenas
from headway.weights.names import is_mapped

logger = get_logger(__name__)

RING = 3
CHUNK = 64 << 20


class HostTransport:
    """Copies that are complete on return: to a device with a single queue for everything; or, for the stream's logic on a machine
    without an accelerator, within host memory. `start` runs on a thread of its own, everything else on the thread that computes.

    Args:
        device: None: where the weights are.

    Attributes:
        traffic: what was copied.
        pinned: gives host memory to copy from without a detour, as uint8 of that many bytes; None where there is none.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.traffic = ReadTraffic()
        self.pinned: Callable[[int], torch.Tensor] | None = None
        self._device = device

    def allocate(self, home: torch.Tensor) -> torch.Tensor:
        """Memory for a copy."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(home, device=self._device, requires_grad=False)

    def mark(self) -> Any:
        """What has been computed up to now, which copies into memory that is allocated now must leave time for; None: all of it."""
        return None

    def start(self, home: torch.Tensor, copy: torch.Tensor, after: Any) -> Any:
        """Begin to fill a copy; returns what `finish` needs."""
        begin = time.perf_counter()
        copy.copy_(home.detach())
        self.traffic.note(home.nbytes, time.perf_counter() - begin)

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """Make the computation wait until the copy is complete. It is called before a copy is used, or dropped unused."""

    def drain(self) -> None:
        """Wait until no copy is under way; on any thread."""


@dataclass(frozen=True)
class PendingCopy:
    """A copy under way.

    Attributes:
        allocated: how far the computation was when its memory was allocated.
        done: where it ends.
    """

    allocated: StreamPoint
    done: StreamPoint


class RingTransport(HostTransport):
    """Copies to an accelerator. Pageable memory and mapped files go through `RING` pinned buffers of `chunk` bytes.

    While one buffer travels, the next is filled from the page cache or the disk; pinned tensors travel as they are. Where
    nothing can be pinned, tensors travel from where they lie, which is slower.

    Args:
        stream: to the device.
        chunk: bytes of a buffer.
    """

    def __init__(self, stream: CopyStream, chunk: int = CHUNK) -> None:
        super().__init__()
        self.pinned = stream.pinned
        self._stream = stream
        self._chunk = chunk
        self._reset()

    def _reset(self) -> None:
        self._buffers: list[torch.Tensor] | None = None
        self._busy: list[StreamPoint | None] = [None] * RING
        self._turn = 0
        self._untimed: deque[tuple[StreamPoint, StreamPoint, int]] = deque()

    def __reduce__(self) -> tuple[type["RingTransport"], tuple[CopyStream, int]]:
        return RingTransport, (self._stream, self._chunk)

    def allocate(self, home: torch.Tensor) -> torch.Tensor:
        """Memory on the device, of the queue that computes."""
        return self._stream.allocate(home)

    def mark(self) -> StreamPoint:
        """How far the computation has queued its work."""
        return self._stream.here()

    def start(self, home: torch.Tensor, copy: torch.Tensor, after: StreamPoint) -> PendingCopy:
        """Queue the copy behind `after`; returns when the last buffer is on its way."""
        self._stream.bind()
        self._note_times()
        begun = self._stream.begin(after)
        try:
            if self._stream.is_pinned(home) or not home.is_contiguous() or not self._ring():
                self._stream.copy(copy, home.detach())
            else:
                self._through_ring(home.detach(), copy)
        except BaseException:
            self.drain()  # what is under way must not write into memory that is about to be freed
            raise
        done = self._stream.end()
        self.traffic.num_bytes += home.nbytes
        self._untimed.append((begun, done, home.nbytes))
        return PendingCopy(after, done)

    def _note_times(self) -> None:
        while self._untimed and self._untimed[0][1].is_reached():
            begun, done, num_bytes = self._untimed.popleft()
            seconds = begun.seconds_until(done)
            if seconds is not None:
                self.traffic.time(num_bytes, seconds)

    def _ring(self) -> list[torch.Tensor]:
        """The buffers; none where nothing could be pinned."""
        if self._buffers is None:
            try:
                self._buffers = [self._stream.pinned(self._chunk) for _ in range(RING)]
            except RuntimeError as error:
                self._buffers = []
                logger.warning_once(
                    "%d buffers of %d bytes could not be pinned (%s): weights are copied from pageable memory, which is slower",
                    RING,
                    self._chunk,
                    error,
                )
        return self._buffers

    def _through_ring(self, home: torch.Tensor, copy: torch.Tensor) -> None:
        buffers, chunk = self._ring(), self._chunk
        source, target = home.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        for begin in range(0, source.numel(), chunk):
            piece = source[begin : begin + chunk]
            busy = self._busy[self._turn]
            if busy is not None:
                busy.wait()
            buffer = buffers[self._turn][: piece.numel()]
            buffer.copy_(piece)
            self._stream.copy(target[begin : begin + chunk], buffer)
            self._busy[self._turn] = self._stream.end()
            self._turn = (self._turn + 1) % RING

    def finish(self, copy: torch.Tensor, ticket: PendingCopy) -> None:
        """The computation waits on the device; the host goes on."""
        self._stream.admit(copy, ticket.allocated, ticket.done)

    def drain(self) -> None:
        """Wait until the stream is empty."""
        with contextlib.suppress(RuntimeError):  # the device has failed: nothing is written any more
            self._stream.drain()


def transport_to(device: torch.device) -> HostTransport:
    """How weights travel to an accelerator: beside the computation, where its backend has streams."""
    try:
        stream = CopyStream(device)
    except RuntimeError as error:
        logger.warning_once("%s has no streams (%s): weights cannot be copied while the device computes", device, error)
        return HostTransport(device)
    return RingTransport(stream)


_SHARE = 0.5


def pinnable(homes: Sequence[torch.Tensor]) -> int:
    """The most bytes to pin: half of what these homes and this process's part of the free memory are.

    Nobody else can have pinned memory, nor can it be swapped out. Homes in mapped files are free memory's to begin with.
    """
    own = sum(home.nbytes for home in homes if not is_mapped(home))
    return int((own + available_memory() // max(1, env.local_world_size())) * _SHARE)


def pin(homes: Sequence[torch.Tensor], limit: int, allocate: Callable[[int], torch.Tensor]) -> int:
    """Move tensors in host memory into pinned memory, the first ones where not all fit; returns the bytes that moved.

    They remain the same objects. Left where they are: what is not a plain contiguous tensor, or shares its memory with another.

    Args:
        homes: in the order of use.
        limit: bytes to pin at most.
        allocate: gives so many bytes of pinned memory, as uint8; where it raises RuntimeError, a warning says so, and the
            rest stays where it is.
    """
    unique = {id(home): home for home in homes}
    shared = _overlapping(unique.values())
    fit = [home for key, home in unique.items() if key not in shared and _fits(home)]
    moved = 0
    for num_bytes, part in arenas([home.nbytes for home in fit], limit):
        try:
            arena = allocate(num_bytes)
        except RuntimeError as error:
            logger.warning_once(
                "only %s of %s of offloaded weights could be pinned (%s); the rest is copied more slowly",
                format_bytes(moved),
                format_bytes(sum(home.nbytes for home in fit)),
                error,
            )
            break
        for index, start in part:
            home = fit[index]
            piece = arena[start : start + home.nbytes]
            piece.copy_(home.detach().view(-1).view(torch.uint8))
            home.data = piece.view(home.dtype).view(home.shape)
            moved += home.nbytes
    return moved


def _overlapping(homes: Iterable[torch.Tensor]) -> set[int]:
    """The ids of tensors that share memory with another one."""
    found: set[int] = set()
    end, last = 0, None
    for home in sorted(homes, key=lambda home: home.data_ptr()):
        if last is not None and home.data_ptr() < end:
            found |= {id(home), id(last)}
        if home.data_ptr() + home.nbytes > end:
            end, last = home.data_ptr() + home.nbytes, home
    return found


def _fits(home: torch.Tensor) -> bool:
    is_plain = type(home) in (torch.Tensor, torch.nn.Parameter) and home.layout is torch.strided
    return is_plain and home.is_contiguous() and home.nbytes > 0 and not home.is_inference() and not home.is_quantized
