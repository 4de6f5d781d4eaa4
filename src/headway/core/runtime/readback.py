"""Delayed reads of device values, which are copied asynchronously and read later, so that the host need not wait."""

from typing import Any

import torch


class Readback:
    """Copy of a small tensor's current value, made asynchronously and read later.

    A tensor on an accelerator is copied after the work queued in the current stream. If the host queues more work
    before it reads the value, the copy has usually arrived. Otherwise the host waits while the device keeps working.
    On a device without events the copy is synchronous.

    Args:
        tensor: Tensor to read. It may change afterwards.
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
    def is_ready(self) -> bool:
        """Whether the copy has arrived, so that the value can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        """Return the value as a CPU tensor. If the copy has not arrived, wait for it first."""
        if not self.is_ready:
            self._event.synchronize()
        return self._value
