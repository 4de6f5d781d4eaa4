"""What a batch may change before its update, and the way back: gradients, buffers, RNG states, optimizer steps; whole updates too.

Optimizer steps that can be taken back: the first step of an optimizer, while its state comes into being.

Materialising state by a step with zero gradients would not be neutral (weight decay, bias correction, dampening). So the
real step is made, with parameters and prior state saved in host memory, and its temporaries are measured. Where the vote
after it passes, it stands: results are those of the plain optimizer, bit by bit. Where it fails, everything is put back.
Later steps find their state in place, and only the measured temporaries are reserved before the vote. An optimizer that is
not torch's own may keep its state anywhere: its steps are made this way until one of them has left all tensors as they were
in number and size, and again as soon as one does not.

`Rewind` undoes several updates: copies of a run's state in host memory, one every n updates; the last two are kept. A copy is made
between two updates, before the next batch is asked for, and holds what the updates after it change: parameters, optimizer state,
buffers, schedules, RNG states, counters, registered objects. The position in the data is not among them: after going back, the loop
reads on, so that the batches since the copy are left out. The state is then bit for bit that of a run whose data never had them. A
pass over the data draws its order when it begins, which going back would draw again; so the copies of an earlier pass are dropped.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from headway.data.loader import PreparedLoader
from headway.runtime.collectives.tree import map_tensors, tensors
from headway.runtime.device import Hardware
from headway.runtime.seed import read_rng_states, write_rng_states
from headway.strategies.fully_sharded.dtensors import local
from headway.training.hooks import RunParts
from headway.training.prepared.objects import PreparedObjects, held_by


class Rewindable(Protocol):
    """State that knows itself what a rollback covers."""

    def snapshot(self) -> Any:
        """What `restore` needs."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good."""


