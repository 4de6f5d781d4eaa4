"""Make the optimizers that a plan or a forecast supports by name.

The memory of their state is traced, not computed: `headway.forecasting` runs each optimizer's `step` on fake tensors.
Optimizers that cannot update tensors without values are replaced by versions that can. On real tensors, these versions
compute the same results as the originals.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn, optim

from headway.common.optional import require
from headway.core.config.values import suggest_word
from headway.core.training.forecast_types import MakeOptimizer
from headway.errors import ConfigError
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.planning._torch import FakeTensor, disable_current_modes

Optimizer = str | MakeOptimizer
"""Name of an optimizer, or a function that makes one from parameters."""
_TORCHAO_CAVEAT = (
    "torchao compiles its update, and compiled code cannot run here: two float32 copies of one parameter at a time are counted, "
    "which is what it takes on a CPU; on a GPU it may take less"
)
_CAVEATS = {
    **dict.fromkeys(("adamw8bit", "adamw4bit", "adamwfp8"), _TORCHAO_CAVEAT),
    "adamw8bit_bnb": "the kernel of bitsandbytes' AdamW8bit is assumed to need no scratch memory on a GPU, as in its source code; "
    "this was not measured",
}
"""Assumption of a forecast with an optimizer, as a sentence, by the optimizer's name."""


def make_transformers_adafactor(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make transformers' own Adafactor, with the arguments of its Trainer's `optim="adafactor"`.

    Raises:
        OptionalDependencyMissing: If transformers is not installed.
    """
    transformers = require("transformers", "optimizer='adafactor_transformers' needs", "transformers")
    adafactor: optim.Optimizer = transformers.Adafactor(
        list(parameters), scale_parameter=False, relative_step=False, lr=1e-3
    )
    return adafactor


def make_torchao_adamw(parameters: Iterable[nn.Parameter], name: str = "AdamW8bit") -> optim.Optimizer:
    """Make a torchao AdamW with low-bit states, whose update also runs on tensors without values.

    torchao compiles the update of each parameter, which fake tensors do not support. For fake tensors, the replacement
    only allocates the memory that the compiled update needs on a CPU: both moments of the parameter in float32.

    Args:
        parameters: Parameters of the optimizer.
        name: Name of torchao's class: "AdamW8bit", "AdamW4bit" or "AdamWFp8".

    Raises:
        OptionalDependencyMissing: If torchao is not installed.
    """
    torchao_optim = require("torchao.optim", f"optimizer={name.lower()!r} needs", "torchao")
    from torchao.optim import subclass_4bit, subclass_8bit

    with disable_current_modes():  # torchao caches these quantization tables and reads their values
        for module in (subclass_4bit, subclass_8bit):
            module.get_qmap_signed()
            module.get_qmap_unsigned()
    base: Any = getattr(torchao_optim, name)

    class UncompiledAdamW(base):
        def step(self, closure: Any = None) -> Any:
            own_parameters = [each for group in self.param_groups for each in group["params"]]
            plain_tensors = (part for each in own_parameters for part in iterate_plain_tensors(each))
            if not any(isinstance(part, FakeTensor) for part in plain_tensors):
                return super().step(closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                for parameter in own_parameters:
                    if parameter.grad is not None:
                        self._update_parameter(parameter)
            return loss

        def _update_parameter(self, parameter: torch.Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            # Both are in memory at once, and freed when the update of this parameter ends.
            moments = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
            del moments

    return UncompiledAdamW(list(parameters))


def make_bitsandbytes_adamw(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Make bitsandbytes' AdamW8bit. The scratch memory of its kernel is modeled in `forecasting/device/memory_rules.py`.

    Raises:
        OptionalDependencyMissing: If bitsandbytes is not installed.
    """
    bitsandbytes = require("bitsandbytes", "optimizer='adamw8bit_bnb' needs", "bitsandbytes")

    class TabulatedAdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[name-defined]
        def fill_qmap(self) -> None:
            with disable_current_modes():  # bitsandbytes computes these quantization tables value by value
                super().fill_qmap()

    return TabulatedAdamW8bit(list(parameters))


class MuonAndAdamW(optim.Optimizer):
    """Optimizer that uses torch's Muon for matrices, and AdamW for all other parameters, which Muon does not accept."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        all_parameters = list(parameters)
        super().__init__(all_parameters, {})
        matrices = [each for each in all_parameters if each.dim() == 2]
        not_matrices = [each for each in all_parameters if each.dim() != 2]
        self.parts: list[optim.Optimizer] = []
        if matrices:
            self.parts.append(optim.Muon(matrices))
        if not_matrices:
            self.parts.append(optim.AdamW(not_matrices))
        # The groups are those of the inner optimizers, so that changes to a group reach the optimizer that uses it.
        self.param_groups = list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self, closure: Any = None) -> Any:
        """Update the parameters with both optimizers. The closure, if any, is called once, before both updates."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        self.collect_state()
        return loss

    def collect_state(self) -> None:
        """Add the state of the inner optimizers to `state`, so that it has the state of all parameters."""
        for part in self.parts:
            self.state.update(part.state)


_WHOLE_PARAMETER_OPTIMIZERS = ("adafactor", "adafactor_transformers", "muon")
"""Names of the optimizers whose update of an element depends on the parameter's other elements."""
_MAKERS: dict[str, MakeOptimizer] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "adafactor": optim.Adafactor,
    "adafactor_transformers": make_transformers_adafactor,
    "adamw8bit": make_torchao_adamw,
    "adamw4bit": partial(make_torchao_adamw, name="AdamW4bit"),
    "adamwfp8": partial(make_torchao_adamw, name="AdamWFp8"),
    "adamw8bit_bnb": make_bitsandbytes_adamw,
    "muon": MuonAndAdamW,
}
"""Functions that make each optimizer from parameters, by name.

They use default learning rates, which do not affect the memory.
"""


def resolve_optimizer(optimizer: Optimizer) -> MakeOptimizer | None:
    """Return the function that makes the optimizer from parameters, or None for "none".

    Args:
        optimizer: Name of an optimizer, or a function, which is returned unchanged.

    Raises:
        ConfigError: If the name is unknown, or `optimizer` is an optimizer instead of a function that makes one.
    """
    if callable(optimizer):
        return optimizer
    if isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} with parameters of its own; give its class, or a function that takes "
            "parameters and returns an optimizer"
        )
    if optimizer == "none":
        return None
    if optimizer not in _MAKERS:
        known = [*_MAKERS, "none"]
        hint = suggest_word(str(optimizer), known)
        raise ConfigError(
            f"optimizer={optimizer!r} is unknown{hint or ';'} allowed: {', '.join(known)}; from Python, also a function that takes "
            "parameters and returns an optimizer"
        )
    return _MAKERS[optimizer]


def list_inner_optimizers(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return the inner optimizers of a `MuonAndAdamW`, which a run would prepare separately.

    Return a list with only the given optimizer for any other class.
    """
    return optimizer.parts if isinstance(optimizer, MuonAndAdamW) else [optimizer]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known by its name to update each element of a parameter separately.

    The result is False for functions that make an optimizer, whatever they make.
    """
    return isinstance(optimizer, str) and optimizer not in _WHOLE_PARAMETER_OPTIMIZERS


def list_optimizer_caveats(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the assumptions of a forecast with this optimizer, as sentences."""
    return (_CAVEATS[optimizer],) if isinstance(optimizer, str) and optimizer in _CAVEATS else ()
