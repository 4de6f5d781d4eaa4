"""Undo an optimizer step, and measure the temporary memory that it allocates.

An optimizer's first step creates its state. A step with zero gradients would create it too, but would not be neutral
(weight decay, bias correction, dampening). So the real step is made, after parameters and prior state have been copied
to host memory, and its temporary allocations are measured. Then all ranks report whether their batch has succeeded,
which is called a vote. If all have succeeded, the step is kept, so results equal those of the plain optimizer bit for
bit. Otherwise everything is restored. Later steps use the existing state, and only the measured temporary memory is
reserved before the vote. An optimizer from outside torch can keep its state in any attribute. Its steps are made like
first steps until one of them leaves the number and sizes of all tensors unchanged, and again once a step changes them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway.core.runtime.collectives.tree import list_tensors, map_tensors
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.prepared.objects import iterate_parameters
from headway.extras._torch import TorchDispatchMode

_SMALL_BYTES = 1 << 20
"""Size in bytes below which blocks are combined. CUDA's allocator serves smaller requests from segments of 2 MiB."""


class StepUndo:
    """Host-memory copy of everything that an optimizer step can change, so that the step can be undone.

    Args:
        optimizer: torch's own optimizer, not the prepared one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, _to_host(p)) for p in iterate_parameters(optimizer)]
        self._state = {key: map_tensors(_to_host, value) for key, value in optimizer.state.items()}
        self._options = [
            {name: map_tensors(torch.clone, value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        # Such as a step counter. Attributes of other types are not expected to change.
        self._numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}

    def restore(self) -> None:
        """Restore the optimizer's parameters, state, options and numeric attributes to their values before the step."""
        state = self._optimizer.state
        with torch.no_grad():
            for parameter, saved in self._parameters:
                get_local_shard(parameter).copy_(saved)
            for key in [key for key in state if key not in self._state]:
                del state[key]
            for key, saved in self._state.items():
                state[key] = _restore_value(state.get(key), saved, key)
        for group, options in zip(self._optimizer.param_groups, self._options):
            for name in [name for name in group if name != "params" and name not in options]:
                del group[name]
            group.update(options)
        vars(self._optimizer).update(self._numbers)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return get_local_shard(tensor).detach().to("cpu", copy=True)


def _restore_value(live: Any, saved: Any, parameter: Any) -> Any:
    """Return the saved value of an optimizer state, copied into the live tensors if they still fit.

    Args:
        live: Current value.
        saved: Value to restore, with tensors in host memory.
        parameter: Key of the state: the parameter that it belongs to, or another object. Tensors that do not fit are
            moved to the parameter's device.
    """
    if isinstance(live, dict) and isinstance(saved, dict):
        for name in [name for name in live if name not in saved]:
            del live[name]
        for name, value in saved.items():
            live[name] = _restore_value(live.get(name), value, parameter)
        return live
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(live, torch.Tensor):
        local = get_local_shard(live)
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return live
    # A scalar count stays on the CPU, as in torch's optimizers.
    is_scalar = saved.ndim == 0
    return saved if is_scalar or not isinstance(parameter, torch.Tensor) else saved.to(parameter.device)


