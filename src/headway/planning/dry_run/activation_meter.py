"""Measure the memory that autograd keeps from forward to backward, in a dry run."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.planning.dry_run.meter import StepMeter


class ActivationMeter:
    """Meter of the memory that autograd keeps for backward. Each storage counts once.

    Args:
        meter: Meter of the step, which lists the storages of gathered parameters.
        model_tensors: Parameters and buffers of the model, which do not count.
        tracker: Tracker of all tensors, including those that selective checkpointing keeps outside of autograd.

    Attributes:
        peak: Largest number of bytes kept at once so far.
    """

    def __init__(self, meter: StepMeter, model_tensors: list[torch.Tensor], tracker: StorageTracker) -> None:
        self._meter = meter
        self._tracker = tracker
        self._model_tensors = model_tensors
        # References keep these storages alive, so that their addresses are not reused.
        storages = [get_local_shard(tensor).untyped_storage() for tensor in model_tensors]
        self._model_storages = {storage._cdata: storage for storage in storages}
        self._sizes: dict[int, int] = {}  # by address of the storage, like `_num_saved`
        self._num_saved: Counter[int] = Counter()  # number of nodes that have saved a tensor of the storage
        self._kept_bytes = 0
        self.peak = 0

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Return a context in which tensors saved by autograd are recorded."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _SavedTensor(tensor, self), lambda kept: kept.tensor
        ):
            yield

    def keep_tensor(self, tensor: torch.Tensor) -> int:
        """Record that a node of the autograd graph saves a tensor.

        Returns:
            The address of the tensor's storage, or 0 if the tensor does not count.
        """
        storage = get_local_shard(tensor).untyped_storage()
        address: int = storage._cdata
        if address in self._model_storages or address in self._meter.gathered:
            return 0
        if not self._num_saved[address]:
            self._sizes[address] = storage.nbytes()
            self._kept_bytes += self._sizes[address]
        self._num_saved[address] += 1
        self.peak = max(self.peak, self._kept_bytes)
        return address

    def release_tensor(self, address: int) -> None:
        """Record that a node of the autograd graph has released the storage at the given address."""
        self._num_saved[address] -= 1
        if not self._num_saved[address]:
            del self._num_saved[address]
            self._kept_bytes -= self._sizes.pop(address)

    def end_forward(self, loss: torch.Tensor) -> None:
        """Count all memory that forward has allocated and not freed as activations, and set `peak` to its size.

        Args:
            loss: Loss that forward returned, which does not count.
        """
        self._tracker.mark_tensors(self._model_tensors, "weights")  # FSDP pads parameters anew in its first forward
        self._tracker.mark_tensors([loss], "temporaries")
        self._tracker.mark_activations()
        self.peak = self._tracker.count_held_bytes("activations")

    def reset_peak(self) -> None:
        """Reset the peak to the number of bytes that are kept at this time."""
        self.peak = self._kept_bytes


class _SavedTensor:
    """Tensor that a node of the autograd graph has saved.

    When the node releases the tensor, the meter is notified.
    """

    __slots__ = ("_address", "_meter", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter) -> None:
        self.tensor = tensor
        self._meter = meter
        self._address = meter.keep_tensor(tensor)

    def __del__(self) -> None:
        if self._address:
            self._meter.release_tensor(self._address)