class BatchSnapshot:
    """The state at the start of a batch.

    Gradients of earlier batches of the window are put aside rather than copied: the batch's own begin at nothing, and both
    are added up before they travel. So a window's later batches hold two sets of gradients, its first one does not.

    Args:
        prepared: models and optimizers.
        states: what else goes back: windows, clock, precision.
        hardware: whose generator belongs to the state.
    """

    def __init__(self, prepared: PreparedObjects, states: Sequence[Rewindable], hardware: Hardware) -> None:
        self._prepared = prepared
        self._rewound = tuple(states)
        self._hardware = hardware
        self._grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._states: list[tuple[Rewindable, Any]] = []
        self._random: dict[str, Any] = {}
        self._is_merged = False

    def take(self) -> None:
        """Remember the present state."""
        self._grads, self._is_merged = [], False
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._grads.append((parameter, parameter.grad))
                parameter.grad = None
        self._take_buffers()
        self._random = read_rng_states(self._hardware)
        self._states = [(each, each.snapshot()) for each in (*self._rewound, *self._prepared.optimizers)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all prepared models, each once."""
        return self._prepared.all_parameters()

    def _take_buffers(self) -> None:
        """Copy buffers, into the copies of the last time where they fit."""
        modules = [module for model in self._prepared.models for module in model.modules() if module._buffers]
        found = [(m._buffers, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        copies = {}
        for _, _, buffer in found:
            known = self._copies.get(id(buffer))
            fits = known is not None and known.shape == buffer.shape and known.dtype == buffer.dtype
            copies[id(buffer)] = known if fits and known is not None else torch.empty_like(buffer)
        self._copies = copies
        self._buffers = [(holder, name, buffer, copies[id(buffer)]) for holder, name, buffer in found]
        if found:
            torch._foreach_copy_([copy for _, _, _, copy in self._buffers], [b.detach() for _, _, b in found])

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """zero_grad was called before the window's first backward: what was put aside is dropped."""
        dropped = set(map(id, held_by(optimizer)))
        self._grads = [(p, grad) for p, grad in self._grads if id(p) not in dropped]

    def merge(self) -> None:
        """Add the gradients put aside to the batch's own, once; they themselves stay as they are."""
        if self._is_merged:
            return
        self._is_merged = True
        both = [(p.grad, grad) for p, grad in self._grads if p.grad is not None]
        for parameter, grad in self._grads:
            if parameter.grad is None:
                parameter.grad = grad.clone()
        if both:
            torch._foreach_add_([own for own, _ in both], [earlier for _, earlier in both])

    def restore(self) -> None:
        """Go back; the snapshot stays good for another attempt."""
        self._is_merged = False
        for parameter in self.parameters():
            parameter.grad = None
        with torch.no_grad():
            for holder, name, buffer, copy in self._buffers:
                holder[name] = buffer
                buffer.copy_(copy)
        write_rng_states(self._random, self._hardware)
        for each, state in self._states:
            each.restore(state)

    def give_back(self) -> None:
        """After `restore`, and without another attempt: gradients of earlier batches lie in the tensors again."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        self.drop()

    def drop(self) -> None:
        """Let go of the gradients that were put aside."""
        self._grads = []


class StepUndo:
    """What an optimizer's step may change, in host memory.

    Args:
        optimizer: torch's, not the prepared one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, _to_host(p)) for p in held_by(optimizer)]
        self._state = {key: map_tensors(_to_host, value) for key, value in optimizer.state.items()}
        self._options = [
            {name: map_tensors(torch.clone, value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}

    def restore(self) -> None:
        """Put everything back."""
        state = self._optimizer.state
        with torch.no_grad():
            for parameter, saved in self._parameters:
                local(parameter).copy_(saved)
            for key in [key for key in state if key not in self._state]:
                del state[key]
            for key, saved in self._state.items():
                state[key] = _put_back(state.get(key), saved, key)
        for group, options in zip(self._optimizer.param_groups, self._options):
            for name in [name for name in group if name != "params" and name not in options]:
                del group[name]
            group.update(options)
        vars(self._optimizer).update(self._numbers)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).detach().to("cpu", copy=True)


def _put_back(live: Any, saved: Any, key: Any) -> Any:
    """The saved value, in the live tensors where they still fit."""
    if isinstance(live, dict) and isinstance(saved, dict):
        for name in [name for name in live if name not in saved]:
            del live[name]
        for name, value in saved.items():
            live[name] = _put_back(live.get(name), value, key)
        return live
    if isinstance(saved, torch.Tensor):
        held = local(live) if isinstance(live, torch.Tensor) else None
        if held is not None and held.shape == saved.shape and held.dtype == saved.dtype:
            held.copy_(saved)
            return live
        # A scalar count stays on the host, as torch's optimizers keep it; the rest belongs beside its parameter.
        return saved.to(key.device) if isinstance(key, torch.Tensor) and saved.ndim else saved
    return saved


class Materialised:
    """Which parameters an optimizer has stepped for, and what a step of it allocates beside its state.

    Args:
        optimizer: torch's, not the prepared one.

    Attributes:
        temporaries: bytes of each block that was alive beside the state when most were, by device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # LBFGS evaluates its closure and keeps a growing history.
        self._is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(
            optimizer, torch.optim.LBFGS
        )
        self._layout: list[tuple[Any, ...]] | None = None
        self._is_steady = self._is_torchs
        self._seen: set[int] = set()
        self.temporaries: dict[torch.device, list[int]] = {}

    @property
    def num_bytes(self) -> int:
        """What a step allocates beside its state, on all devices."""
        return sum(map(sum, self.temporaries.values()))

    @property
    def is_complete(self) -> bool:
        """Would the next step only use state that is there?"""
        return self._is_steady and all(id(p) in self._seen for p in held_by(self._optimizer) if p.grad is not None)

    def measure(self, step: Callable[[], bool]) -> bool:
        """Make the step while counting what it allocates; returns whether it happened."""
        with AllocationMeter() as meter:
            did_step = step()
        found = meter.temporaries()
        if sum(map(sum, found.values())) > self.num_bytes:
            # The host's memory is virtual: it has room for the whole where it has room for the parts.
            self.temporaries = {
                device: [sum(sizes)] if device.type == "cpu" else _together(sizes) for device, sizes in found.items()
            }
        return did_step

    def confirm(self) -> None:
        """The step stands."""
        self._seen.update(id(p) for p in held_by(self._optimizer) if p.grad is not None)
        if not self._is_torchs:
            before, self._layout = self._layout, _layout(self._optimizer)
            self._is_steady = self._layout == before and not isinstance(self._optimizer, torch.optim.LBFGS)

    def reserve(self) -> None:
        """Allocate what a step needs beside its state, and let it go again: a caching allocator keeps it at hand.

        Block by block: the whole as one piece may not be there where all of its parts are.
        """
        blocks = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for device, sizes in self.temporaries.items()
            for size in sizes
        ]
        blocks.clear()


_SMALL = 1 << 20
"""CUDA's allocator cuts smaller requests from blocks of 2 MiB, so that it does not matter how these are cut here."""


def _together(sizes: list[int]) -> list[int]:
    """The sizes, small ones added up to at most `_SMALL`: a model has hundreds of them, and each costs a call."""
    found, rest = [size for size in sizes if size >= _SMALL], 0
    for size in sizes:
        if size < _SMALL:
            if rest + size > _SMALL:
                found.append(rest)
                rest = 0
            rest += size
    return [*found, rest] if rest else found


def _layout(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Size and place of every tensor that the optimizer holds, in its state or in attributes of its own."""
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")}
    options = [[value for name, value in group.items() if name != "params"] for group in optimizer.param_groups]
    held = tensors([list(optimizer.state.values()), options, own])
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in held]


def _strided(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors that have a storage of their own, of sharded ones the parts here; sparse ones consist of others."""
    return (local(tensor) for tensor in tensors(tree) if tensor.layout is torch.strided)


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of tensors made in the block: those alive, and the most that were alive at once.

    Attributes:
        peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held: dict[StorageWeakRef, tuple[torch.device, int]] = {}
        self._at_peak: dict[StorageWeakRef, tuple[torch.device, int]] = {}

    @property
    def live(self) -> int:
        """Bytes of the block's tensors that are still held."""
        self._held = {reference: held for reference, held in self._held.items() if not reference.expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._held.values())

    def temporaries(self) -> dict[torch.device, list[int]]:
        """Bytes of each tensor that was alive at the peak and is gone now, by device."""
        found: dict[torch.device, list[int]] = {}
        for reference, (device, size) in self._at_peak.items():
            if reference.expired():  # type: ignore[no-untyped-call]
                found.setdefault(device, []).append(size)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returned."""
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _strided([args, kwargs or {}])}
        made = [(tensor.untyped_storage(), tensor.device) for tensor in _strided(result)]
        new = {StorageWeakRef(s): (d, s.nbytes()) for s, d in made if s._cdata not in given}  # type: ignore[no-untyped-call]
        if new:
            self._held.update(new)
            live = self.live
            if live > self.peak:
                self.peak, self._at_peak = live, dict(self._held)
        return result


class StateHolder(Protocol):
    """A schedule, or an object that is registered for checkpoints."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state up."""


class RunCopy:
    """The state of a run between two updates.

    Args:
        parts: of the run.
        counters: what else knows itself how to go back.
        others: registered objects.

    Attributes:
        num_updates: so many were made.
    """

    def __init__(self, parts: RunParts, counters: Sequence[Rewindable], others: Sequence[StateHolder]) -> None:
        prepared = parts.prepared
        self.num_updates = parts.clock.num_updates
        self._schedules = list(prepared.schedulers)
        self._windows = parts.windows
        self._weights = parts.windows.snapshot()
        holders: list[StateHolder] = [*(each.scheduler for each in self._schedules), *others]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._optimizers = [StepUndo(each.optimizer) for each in prepared.optimizers]
        self._rest = BatchSnapshot(prepared, (parts.clock, *counters), parts.runtime.hardware)
        self._rest.take()
        self._rest.give_back()

    def restore(self) -> None:
        """Go back; the copy stays good."""
        self._rest.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for holder, state in self._states:
            holder.load_state_dict(copy.deepcopy(state))
        self._windows.restore_weights(self._weights)
        for schedule in self._schedules:
            schedule.catch_up()


@dataclass(eq=False)
class Rewind:
    """Copies the state every `distance` updates, and goes back.

    Args:
        distance: in updates.
        parts: of the run.
        counters: what goes back beside the clock and the prepared optimizers.
        others: the objects that are registered for checkpoints.
    """

    distance: int
    parts: RunParts
    counters: Sequence[Rewindable]
    others: Callable[[], Sequence[StateHolder]]
    _copies: list[RunCopy] = field(default_factory=list, init=False)
    _pass: tuple[int, int] | None = field(default=None, init=False)

    def before_fetch(self, loader: PreparedLoader) -> None:
        """A loader is about to read: is a copy due?"""
        windows = self.parts.windows
        if windows.is_unfinished or windows.num_read:
            return
        if not windows.trained_on or any(each.seed == loader.seed for each in windows.trained_on):
            now = loader.seed, loader.num_passes
            if now != self._pass:
                self._pass = now
                self._copies.clear()
        self._copy_if_due()

    def before_learning(self) -> None:
        """A micro-batch is about to begin, of a loop without a prepared loader perhaps."""
        windows = self.parts.windows
        if not windows.active and not windows.is_unfinished:
            self._copy_if_due()

    def _copy_if_due(self) -> None:
        parts, num = self.parts, self.parts.clock.num_updates
        if parts.prepared.optimizers and (not self._copies or num - self._copies[-1].num_updates >= self.distance):
            self._copies = [*self._copies[-1:], RunCopy(parts, self.counters, self.others())]

    def go_back(self) -> int | None:
        """Go back `distance` to twice `distance` updates, or to the first copy of the pass; returns how many updates that leaves."""
        if not self._copies:
            return None
        del self._copies[1:]
        self._copies[0].restore()
        return self._copies[0].num_updates

    def forget(self) -> None:
        """The run goes on from elsewhere."""
        self._copies, self._pass = [], None
