"""What autograd saves for backward, kept in host memory meanwhile: copied on a stream of its own, beside the compute."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from headway import scope

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: copying them costs more than they take."""


@dataclass
class Parked:
    """A tensor in host memory, and where it belongs.

    Attributes:
        host: the copy, in pinned memory where the device can use that.
        device: where backward wants it.
        ready: set when the copy to the host is complete; None where copies are not asynchronous.
    """

    host: torch.Tensor
    device: torch.device
    ready: torch.Event | None


def offloading(min_bytes: int = MIN_BYTES) -> AbstractContextManager[Any]:
    """A context in which what autograd saves goes to host memory, and comes back when backward asks for it.

    Left on the device: parameters and their views (they stay there anyway), tensors below `min_bytes`, sparse ones and
    tensors that are on the host already.

    Args:
        min_bytes: from which size on.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | Parked:
        return _park(tensor) if _is_worth_it(tensor, min_bytes) else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, _fetch)


def _is_worth_it(tensor: torch.Tensor, min_bytes: int) -> bool:
    # A weight is saved as a view of the parameter (e.g. its transpose).
    base = tensor if tensor._base is None else tensor._base
    is_weight = isinstance(base, torch.nn.Parameter)
    return (
        tensor.device.type != "cpu" and not is_weight and tensor.layout is torch.strided and tensor.nbytes >= min_bytes
    )


class _Lanes(dict[torch.device, torch.Stream]):
    """Each device's stream for these copies, made on first use."""

    def __missing__(self, device: torch.device) -> torch.Stream:
        """Make it."""
        self[device] = stream = torch.Stream(device)
        return stream


def _park(tensor: torch.Tensor) -> Parked:
    lane, compute = scope.own(_Lanes)[tensor.device], torch.accelerator.current_stream(tensor.device)
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    lane.wait_stream(compute)
    with lane:
        host.copy_(tensor, non_blocking=True)
        ready = lane.record_event()
    # The allocator must not give the tensor's memory away before the copy has read it.
    tensor.record_stream(lane)
    return Parked(host, tensor.device, ready)


def _fetch(saved: torch.Tensor | Parked) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    lane, compute = scope.own(_Lanes)[saved.device], torch.accelerator.current_stream(saved.device)
    with lane:
        if saved.ready is not None:
            lane.wait_event(saved.ready)
        tensor = saved.host.to(saved.device, non_blocking=True)
    compute.wait_stream(lane)
    tensor.record_stream(compute)
    return tensor
