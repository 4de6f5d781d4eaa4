"""Trace offloaded activations without counting host memory as memory of the traced device.

Fake tensors of the host and of the device are both on the CPU. So the trace replaces the code that copies activations
between them.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch

from headway.core.config.engines import EngineOptions
from headway.extras.activation_offload import OffloadSettings, StorageNumbers, replace_settings
from headway.extras.copy_lane import CopyLane, PinnedCopy
from headway.planning._torch import FakeTensor, disable_current_modes


class TracedLane(CopyLane):
    """Replacement for `CopyLane` in a trace of fake tensors. It copies activations between device and host.

    A tensor that is copied to the host stays on the device until the next copy starts or a tensor is copied back. Host
    tensors are created outside of the trace, so they do not count.

    Args:
        device: CPU device that represents the GPU in the trace.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, has_stream=False)
        self._under_way: torch.Tensor | None = None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return a host tensor with the shape of the given one, and None, because there is no copy to wait for.

        In the trace, the host tensor takes no memory on the device.
        """
        assert isinstance(tensor, FakeTensor)
        with disable_current_modes(), tensor.fake_mode:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._under_way = tensor
        return host, None

    def to_device(self, host: torch.Tensor | PinnedCopy, ready: Any) -> torch.Tensor:
        """Return a copy of the host tensor on the device. `ready` is ignored, because there is no copy to wait for."""
        self._under_way = None
        assert isinstance(host, torch.Tensor)
        return host.clone()


class TracedNumbers(StorageNumbers):
    """Source of unique numbers for storages, which identify offloaded activations during a trace.

    The real implementation keeps a reference to a storage, so that its address stays unique. In a trace, such a
    reference would keep the storage from being recorded as freed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by address of the storage
        self._next = count()

    def get_number(self, storage: torch.UntypedStorage) -> int:
        """Return the unique number that identifies a storage. Numbers are never reused."""
        reference, number = self._known.get(storage._cdata, (None, 0))
        # A new storage can have the address of a freed one.
        if reference is None or reference() is not storage:
            number = next(self._next)
            self._known[storage._cdata] = weakref.ref(storage), number
        return number

    def hold_storage(self, storage: torch.UntypedStorage) -> None:
        """Do nothing, because numbers are never reused."""


def offloads_activations(options: EngineOptions) -> bool:
    """Whether the options offload activations to host memory."""
    return options.checkpointing is not None and options.checkpointing.offload


def trace_offloading(options: EngineOptions) -> AbstractContextManager[None]:
    """Return a context in which offloaded activations do not count as memory of the traced device.

    Only the activation that is being copied counts. The context does nothing if the options do not offload activations.
    """
    if not offloads_activations(options):
        return nullcontext()
    return replace_settings(OffloadSettings(TracedLane, FakeTensor, TracedNumbers(), offloads_cpu_tensors=True))
