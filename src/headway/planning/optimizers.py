"""The optimizers that a plan knows by name.

Those whose own update cannot run on tensors without values are made so that it can; on real tensors they are what they were.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headway.common.optional import require
from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.forecasting.tracing.step import MakeOptimizer
from headway.forecasting.tracing.tensors import plain


class _ReadAsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where a value is read, it is one: right where it only scales an update, and decides nothing about memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def reading(base: Any, **options: Any) -> MakeOptimizer:
    """An optimizer that reads the sizes of its steps from tensors: what it reads decides nothing about memory."""

    class Reading(base):
        def step(self, closure: Any = None) -> Any:
            with _ReadAsOne():  # type: ignore[no-untyped-call]
                return super().step(closure)

    return lambda parameters: Reading(list(parameters), **options)


def adafactor_of_transformers(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """transformers' own Adafactor, as its Trainer's optim="adafactor" makes it."""
    transformers = require("transformers", "optimizer='adafactor_transformers' needs", "transformers")
    return reading(transformers.Adafactor, scale_parameter=False, relative_step=False, lr=1e-3)(parameters)


def adamw8bit(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """torchao's: its update is compiled, one parameter after the other, which tensors without values cannot go through.

    In its place stands what the compiled update asks for on a CPU: both moments of the parameter in float32.
    """
    found = require("torchao.optim", "optimizer='adamw8bit' needs", "torchao")
    from torchao.optim import subclass_8bit

    with _disable_current_modes():  # tables of its codes, which it reads value by value and keeps
        subclass_8bit.get_qmap_signed()
        subclass_8bit.get_qmap_unsigned()

    class UncompiledAdamW8bit(found.AdamW8bit):  # type: ignore[name-defined]
        def step(self, closure: Any = None) -> Any:
            own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
            if not any(isinstance(part, FakeTensor) for each in own for part in plain(each)):
                return super().step(closure)
            with torch.no_grad():
                for parameter in own:
                    self._update(parameter)
            return None

        def _update(self, parameter: torch.Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            moments = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
            del moments

    return UncompiledAdamW8bit(list(parameters))


def adamw8bit_of_bitsandbytes(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """bitsandbytes' AdamW8bit; what its kernel needs is in the tables of `forecasting/device/kernels.py`."""
    bitsandbytes = require("bitsandbytes", "optimizer='adamw8bit_bnb' needs", "bitsandbytes")

    class TabulatedAdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[name-defined]
        def fill_qmap(self) -> None:
            with _disable_current_modes():  # tables of its codes, which it makes value by value
                super().fill_qmap()

    return TabulatedAdamW8bit(list(parameters))


class MuonAndAdamW(optim.Optimizer):
    """torch's Muon for matrices, which takes nothing else, and AdamW for all others."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        own = list(parameters)
        super().__init__(own, {})
        matrices, others = [each for each in own if each.dim() == 2], [each for each in own if each.dim() != 2]
        self.parts: list[optim.Optimizer] = [optim.Muon(matrices)] if matrices else []
        self.parts += [optim.AdamW(others)] if others else []
        # The parts' own: what is said of a group is said to its optimizer.
        self.param_groups = list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of both."""
        for part in self.parts:
            part.step(closure)
            self.state.update(part.state)


Optimizer = str | MakeOptimizer

# What they keep does not depend on rates.
_MAKERS: dict[str, MakeOptimizer] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "adafactor": reading(optim.Adafactor),
    "adafactor_transformers": adafactor_of_transformers,
    "adamw8bit": adamw8bit,
    "adamw8bit_bnb": adamw8bit_of_bitsandbytes,
    "muon": MuonAndAdamW,
}

_CAVEATS = {
    "adamw8bit": "torchao compiles AdamW8bit's update, and compiled code cannot run here: two float32 copies of one parameter at a "
    "time are counted, which is what it takes on a CPU; on a GPU it may take less",
    "adamw8bit_bnb": "the kernel of bitsandbytes' AdamW8bit is assumed to need no memory of its own on a GPU, as its source says; "
    "this was not measured",
}


def maker(optimizer: Optimizer) -> MakeOptimizer | None:
    """What makes the optimizer from parameters; None for "none".

    Raises:
        ConfigError: a name that is not known.
    """
    if callable(optimizer):
        return optimizer
    if optimizer == "none":
        return None
    if optimizer not in _MAKERS:
        known = [*_MAKERS, "none"]
        hint = did_you_mean(str(optimizer), known)
        raise ConfigError(
            f"optimizer={optimizer!r} is unknown{hint or ';'} allowed: {', '.join(known)}; from Python, also a function that takes "
            "parameters and returns an optimizer"
        )
    return _MAKERS[optimizer]


def caveats(optimizer: Optimizer) -> tuple[str, ...]:
    """What a forecast with an optimizer of that name cannot vouch for."""
    return (_CAVEATS[optimizer],) if isinstance(optimizer, str) and optimizer in _CAVEATS else ()
