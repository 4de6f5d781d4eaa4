"""Values on their way from a device to the host: asked for now, read later, so that the host need not wait in between."""

from typing import Any

import torch


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
