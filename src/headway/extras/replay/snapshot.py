"""Snapshots that undo a batch, an optimizer step or several updates.

They cover gradients, buffers, RNG states and optimizer state.

An optimizer's first step creates its state. A step with zero gradients would create it too, but would not be neutral
(weight decay, bias correction, dampening). So the real step is made, after parameters and prior state have been copied
to host memory, and its temporary allocations are measured. Then all ranks report whether their batch has succeeded,
which is called a vote. If all have succeeded, the step is kept, so results equal those of the plain optimizer bit for
bit. Otherwise everything is restored. Later steps use the existing state, and only the measured temporary memory is
reserved before the vote. An optimizer from outside torch can keep its state in any attribute. Its steps are made like
first steps until one of them leaves the number and sizes of all tensors unchanged, and again once a step changes them.

`RewindCopies` undoes several updates. It copies a run's state to host memory every n updates and keeps the last two
copies. A copy is made between two updates, before the next batch is requested. It contains what later updates change:
parameters, optimizer state, buffers, schedules, RNG states, counters and registered objects. The position in the
data is not included. After going back, the loop continues to read, so that the batches since the copy are left out. The
state then equals, bit for bit, that of a run whose data never contained them. The order of the data is chosen when a
pass over it begins. Copies from an earlier pass are dropped, because going back to them would choose the order again.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import list_tensors, map_tensors
from headway.core.runtime.device import Hardware
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.prepared.objects import PreparedObjects, iterate_parameters
from headway.core.training.run import Run
from headway.extras._torch import TorchDispatchMode, foreach_add_, foreach_copy_
from headway.extras.moving_average import holds_averages


class Rewindable(Protocol):
    """Interface of an object whose state can be saved and restored, to undo a batch or several updates."""

    def snapshot(self) -> Any:
        """Return a copy of the object's state, which `restore` accepts."""

    def restore(self, snapshot: Any) -> None:
        """Restore the state that `snapshot` returned. A snapshot can be restored more than once."""


class _BufferCopy(NamedTuple):
    """Copy of a buffer of a module.

    Attributes:
        holder: The module's dict of buffers, which contains the buffer under `name`.
        name: Name of the buffer in its module.
        buffer: Buffer tensor, which is put back if the module has replaced it.
        values: Copy of its values.
    """

    holder: dict[str, Any]
    name: str
    buffer: torch.Tensor
    values: torch.Tensor


