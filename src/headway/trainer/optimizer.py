"""Optimizers and schedules by name, which parameters decay, and what is left to read of them after a training."""

import ast
import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from headway.errors import ConfigError, StateError
from headway.trainer.arguments import TrainingArguments
from headway.training.prepared.optimizer import PreparedOptimizer
from headway.training.prepared.scheduler import PreparedScheduler

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "adamw_torch": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "nadamw": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"decoupled_weight_decay": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}
"""By name: torch's class, and what sets it apart."""

_OF_ADAMS_KIND = (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)


def decaying_names(model: torch.nn.Module) -> list[str]:
    """The names of the parameters that decay: all but biases and parameters of norms."""
    return [
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if "bias" not in name.lower() and "norm" not in type(module).__name__.lower()
    ]


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, decaying: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The parameters that learn, in two groups: those that decay, and those that do not.

    Args:
        model: whose.
        weight_decay: of the first group.
        decaying: their names; None: `decaying_names`.
    """
    names = set(decaying_names(model) if decaying is None else decaying)
    spared = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in names}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in learning if id(p) not in spared], "weight_decay": weight_decay},
        {"params": [p for p in learning if id(p) in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_optimizer(
    model: torch.nn.Module,
    args: TrainingArguments,
    given: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    decaying: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that the arguments name.

    Args:
        model: whose parameters it updates.
        args: name, rate, decay and further settings.
        given: a class and its settings, in place of the name.
        decaying: the names of the parameters that decay; None: all but biases and those of norms.

    Raises:
        ConfigError: nothing to learn, or settings that the optimizer does not take.
    """
    groups = parameter_groups(model, args.weight_decay, decaying)
    if not groups:
        raise ConfigError(f"{type(model).__name__} has no parameters with requires_grad=True: nothing would be trained")
    if given is not None:
        kind, settings = given
        return kind(groups, **settings)
    kind, settings = OPTIMIZERS[args.optim]
    settings = {"lr": args.learning_rate, **settings}
    if kind in _OF_ADAMS_KIND:
        settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    settings |= read_settings(args.optim_args)
    try:
        return kind(groups, **settings)
    except TypeError as error:
        raise ConfigError(f"optim_args={args.optim_args!r} does not fit {kind.__name__}: {error}") from error


def read_settings(text: str | None) -> dict[str, Any]:
    """ "name=value, name=value" as a dict; values are Python's numbers, truth values and tuples, else text.

    Raises:
        ConfigError: a part without "=".
    """
    found: dict[str, Any] = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, sign, value = part.partition("=")
        if not sign or not name:
            raise ConfigError(f"optim_args={text!r}; give name=value, name=value")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


# ---------------------------------------------------------------- after the training


