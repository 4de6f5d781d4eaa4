"""Creation of a Trainer's optimizer by name, with weight decay for a selection of the parameters."""

import ast
from collections.abc import Sequence
from typing import Any

import torch

from headway.core.strategies.blocks import ParameterOwner
from headway.errors import ConfigError
from headway.extras.parameter_kinds import BIASES, NORMS, find_kinds
from headway.trainer.arguments import TrainingArguments
from headway.trainer.optimizer_names import OPTIMIZERS, keep_embeddings_in_32_bits, list_hyperparameters


def list_decaying_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that get weight decay: all except biases and the parameters of norms.

    `find_kinds` decides what biases and norms are. A tied parameter is judged separately for each of its names.
    """
    decaying_names = []
    # With `remove_duplicate=False`, the parameters of a shared module have all their names in the result.
    for place, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if not find_kinds(parameter, [ParameterOwner(place, module, name)]) & {BIASES, NORMS}:
                decaying_names.append(f"{place}.{name}" if place else name)
    return decaying_names


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
        OptionalDependencyMissing: If the package of the named optimizer is not installed.
    """
    groups = make_parameter_groups(model, args.weight_decay, decaying_names)
    if not groups:
        raise ConfigError(f"{type(model).__name__} has no parameters with requires_grad=True: nothing would be trained")
    if class_and_kwargs is not None:
        user_class, kwargs = class_and_kwargs
        return user_class(groups, **kwargs)
    named = OPTIMIZERS[args.optim]
    optimizer_class = named.load_class()
    settings = list_hyperparameters(optimizer_class, args) | named.settings
    settings |= parse_optim_args(args.optim_args)
    try:
        optimizer = optimizer_class(groups, **settings)
    except TypeError as error:
        raise ConfigError(f"optim_args={args.optim_args!r} does not fit {optimizer_class.__name__}: {error}") from error
    if settings.get("optim_bits") == 8:
        keep_embeddings_in_32_bits(optimizer, model)
    return optimizer


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
