"""Activations that a trace moves to host memory: gone from the device, but for the copy under way."""

import weakref
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from headway.training.transforms.activation_offload import CopyLane, Host, Names, Ways, pretending


class TracedLane(CopyLane):
    """Copies of tensors without values; those on the host are made where no trace sees them.

    The tensor that is being copied stays on the device until the next one is, or until something is fetched.

    Args:
        device: the one that stands for the card.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, has_stream=False)
        self._under_way: torch.Tensor | None = None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """A tensor of the same shape that takes nothing of the device."""
        assert isinstance(tensor, FakeTensor)
        with _disable_current_modes(), tensor.fake_mode:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._under_way = tensor
        return host, None

    def to_device(self, host: torch.Tensor | Host, ready: Any) -> torch.Tensor:
        """A tensor on the device again."""
        self._under_way = None
        assert isinstance(host, torch.Tensor)
        return host.clone()


class Numbers(Names):
    """Numbers of storages, each given once: where an address were held, a trace would not see the storage go."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._next = count()

    def of(self, storage: torch.UntypedStorage) -> int:
        """The storage's own number."""
        found = self._known.get(storage._cdata)
        if found is None or found[0]() is not storage:
            found = self._known[storage._cdata] = weakref.ref(storage), next(self._next)
        return found[1]

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Nothing: no number is given twice."""


def moved_to_host() -> AbstractContextManager[None]:
    """A block in which activations that are to be offloaded leave the traced device."""
    return pretending(Ways(TracedLane, FakeTensor, Numbers(), from_host=True))