def without_state(optimizer: Any, schedule: Any) -> tuple[Any, Any]:
    """(optimizer, schedule) to read after a training: groups, rates and settings, without the optimizer's state.

    They are copies; the state is freed with the training's own, as nobody else holds it. Reading it is an error instead of an
    empty dict. What is not torch's kind is given back as it is.

    Args:
        optimizer: of the training, prepared or not.
        schedule: likewise; None: there is none yet.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
    schedule = schedule.scheduler if isinstance(schedule, PreparedScheduler) else schedule
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, schedule
    kept = object.__new__(type(optimizer))
    # A schedule has put a step of its own there, which holds the training's optimizer.
    kept.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    kept.state = defaultdict(dict)
    kept.param_groups = [dict(group) for group in optimizer.param_groups]
    kept._optimizer_state_dict_pre_hooks = OrderedDict({0: _refuse_state})
    return kept, _copy_schedule(kept, schedule)


def _refuse_state(optimizer: torch.optim.Optimizer) -> None:
    raise StateError(
        "the optimizer's state was freed when the training ended; its groups and rates can be read. A checkpoint of the training "
        "holds the state, and so does an optimizer of your own: Trainer(optimizers=(optimizer, None))"
    )


def _copy_schedule(optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
    """A copy of a schedule that has that optimizer in place of its own; of one made of several, all of them."""
    if not isinstance(schedule, LRScheduler):
        return schedule
    kept = copy.copy(schedule)
    kept.optimizer = optimizer
    parts = getattr(kept, "_schedulers", None)
    if isinstance(parts, list | tuple):
        kept.__dict__["_schedulers"] = [_copy_schedule(optimizer, part) for part in parts]
    return kept


# ---------------------------------------------------------------- schedules

# Each factor is a function of the updates made after the warm-up, of which `Factor` takes care. `num_training_steps` is a keyword by
# that name because a prepared schedule is asked for its length by it.


def _progress(update: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (update - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _linear(update: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return 1.0 - min(1.0, _progress(update, num_warmup_steps, num_training_steps))


def _cosine(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0
) -> float:
    done = _progress(update, num_warmup_steps, num_training_steps)
    return max(0.0, _half_wave(num_cycles * 2.0 * done) * (1 - min_lr_rate) + min_lr_rate)


def _half_wave(turns: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * turns))


def _cosine_with_restarts(update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    done = _progress(update, num_warmup_steps, num_training_steps)
    return 0.0 if done >= 1 else max(0.0, _half_wave((num_cycles * done) % 1.0))


def _polynomial(
    update: int, *, num_warmup_steps: int, num_training_steps: int, power: float = 1.0, end_share: float = 0.0
) -> float:
    left = 1.0 - min(1.0, _progress(update, num_warmup_steps, num_training_steps))
    return float((1.0 - end_share) * left**power + end_share)


def _constant(update: int, *, num_warmup_steps: int) -> float:
    return 1.0


def _inverse_sqrt(update: int, *, num_warmup_steps: int, timescale: int | None = None) -> float:
    scale = timescale or num_warmup_steps or 10_000
    return 1.0 / math.sqrt((update + scale - num_warmup_steps) / scale)


def _warmup_stable_decay(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_decay_steps: int, min_lr_ratio: float = 0.0
) -> float:
    """Hu et al., MiniCPM, 2024: warm-up from the lowest rate, a plateau, and half a cosine at its end."""
    done = (update - (num_training_steps - num_decay_steps)) / max(1, num_decay_steps)
    return _half_wave(min(1.0, max(0.0, done))) * (1 - min_lr_ratio) + min_lr_ratio


SCHEDULES: dict[str, Callable[..., float] | None] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
    "reduce_lr_on_plateau": None,
}
"""By name: the factor on the learning rate as a function of updates; None: it follows a metric instead."""


class Factor:
    """One of these functions with its settings, which are the state that a schedule keeps of it.

    Args:
        function: of the updates made.
        settings: its keywords.
    """

    __slots__ = ("__dict__", "_function")

    def __init__(self, function: Callable[..., float], **settings: Any) -> None:
        signature(function).bind(0, **settings)  # a wrong keyword is an error now, not after the warm-up
        self._function = function
        vars(self).update(settings)

    @property
    def keywords(self) -> dict[str, Any]:
        """The settings."""
        return vars(self)

    def __call__(self, update: int) -> float:
        """The factor after so many updates."""
        settings = vars(self)
        if update < settings["num_warmup_steps"]:
            lowest = float(settings.get("min_lr_ratio", 0.0))
            return update / float(settings["num_warmup_steps"]) * (1 - lowest) + lowest
        return self._function(update, **settings)


_WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")


def create_schedule(optimizer: torch.optim.Optimizer, args: TrainingArguments, num_updates: int) -> Any:
    """The schedule that the arguments name, counted in updates.

    Raises:
        ConfigError: settings that it does not take, or lacks.
    """
    name, settings = args.lr_scheduler_type, dict(args.lr_scheduler_kwargs or {})
    factor = SCHEDULES[name]
    try:
        if factor is None:
            return ReduceLROnPlateau(optimizer, **{"mode": "max" if args.greater_is_better else "min", **settings})
        if name == "polynomial":
            settings["end_share"] = settings.pop("lr_end", 1e-7) / (args.learning_rate or 1.0)
        if name == "cosine_with_min_lr" and "min_lr" in settings:
            settings["min_lr_rate"] = settings.pop("min_lr") / (args.learning_rate or 1.0)
        return LambdaLR(optimizer, Factor(factor, **_lengths(args, num_updates), **settings))
    except TypeError as error:
        raise ConfigError(f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} does not fit {name}: {error}") from error


def stretch_schedule(schedule: Any, args: TrainingArguments, num_updates: int) -> None:
    """Let a schedule that `create_schedule` made be one of so many updates."""
    for each in getattr(schedule, "lr_lambdas", ()):
        if isinstance(each, Factor):
            each.keywords.update(_lengths(args, num_updates))


def _lengths(args: TrainingArguments, num_updates: int) -> dict[str, int]:
    name = args.lr_scheduler_type
    warmup = 0 if name == "constant" else args.get_warmup_steps(num_updates)
    return {"num_warmup_steps": warmup} | ({} if name in _WITHOUT_END else {"num_training_steps": num_updates})
