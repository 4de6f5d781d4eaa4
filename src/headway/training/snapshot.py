"""What a batch may change before its update is made, and the way back: gradients, buffers, random streams, counters."""

from dataclasses import replace
from typing import Any

import torch

from headway.precision.base import Precision
from headway.runtime.device import Hardware
from headway.runtime.streams import read_streams, write_streams
from headway.training.accumulation import Accumulation
from headway.training.clock import Clock
from headway.training.prepare import Preparation


class Snapshot:
    """The state at the start of a batch.

    Gradients of earlier batches of the window are put aside rather than copied: the batch's own begin at nothing, and both
    are added up before they travel. So a window's later batches hold two sets of gradients, its first one does not.

    Args:
        accumulation: windows and their weights.
        preparation: models, optimizers and schedules.
        precision: the fp16 scaler, where there is one.
        clock: counts updates.
        hardware: whose random stream belongs to the state.
    """

    def __init__(self, accumulation: Accumulation, preparation: Preparation, precision: Precision, clock: Clock,
                 hardware: Hardware) -> None:  # fmt: skip
        self._accumulation = accumulation
        self._preparation = preparation
        self._precision = precision
        self._clock = clock
        self._hardware = hardware
        self._grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._windows: dict[int, Any] = {}
        self._counters: list[tuple[Any, dict[str, Any]]] = []
        self._random: dict[str, Any] = {}
        self._scaler: Any = None
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
        self._scaler = self._precision.snapshot()
        accumulation = self._accumulation
        self._windows = {id(window): replace(window) for window in accumulation.windows}
        self._counters = [
            (accumulation, {name: getattr(accumulation, name) for name in ("current", "is_last", "num_windows")}),
            (self._clock, dict(vars(self._clock))),
        ]
        for optimizer in self._preparation.optimizers:
            self._counters.append((optimizer, {name: getattr(optimizer, name) for name in
                                               ("num_updates", "step_was_skipped", "last_window_length")}))  # fmt: skip

    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all prepared models, each once."""
        held = self._accumulation.parameters.values()
        return list({id(p): p for parameters in held for p in parameters}.values())

    def _take_buffers(self) -> None:
        """Copy buffers, into the copies of the last time where they fit."""
        modules = [module for model in self._preparation.models for module in model.modules() if module._buffers]
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
        self._precision.restore(self._scaler)
        for window in list(self._accumulation.windows):
            saved = self._windows.get(id(window))
            if saved is None:
                self._accumulation.forget(window)
            else:
                vars(window).update(vars(saved))
        for owner, values in self._counters:
            for name, value in values.items():
                setattr(owner, name, value)

    def give_back(self) -> None:
        """After `restore`, and without another attempt: gradients of earlier batches lie in the tensors again."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        self.drop()

    def drop(self) -> None:
        """Let go of the gradients that were put aside."""
        self._grads = []
