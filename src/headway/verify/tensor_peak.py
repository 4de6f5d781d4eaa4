"""`TensorPeak`: measures the peak memory of tensors, to compare it with a forecast.

On a CPU, the resident memory of a process includes libraries and caches, which a forecast of tensors does not. So
torch's profiler counts the bytes of tensors on a CPU.
"""

from collections.abc import Iterable
from typing import Any

import torch


class TensorPeak:
    """Measurement of the largest number of bytes in tensors, from the creation of this object until `stop` is called.

    On a CUDA device, the bytes are those that torch's allocator has allocated on this device.

    Args:
        device: Device of the run: a CUDA device or a CPU.
        existing: Tensors that exist before the measurement.
    """

    def __init__(self, device: torch.device, existing: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._profile: Any = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        storages = [each.untyped_storage() for each in existing]
        self._bytes_at_start = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        self._profile = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True)
        self._profile.__enter__()

    def stop(self) -> int:
        """End the measurement, and return the peak in bytes."""
        if self._profile is None:
            return int(torch.cuda.max_memory_allocated(self._device))
        self._profile.__exit__(None, None, None)
        in_use = peak = self._bytes_at_start
        events = [event for event in self._profile.kineto_results.events() if event.name() == "[memory]"]
        # The profiler does not return the events of several threads in the order of time.
        for event in sorted(events, key=lambda each: each.start_ns()):
            in_use += event.nbytes()  # negative when memory is freed
            peak = max(peak, in_use)
        return int(peak)
