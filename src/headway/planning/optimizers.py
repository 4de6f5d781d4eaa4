"""The optimizers that a plan knows by name."""

from torch import optim

from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.forecasting.tracing.step import MakeOptimizer
from headway.planning.dry_run.untraceable import (
    MuonAndAdamW,
    adafactor_of_transformers,
    adamw8bit,
    adamw8bit_of_bitsandbytes,
    reading,
)

Optimizer = str | MakeOptimizer

# What they keep does not depend on rates.
_MAKERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: optim.AdamW(parameters),
    "adam": lambda parameters: optim.Adam(parameters),
    "sgd": lambda parameters: optim.SGD(parameters),
    "momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
    "adagrad": lambda parameters: optim.Adagrad(parameters),
    "rmsprop": lambda parameters: optim.RMSprop(parameters),
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
            f"optimizer={optimizer!r} is unknown{hint or '; allowed: ' + ', '.join(known)}; from Python, give a function that takes "
            "parameters and returns an optimizer"
        )
    return _MAKERS[optimizer]


def caveats(optimizer: Optimizer) -> tuple[str, ...]:
    """What a forecast with an optimizer of that name cannot vouch for."""
    return (_CAVEATS[optimizer],) if isinstance(optimizer, str) and optimizer in _CAVEATS else ()
