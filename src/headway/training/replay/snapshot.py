"""What a batch may change before its update is made, and the way back: gradients, buffers, random streams, counters."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from headway.runtime.device import Hardware
from headway.runtime.seed import read_streams, write_streams
from headway.training.prepared.objects import PreparedObjects


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
        hardware: whose random stream belongs to the state.
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
        self._random = read_streams(self._hardware)
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
        dropped = {id(p) for group in optimizer.param_groups for p in group["params"]}
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
        write_streams(self._random, self._hardware)
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
