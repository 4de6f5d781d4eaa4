"""Optimizers by name, selection of the parameters with weight decay, and optimizer copies whose state is freed."""

import ast
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler
from headway.errors import ConfigError, StateError
from headway.trainer.arguments import TrainingArguments

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
"""Optimizers by name: pairs of (torch's class, arguments that select this variant)."""

_ADAM_CLASSES = (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)


def list_decaying_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that get weight decay: all except biases and the parameters of norms.

    Biases have "bias" in their name, and norms have "norm" in the name of their class. Case is ignored.
    """
    return [
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if "bias" not in name.lower() and "norm" not in type(module).__name__.lower()
    ]


def make_parameter_groups(
    model: torch.nn.Module, weight_decay: float, decaying_names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups: those with weight decay and those without.

    An empty group is left out.

    Args:
        model: Model with the parameters.
        weight_decay: Weight decay of the first group.
        decaying_names: Names of the parameters in the first group. None: `list_decaying_names(model)`.
    """
    names = set(list_decaying_names(model) if decaying_names is None else decaying_names)
    # A tied parameter has weight decay only if all of its names are in the list.
    exempt_ids = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in names}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) not in exempt_ids], "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) in exempt_ids], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_optimizer(
    model: torch.nn.Module,
    args: TrainingArguments,
    class_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    decaying_names: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """Create an optimizer of a given class, or the one whose name is in the training arguments.

    Args:
        model: Model whose trainable parameters are updated.
        args: Training arguments with the optimizer's name, learning rate, weight decay and other settings.
        class_and_kwargs: Optimizer class and its keyword arguments. Of `args`, only the weight decay is then used. None: the class
            and settings are those in `args`.
        decaying_names: Names of the parameters with weight decay. None: all except biases and parameters of norms.

    Raises:
        ConfigError: If there are no trainable parameters, or if `args.optim_args` is malformed or contains a name that
            the optimizer does not accept. Errors of a given class are raised unchanged.
    """
    groups = make_parameter_groups(model, args.weight_decay, decaying_names)
    if not groups:
        raise ConfigError(f"{type(model).__name__} has no parameters with requires_grad=True: nothing would be trained")
    if class_and_kwargs is not None:
        user_class, kwargs = class_and_kwargs
        return user_class(groups, **kwargs)
    optimizer_class, variant = OPTIMIZERS[args.optim]
    settings = {"lr": args.learning_rate, **variant}
    if optimizer_class in _ADAM_CLASSES:
        settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    settings |= parse_optim_args(args.optim_args)
    try:
        return optimizer_class(groups, **settings)
    except TypeError as error:
        raise ConfigError(f"optim_args={args.optim_args!r} does not fit {optimizer_class.__name__}: {error}") from error


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Parse the argument `optim_args`, "name=value, name=value", into a dict.

    Python literals are evaluated. Other values remain strings. Spaces are removed, and values cannot contain commas.
    None and "" result in an empty dict.

    Raises:
        ConfigError: If a part between two commas has no name or no "=".
    """
    settings: dict[str, Any] = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, sign, value = part.partition("=")
        if not sign or not name:
            raise ConfigError(f"optim_args={text!r}; give name=value, name=value")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval documents
            settings[name] = value
    return settings


# ---------------------------------------------------------------- schedule-free optimizers


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer has modes for training and evaluation, in which the weights differ.

    This is the case for schedule-free optimizers.

    Args:
        optimizer: Optimizer, prepared or not.
    """
    bare = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
    return callable(getattr(bare, "train", None)) and callable(getattr(bare, "eval", None))


def set_optimizer_mode(optimizer: Any, is_training: bool) -> None:
    """Switch a schedule-free optimizer between training and evaluation. Other optimizers are left unchanged.

    Each switch rounds the weights. Switch back only before the next training step, so that weights that are evaluated
    are also the ones that are saved.

    Args:
        optimizer: Optimizer, prepared or not. None is allowed.
        is_training: Whether to switch to training mode.
    """
    if has_modes(optimizer):
        optimizer.train() if is_training else optimizer.eval()


# ---------------------------------------------------------------- after the training


def make_stateless(optimizer: Any, schedule: Any) -> tuple[Any, Any]:
    """Return copies of an optimizer and its schedule without the optimizer's state, to be read after training.

    The copies have the parameter groups, learning rates and settings. They hold no reference to the original state,
    so it can be freed. The optimizer copy's `state_dict()` raises StateError instead of returning an empty state.

    The wrappers that `prepare` added are removed. An optimizer that is not torch's is returned itself, together with
    its schedule, and so is a schedule that is not torch's.

    Args:
        optimizer: Optimizer, prepared or not.
        schedule: Schedule, prepared or not; None if there is none yet.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
    schedule = schedule.scheduler if isinstance(schedule, PreparedScheduler) else schedule
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, schedule
    stateless = object.__new__(type(optimizer))
    # A schedule replaces `step` on the instance by a function that holds the training's optimizer.
    stateless.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    stateless.state = defaultdict(dict)
    stateless.param_groups = [dict(group) for group in optimizer.param_groups]
    stateless._optimizer_state_dict_pre_hooks = OrderedDict({0: _refuse_state_dict})
    return stateless, _copy_schedule(stateless, schedule)


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    raise StateError(
        "the optimizer's state was freed when the training ended; its groups and rates can be read. A checkpoint of the training "
        "contains the state, and so does an optimizer of your own: Trainer(optimizers=(optimizer, None))"
    )


def _copy_schedule(optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
    """Copy a schedule so that it refers to the given optimizer. One that is not torch's is returned unchanged.

    The schedules inside a composite schedule are copied too.
    """
    if not isinstance(schedule, LRScheduler):
        return schedule
    copied = copy.copy(schedule)
    copied.optimizer = optimizer
    inner_schedules = getattr(copied, "_schedulers", None)
    if isinstance(inner_schedules, list | tuple):
        copied.__dict__["_schedulers"] = [_copy_schedule(optimizer, each) for each in inner_schedules]
    return copied