class OptimizerRecord:
    """Record of which parameters of an optimizer have state, and of the temporary memory that its step allocates.

    Args:
        optimizer: torch's own optimizer, not the prepared one.

    Attributes:
        temporaries: Sizes in bytes of the temporary blocks at the peak of a step, by device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # torch's optimizers create all state of a parameter in its first step. LBFGS keeps a growing history.
        is_from_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        self._has_fixed_state = is_from_torch and not isinstance(optimizer, torch.optim.LBFGS)
        # Of other optimizers: descriptions of all tensors after the last step, and whether that step left them unchanged.
        self._tensor_layout: list[tuple[Any, ...]] | None = None
        self._is_steady = self._has_fixed_state
        self._stepped_ids: set[int] = set()  # `id` of each parameter that has been updated
        self.temporaries: dict[torch.device, list[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of a step's temporary allocations on all devices."""
        return sum(map(sum, self.temporaries.values()))

    @property
    def is_complete(self) -> bool:
        """Whether the optimizer already has all state that its next step uses."""
        return self._is_steady and all(
            id(p) in self._stepped_ids for p in iterate_parameters(self._optimizer) if p.grad is not None
        )

    def measure_step(self, step: Callable[[], bool]) -> bool:
        """Run the optimizer step. Store its temporary allocations in `temporaries` if their total exceeds the stored total."""
        with AllocationMeter() as meter:
            did_step = step()
        measured = meter.list_temporaries()
        if sum(map(sum, measured.values())) > self.num_bytes:
            # Host memory is virtual: if the parts fit, so does one block of their total size.
            self.temporaries = {
                device: [sum(sizes)] if device.type == "cpu" else _combine_small(sizes)
                for device, sizes in measured.items()
            }
        return did_step

    def confirm_step(self) -> None:
        """Record that the last step is kept: each parameter that has a gradient now also has optimizer state.

        Call it before the gradients are cleared. For an optimizer from outside torch, also record whether the step left the
        number and the sizes of all tensors unchanged (see `is_complete`).
        """
        self._stepped_ids.update(id(p) for p in iterate_parameters(self._optimizer) if p.grad is not None)
        if not self._has_fixed_state:
            old_layout, self._tensor_layout = self._tensor_layout, _describe_tensors(self._optimizer)
            self._is_steady = self._tensor_layout == old_layout and not isinstance(self._optimizer, torch.optim.LBFGS)

    def reserve_memory(self) -> None:
        """Allocate and free as much memory as a step temporarily needs, so that a caching allocator keeps it available.

        The blocks are allocated one by one, because they might fit where one block of their total size does not.
        """
        blocks = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for device, sizes in self.temporaries.items()
            for size in sizes
        ]
        blocks.clear()


def _combine_small(sizes: list[int]) -> list[int]:
    """Combine small blocks into blocks of up to `_SMALL_BYTES` bytes, and return the sizes of all blocks.

    A model has hundreds of small blocks, and each allocation costs a call.
    """
    blocks = [size for size in sizes if size >= _SMALL_BYTES]
    combined = 0
    for size in sizes:
        if size < _SMALL_BYTES:
            if combined + size > _SMALL_BYTES:
                blocks.append(combined)
                combined = 0
            combined += size
    return [*blocks, combined] if combined else blocks


def _describe_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Return the shape, dtype and device of every tensor in an optimizer's state, options and attributes.

    An equal list before and after a step shows that the step has created no state.
    """
    attributes = {
        name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")
    }
    options = [[value for name, value in group.items() if name != "params"] for group in optimizer.param_groups]
    tensors = list_tensors([list(optimizer.state.values()), options, attributes])
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class AllocationMeter(TorchDispatchMode):
    """Dispatch mode that measures the bytes of the tensors created while it is active: the current sum and its peak.

    Attributes:
        peak: Peak in bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        # Device and size in bytes of each storage: those that exist now, and those that existed at the peak.
        self._live_storages: dict[StorageWeakRef, tuple[torch.device, int]] = {}
        self._peak_storages: dict[StorageWeakRef, tuple[torch.device, int]] = {}

    def count_live_bytes(self) -> int:
        """Return the current total bytes of the tensors that were created while the mode was active."""
        storages = self._live_storages.items()
        self._live_storages = {reference: entry for reference, entry in storages if not reference.expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._live_storages.values())

    def list_temporaries(self) -> dict[torch.device, list[int]]:
        """Return the sizes in bytes of the tensors that existed at the peak and have been freed since, by device."""
        sizes: dict[torch.device, list[int]] = {}
        for reference, (device, size) in self._peak_storages.items():
            if reference.expired():  # type: ignore[no-untyped-call]
                sizes.setdefault(device, []).append(size)
        return sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record new storages in its result."""
        result = func(*args, **(kwargs or {}))
        input_keys = {tensor.untyped_storage()._cdata for tensor in _iterate_strided([args, kwargs or {}])}
        has_new = False
        for tensor in _iterate_strided(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in input_keys:  # neither a view nor changed in place
                self._live_storages[StorageWeakRef(storage)] = tensor.device, storage.nbytes()  # type: ignore[no-untyped-call]
                has_new = True
        if has_new:
            live_bytes = self.count_live_bytes()
            if live_bytes > self.peak:
                self.peak, self._peak_storages = live_bytes, dict(self._live_storages)
        return result


def _iterate_strided(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in a nested collection, with local shards in place of sharded tensors.

    For a sparse tensor, its index and value tensors are yielded.
    """
    return (get_local_shard(tensor) for tensor in list_tensors(tree) if tensor.layout is torch.strided)