class BatchSnapshot:
    """Snapshot of the state at the start of a batch: gradients, buffers, RNG states and registered objects.

    Gradients of earlier batches in the accumulation window are moved into the snapshot rather than copied. The
    batch's own gradients start from None, and both are added before they are reduced. So two sets of gradients exist
    during all batches of a window except the first.

    Args:
        prepared: Registry of models and optimizers.
        states: Objects with `snapshot` and `restore`, in addition to the prepared optimizers: accumulation windows,
            update clock, precision.
        hardware: Functions of the device type, whose RNG state is included.
        has_counts: Whether the update counts of the prepared optimizers are included. False if updates that were made
            since stay. Default: True.
    """

    def __init__(
        self, prepared: PreparedObjects, states: Sequence[Rewindable], hardware: Hardware, *, has_counts: bool = True
    ) -> None:
        self._prepared = prepared
        self._has_counts = has_counts
        self._rewindables = tuple(states)
        self._hardware = hardware
        self._grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # of earlier batches in the window
        self._buffers: list[_BufferCopy] = []
        self._states: list[tuple[Rewindable, Any]] = []
        self._rng_states: dict[str, Any] = {}
        self._is_merged = False

    def save_state(self) -> None:
        """Save the current state. Existing gradients are moved into the snapshot, and `grad` becomes None."""
        self._grads, self._is_merged = [], False
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._grads.append((parameter, parameter.grad))
                parameter.grad = None
        self._copy_buffers()
        self._rng_states = read_rng_states(self._hardware)
        optimizers = self._prepared.optimizers if self._has_counts else ()
        self._states = [(each, each.snapshot()) for each in (*self._rewindables, *optimizers)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all prepared models, each once."""
        return self._prepared.list_parameters()

    def _copy_buffers(self) -> None:
        """Copy buffers. The memory of earlier copies is reused if shapes and dtypes fit."""
        earlier_values = {id(each.buffer): each.values for each in self._buffers}
        values_by_id: dict[int, torch.Tensor] = {}  # a buffer of several modules is copied once
        copies = []
        for model in self._prepared.models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is None:
                        continue
                    values = values_by_id.get(id(buffer), earlier_values.get(id(buffer)))
                    if values is None or values.shape != buffer.shape or values.dtype != buffer.dtype:
                        values = torch.empty_like(buffer)
                    values_by_id[id(buffer)] = values
                    copies.append(_BufferCopy(module._buffers, name, buffer, values))
        self._buffers = copies
        if copies:
            foreach_copy_([each.values for each in copies], [each.buffer.detach() for each in copies])

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of earlier batches that the snapshot stores for an optimizer's parameters.

        Needed if `zero_grad` is called before the first backward of an accumulation window.
        """
        dropped = set(map(id, iterate_parameters(optimizer)))
        self._grads = [(p, grad) for p, grad in self._grads if id(p) not in dropped]

    def merge_gradients(self) -> None:
        """Add the stored gradients of earlier batches to those of the batch. Further calls do nothing.

        The stored gradients stay unchanged.
        """
        if self._is_merged:
            return
        self._is_merged = True
        new_grads, earlier_grads = [], []
        for parameter, earlier_grad in self._grads:
            if parameter.grad is None:
                parameter.grad = earlier_grad.clone()
            else:
                new_grads.append(parameter.grad)
                earlier_grads.append(earlier_grad)
        if new_grads:
            foreach_add_(new_grads, earlier_grads)

    def restore(self) -> None:
        """Restore the state that `save_state` saved at the start of the batch. The snapshot can be used again.

        `grad` of each parameter becomes None. `restore_gradients` puts back the gradients of earlier batches.
        """
        self._is_merged = False
        for parameter in self.parameters():
            parameter.grad = None
        with torch.no_grad():
            for copied in self._buffers:
                copied.holder[copied.name] = copied.buffer
                copied.buffer.copy_(copied.values)
        write_rng_states(self._rng_states, self._hardware)
        for each, state in self._states:
            each.restore(state)

    def restore_gradients(self) -> None:
        """Set `grad` of each parameter to the stored gradients of earlier batches.

        Called after `restore` if the batch will not be run again.
        """
        for parameter, grad in self._grads:
            parameter.grad = grad
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Release the stored gradients of earlier batches."""
        self._grads = []


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


def _restore_value(live: Any, saved: Any, key: Any) -> Any:
    """Return the saved value of an optimizer state, copied into the live tensors if they still fit.

    Args:
        live: Current value.
        saved: Value to restore, with tensors in host memory.
        key: Parameter that the state belongs to, which determines the device of new tensors.
    """
    if isinstance(live, dict) and isinstance(saved, dict):
        for name in [name for name in live if name not in saved]:
            del live[name]
        for name, value in saved.items():
            live[name] = _restore_value(live.get(name), value, key)
        return live
    if isinstance(saved, torch.Tensor):
        local = get_local_shard(live) if isinstance(live, torch.Tensor) else None
        if local is not None and local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            return live
        # A scalar count stays on the CPU, as in torch's optimizers; other tensors go to their parameter's device.
        return saved.to(key.device) if isinstance(key, torch.Tensor) and saved.ndim else saved
    return saved


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


_SMALL_BYTES = 1 << 20
"""Size in bytes below which blocks are combined. CUDA's allocator serves smaller requests from segments of 2 MiB."""


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


def _iterate_strided(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in a nested collection, with local shards in place of sharded tensors.

    For a sparse tensor, its index and value tensors are yielded.
    """
    return (get_local_shard(tensor) for tensor in list_tensors(tree) if tensor.layout is torch.strided)


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


class StateHolder(Protocol):
    """Interface of an object with a state dict, such as a scheduler or an object registered for checkpoints."""

    def state_dict(self) -> Any:
        """Return the state that `load_state_dict` accepts."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a state that `state_dict` returned."""


class RunCopy:
    """Copy of a run's state between two updates, to which `RewindCopies` goes back.

    Parameters and optimizer states are copied to host memory, and buffers on their own device. Gradients are not copied.

    Args:
        run: Run of the Accelerator.
        counters: Objects with `snapshot` and `restore`, in addition to the update clock.
        registered: Objects registered for checkpoints.

    Attributes:
        num_updates: Number of updates made at the time of the copy.
    """

    def __init__(self, run: Run, counters: Sequence[Rewindable], registered: Sequence[StateHolder]) -> None:
        prepared = run.prepared
        self.num_updates = run.clock.num_updates
        self._schedulers = list(prepared.schedulers)
        self._windows = run.windows
        self._windows_state = run.windows.snapshot()
        holders: list[StateHolder] = [*(each.scheduler for each in self._schedulers), *registered]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._optimizer_copies = [StepUndo(each.optimizer) for each in prepared.optimizers]
        self._snapshot = BatchSnapshot(prepared, (run.clock, *counters), run.runtime.hardware)
        self._snapshot.save_state()
        self._snapshot.restore_gradients()  # `save_state` has moved them into the snapshot

    def restore(self) -> None:
        """Restore the run's state from the copy. The copy can be restored more than once."""
        self._snapshot.restore()
        for optimizer_copy in self._optimizer_copies:
            optimizer_copy.restore()
        for holder, state in self._states:
            holder.load_state_dict(copy.deepcopy(state))
        self._windows.restore_weights(self._windows_state)
        for scheduler in self._schedulers:
            scheduler.catch_up()


@dataclass(eq=False)
class RewindCopies:
    """Periodic copies of the run's state, with which several updates can be undone.

    Args:
        distance: Number of updates between copies.
        run: Run of the Accelerator.
        counters: Objects to restore in addition to the clock and the prepared optimizers.
        list_registered: Function that returns the objects registered for checkpoints.
    """

    distance: int
    run: Run
    counters: Sequence[Rewindable]
    list_registered: Callable[[], Sequence[StateHolder]]
    _copies: list[RunCopy] = field(default_factory=list, init=False)  # at most two, the older one first
    _pass_key: tuple[int, int] | None = field(default=None, init=False)  # seed of the loader, and its number of passes

    def before_fetch(self, loader: PreparedLoader) -> None:
        """Copy the state if a copy is due, before a loader reads the first batch of an accumulation window.

        When a training loader begins a new pass, drop the copies of earlier passes first.
        """
        windows = self.run.windows
        if windows.is_unfinished or windows.num_unused_reads:
            return
        # Before the first update, it is not known which loaders are for training.
        is_for_training = not windows.trained_on or any(each.seed == loader.seed for each in windows.trained_on)
        pass_key = loader.seed, loader.num_passes
        if is_for_training and pass_key != self._pass_key:
            self._pass_key = pass_key
            self._copies.clear()
        self._copy_if_due()

    def before_learning(self) -> None:
        """Copy the state before a micro-batch if a copy is due and the loop uses no prepared loader."""
        windows = self.run.windows
        if not windows.active and not windows.is_unfinished:
            self._copy_if_due()

    def _copy_if_due(self) -> None:
        run, num_updates = self.run, self.run.clock.num_updates
        if holds_averages(run):  # the copy would hold averaged weights in place of the trained ones
            return
        is_due = not self._copies or num_updates - self._copies[-1].num_updates >= self.distance
        if is_due and run.prepared.optimizers:
            self._copies = [*self._copies[-1:], RunCopy(run, self.counters, self.list_registered())]

    def undo_updates(self) -> int | None:
        """Restore the older of the two kept copies of the run's state.

        This undoes between `distance` and twice `distance` updates, or fewer if the current pass over the data began
        more recently.

        Returns:
            Number of updates of the restored state, or None if there is no copy.
        """
        if not self._copies:
            return None
        del self._copies[1:]
        self._copies[0].restore()
        return self._copies[0].num_updates

    def drop_copies(self) -> None:
        """Drop all copies, because the run continues from another state, such as a loaded checkpoint."""
        self._copies, self._pass_key = [], None
