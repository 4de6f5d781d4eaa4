"""Copy saved activations between a device and host memory, on a separate stream while the device computes."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headway.core.runtime.pinned_sizes import split_into_powers_of_two

_TRANSIT_FACTOR = 2
"""Limit on the device memory of copies in transit, as a multiple of the largest activation.

A copy to the host is in transit until it is complete. A copy back to the device is in transit until it has been used.
The limit holds no matter how far the host runs ahead of the device.
"""


@dataclass(frozen=True)
class PinnedCopy:
    """Copy of a tensor in pinned host memory.

    The copy is split into pieces, because torch rounds up the size of pinned allocations. The piece sizes are chosen so
    that the rounding wastes little memory.

    Attributes:
        pieces: Consecutive pieces, each a 1-d tensor.
        shape: Shape of the tensor.
    """

    pieces: tuple[torch.Tensor, ...]
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Size of the copied tensor in bytes."""
        return sum(piece.nbytes for piece in self.pieces)


class _CopyToHost(NamedTuple):
    """Copy of a tensor to the host that the compute stream has not waited for yet.

    Attributes:
        done: Event that marks the completion of the copy.
        compute_stream: Stream that has computed the tensor.
        source: Device tensor, which must live until the copy is complete.
    """

    done: torch.Event
    compute_stream: torch.Stream
    source: torch.Tensor


class _CopyToDevice(NamedTuple):
    """Copy back to the device whose memory backward may still use.

    Attributes:
        earlier_work: Event that marks the completion of the device work from before the copy.
        num_bytes: Size of the copy.
    """

    earlier_work: torch.Event
    num_bytes: int


class CopyLane:
    """Copier of saved activations between one device and the host. It uses a separate stream if the device has streams.

    Args:
        device: Device to copy from and to.
        has_stream: Whether to use a separate stream. If False, copies run in order with all other work. Default: True.

    Attributes:
        last_fetched: Weak reference to the `ActivationCopy` that was fetched last. Its values stay on the device until
            another one is fetched, because the next backward operation might need them too. None before the first.
    """

    def __init__(self, device: torch.device, has_stream: bool = True) -> None:
        self._device = device
        has_stream = has_stream and hasattr(torch.get_device_module(device), "Stream")
        self._stream = torch.Stream(device) if has_stream else None
        self.last_fetched: weakref.ref[Any] | None = None
        self._largest_bytes = 0  # of all activations so far
        self._copies_to_host: deque[_CopyToHost] = deque()
        self._copies_to_device: deque[_CopyToDevice] = deque()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor | PinnedCopy, torch.Event | None]:
        """Copy a tensor to host memory.

        Returns:
            The copy, and the event that marks its completion. The event is None if the copy is already complete.
        """
        if self._stream is None:
            return tensor.to("cpu", copy=True), None
        row = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        parts = row.split_with_sizes([size // row.itemsize for size in split_into_powers_of_two(row.nbytes)])
        host = PinnedCopy(tuple(torch.empty_like(part, device="cpu", pin_memory=True) for part in parts), tensor.shape)
        compute = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(compute)
        with self._stream:
            for piece, part in zip(host.pieces, parts):
                piece.copy_(part, non_blocking=True)
            ready = self._stream.record_event()
        # The device memory can be reused once the compute stream waits for the copy, even if the host is far ahead.
        self._copies_to_host.append(_CopyToHost(ready, compute, row))
        self._largest_bytes = max(self._largest_bytes, row.nbytes)
        self._wait_for_copies(_TRANSIT_FACTOR * self._largest_bytes)
        return host, ready

    def _wait_for_copies(self, max_bytes: int) -> None:
        """Make the compute stream wait for copies to the host, oldest first, until at most `max_bytes` are in transit.

        Also forget copies that are complete already. Only the compute stream waits. The host does not wait.

        Args:
            max_bytes: Largest total size of the copies that the compute stream has not waited for.
        """
        pending_bytes = sum(copy.source.nbytes for copy in self._copies_to_host)
        while self._copies_to_host and (pending_bytes > max_bytes or self._copies_to_host[0].done.query()):
            copy = self._copies_to_host.popleft()
            copy.compute_stream.wait_event(copy.done)
            pending_bytes -= copy.source.nbytes

    def to_device(self, host: torch.Tensor | PinnedCopy, ready: torch.Event | None) -> torch.Tensor:
        """Start to copy a host copy back to the device. Call `await_arrival` before using the result.

        Args:
            host: Host copy, as returned by `to_host`.
            ready: Event that marks the completion of the copy to the host, or None if that copy is complete.
        """
        if isinstance(host, torch.Tensor):
            return host.to(self._device)
        assert self._stream is not None
        self._wait_for_copies(0)
        earlier_work = torch.accelerator.current_stream(self._device).record_event()
        self._copies_to_device.append(_CopyToDevice(earlier_work, host.nbytes))
        # The copy stream owns this memory, which is free only once the compute stream has used it. So the host waits if
        # it is too far ahead.
        max_bytes = (_TRANSIT_FACTOR + 1) * max(self._largest_bytes, host.nbytes)
        while sum(copy.num_bytes for copy in self._copies_to_device) > max_bytes:
            self._copies_to_device.popleft().earlier_work.synchronize()
        with self._stream:
            if ready is not None:
                self._stream.wait_event(ready)
            lengths = [piece.numel() for piece in host.pieces]
            row = host.pieces[0].new_empty(sum(lengths), device=self._device)
            for part, piece in zip(row.split_with_sizes(lengths), host.pieces):
                part.copy_(piece, non_blocking=True)
            return row.view(host.shape)

    def await_arrival(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the current stream wait until a tensor has been copied back to the device, and return the tensor.

        The method may be called for one tensor on several streams.
        """
        if self._stream is not None:
            compute = torch.accelerator.current_stream(self._device)
            compute.wait_stream(self._stream)
            tensor.record_stream(compute)
        return tensor
