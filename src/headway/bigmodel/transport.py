"""Copies from host memory to a device: through a small pinned ring, on a stream of their own."""

import time
from typing import Any, Protocol

import torch

from headway.bigmodel.readahead import Traffic

RING = 3
CHUNK = 64 << 20


class Transport(Protocol):
    """Copies tensors. `start` runs on a thread of its own, `finish` on the thread that computes."""

    traffic: Traffic

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy; returns it and what `finish` needs."""

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """Make the present stream wait until the copy is complete."""


class HostTransport:
    """Copies within host memory: the stream's logic on a machine without an accelerator."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy, complete on return."""
        begin = time.perf_counter()
        copy = home.detach().clone()
        self.traffic.num_bytes += home.numel() * home.element_size()
        self.traffic.seconds += time.perf_counter() - begin
        return copy, None

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """Nothing to wait for."""


class RingTransport:
    """Copies to an accelerator. Pageable memory and mapped files go through `RING` pinned buffers of `CHUNK` bytes.

    While one buffer travels, the next is filled from the page cache or the disk; pinned tensors travel as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.traffic = Traffic()
        self._stream = torch.Stream(device=device)
        self._buffers: list[torch.Tensor] = []
        self._busy: list[torch.Event | None] = [None] * RING
        self._turn = 0

    def __reduce__(self) -> tuple[type["RingTransport"], tuple[torch.device]]:
        return RingTransport, (self.device,)

    def start(self, home: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Queue the copy on the side stream; returns when the last buffer is on its way."""
        begin = time.perf_counter()
        with self._stream:
            copy = torch.empty_like(home, device=self.device, requires_grad=False)
            if home.is_pinned() or not home.is_contiguous():
                copy.copy_(home.detach(), non_blocking=True)
            else:
                self._through_ring(home.detach(), copy)
            done = torch.Event(device=self.device)
            done.record(self._stream)
        self.traffic.num_bytes += home.numel() * home.element_size()
        self.traffic.seconds += time.perf_counter() - begin
        return copy, done

    def _through_ring(self, home: torch.Tensor, copy: torch.Tensor) -> None:
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
        source, target = home.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        for begin in range(0, source.numel(), CHUNK):
            piece = source[begin : begin + CHUNK]
            busy = self._busy[self._turn]
            if busy is not None:
                busy.synchronize()
            buffer = self._buffers[self._turn][: piece.numel()]
            buffer.copy_(piece)
            target[begin : begin + CHUNK].copy_(buffer, non_blocking=True)
            event = self._busy[self._turn] = torch.Event(device=self.device)
            event.record(self._stream)
            self._turn = (self._turn + 1) % RING

    def finish(self, copy: torch.Tensor, ticket: Any) -> None:
        """The present stream waits on the device; the host goes on."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(ticket)
        # The copy was allocated on the side stream: its memory may be used again only after this stream is done.
        copy.record_stream(stream)
