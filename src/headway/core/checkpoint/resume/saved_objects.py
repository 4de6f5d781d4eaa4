"""Check saved states of models, optimizers and learning rate schedulers before any object is changed.

Values are decoded, and their types are checked. Some values would be accepted by an object, but make it fail later.
They are found by comparing them with the object's own values.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy
import torch

from headway.core.checkpoint.format.typed_reader import TypedReader
from headway.core.checkpoint.format.values import decode_value, find_references
from headway.core.checkpoint.state import CollectedState, StatefulObjects, map_parameter_names
from headway.core.weights.pieces import is_spread
from headway.errors import CheckpointError

_SHAPED = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD SGD"
_OF_ONE_SHAPE = {getattr(torch.optim, name) for name in _SHAPED.split()}
"""Optimizers whose state tensors each have the parameter's shape or a single element."""
_KINDS: tuple[tuple[Any, Any], ...] = (
    (int | float, int | float | torch.Tensor | numpy.generic | None),
    (str, str | None),
    (list | tuple, list | tuple | None),
    (dict, dict | None),
)
"""Pairs of (type of a value in a scheduler's current state, types that a saved value may have in its place)."""


def check_objects(state: TypedReader, found: CollectedState) -> None:
    """Raise `CheckpointError` if a saved value for an object cannot be decoded.

    The objects are models, optimizers, schedulers and registered objects.

    Args:
        state: The manifest's state.
        found: The state and the tensors to which it refers.

    Raises:
        CheckpointError: If a value is wrong. The message contains the path of the first wrong value.
    """
    for extra in state["extra"].read_items():
        for value in extra.read_table().values():
            decode_reader(value, found)
    for optimizer in state["optimizer"].read_items():
        _check_optimizer(optimizer, found)
    for name, kind in state.read_table().items():
        if name not in ("extra", "optimizer", "run", "loaders", "streams"):
            for value in kind.read_items():
                of_object = decode_reader(value, found)
                if name == "scheduler":
                    of_object.read_mapping()


def find_unfit(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """Return one message for each saved value that would be loaded without an error, but would cause one later.

    Only values for torch's own optimizers and schedulers are checked, and nothing is changed. It must be called after
    `find_misfits` has found no problem.

    Args:
        parts: Objects that should load the state.
        found: Saved state.
    """
    problems = []
    names = map_parameter_names(parts.models)
    for optimizer, entry in zip(parts.optimizers, found.state["optimizer"]):
        if type(optimizer) in _OF_ONE_SHAPE:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                name = names.get(id(parameter), "")
                shape = tuple(parts.part_of(parameter).shape)
                problems += _find_wrong_shapes(name, shape, decode_value(entry["values"].get(name, {}), found.tensors))
    for index, (obj, value) in enumerate(zip(parts.others.get("scheduler", ()), found.state.get("scheduler", ()))):
        if type(obj).__module__ == torch.optim.lr_scheduler.__name__:
            problems += _find_unlike(obj.state_dict(), decode_value(value, found.tensors), f"schedule {index}'s state")
    return problems


def _find_wrong_shapes(name: str, shape: tuple[int, ...], values: Mapping[Any, Any]) -> list[str]:
    problems = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor | float | int | None) and not is_spread(value):
            problems.append(f"the optimizer's {key} of {name} is a {type(value).__name__}, where a tensor belongs")
        elif is_spread(value) or isinstance(value, torch.Tensor):
            found = tuple(value.shape)
            if prod(found) != 1 and found != shape:
                problems.append(f"the optimizer's {key} of {name} has the shape {found}, the parameter {shape}")
    return problems


def _find_unlike(own: Any, saved: Any, where: str) -> list[str]:
    """Return one message for each saved value of a scheduler that has another type than the scheduler's own.

    Args:
        own: Current state of the scheduler, or a value in it.
        saved: Saved state of the scheduler, or a value in it.
        where: Path of the value, for messages.
    """
    if isinstance(own, dict) and isinstance(saved, dict):
        return [
            problem
            for key in own.keys() & saved.keys()
            for problem in _find_unlike(own[key], saved[key], f"{where} {key}")
        ]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        is_short = where.endswith("_lrs") and len(own) != len(saved)
        problems = [f"{where} has {len(saved)} entries, {len(own)} belong there"] if is_short else []
        return problems + [problem for one, other in zip(own, saved) for problem in _find_unlike(one, other, where)]
    for kinds, allowed in _KINDS:
        if isinstance(own, kinds) and not isinstance(saved, allowed):
            return [f"{where} is a {type(saved).__name__}, where a {type(own).__name__} belongs"]
    return []


def decode_reader(reader: TypedReader, found: CollectedState) -> TypedReader:
    """Decode a value of the manifest, and return a `TypedReader` that checks the type of the decoded value.

    Args:
        reader: Reader of the encoded value. The result names the same path in error messages.
        found: Saved state with the tensors to which the value refers.

    Raises:
        CheckpointError: If the value cannot be decoded.
    """
    return TypedReader(decode_value(reader.value, found.tensors), reader.where)


def _check_optimizer(saved: TypedReader, found: CollectedState) -> None:
    num_betas = 2 if saved["type"].read_text() in _SHAPED.split() else None  # Adan has three
    names = [group.read_texts() for group in saved["params"].read_items()]
    groups = saved["groups"].read_items(len(names))
    for group in groups:
        _check_options(decode_reader(group, found), num_betas)
    every = {name for group in names for name in group}
    if len(every) != sum(map(len, names)):
        saved["params"].raise_error("the parameters' names, each of them once,")
    for name, entry in saved["values"].read_table().items():
        if name not in every:
            entry.raise_error("no state: it belongs to none of the parameters")
        decode_reader(entry, found).read_mapping()
    for each in saved.find_given("whole"):
        decode_reader(each, found)
    for name in ("rest", "loose"):
        for each in saved.find_given(name):
            decode_reader(each, found).read_mapping()
    saved["rest"].read_mapping()


def _check_options(group: TypedReader, num_betas: int | None) -> None:
    """Raise `CheckpointError` if a numeric option of a parameter group, such as `lr`, is not a number.

    Args:
        group: Options of the group.
        num_betas: Required length of `betas`, or None for any length.
    """
    group.read_mapping()
    for each in group.find_given("params"):
        each.raise_error("no list of parameters")
    for each in group.find_given("lr", "weight_decay", "momentum", "eps", "initial_lr", "dampening", "alpha", "rho"):
        if isinstance(each.value, str | bytes | dict | bool):
            each.raise_error("a number")
    for each in group.find_given("betas"):
        for beta in each.read_items(num_betas):
            if not isinstance(beta.value, torch.Tensor):
                beta.read_number()


def check_names(found: CollectedState) -> None:
    """Raise `CheckpointError` if the state refers to a tensor twice, or to a model's tensor.

    Without this check, reading could allocate more memory than the total size of the files.

    Raises:
        CheckpointError: If there is such a reference.
    """
    seen: set[str] = set()
    for name in (reference["name"] for reference in find_references(found.state)):
        if name not in found.tensors:
            continue
        if name in seen or name.startswith("model/"):
            raise CheckpointError(f"the manifest's state has the tensor {name!r} in a second place")
        seen.add(name)
