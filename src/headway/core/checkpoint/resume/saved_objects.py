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
from headway.core.weights.pieces import is_sharded
from headway.errors import CheckpointError

_ELEMENTWISE_NAMES = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD SGD"
_ELEMENTWISE = {getattr(torch.optim, name) for name in _ELEMENTWISE_NAMES.split()}
"""Optimizers whose state tensors each have the parameter's shape or a single element."""
_ALLOWED_TYPES: tuple[tuple[Any, Any], ...] = (
    (int | float, int | float | torch.Tensor | numpy.generic | None),
    (str, str | None),
    (list | tuple, list | tuple | None),
    (dict, dict | None),
)
"""Pairs of (type of a value in a scheduler's current state, types that a saved value may have in its place)."""


def check_objects(state: TypedReader, saved_state: CollectedState) -> None:
    """Raise `CheckpointError` if a saved value for an object cannot be decoded.

    The objects are models, optimizers, schedulers and registered objects.

    Args:
        state: The manifest's state.
        saved_state: The state and the tensors to which it refers.

    Raises:
        CheckpointError: If a value is wrong. The message contains the path of the first wrong value.
    """
    for extra in state["extra"].read_items():
        for value in extra.read_table().values():
            decode_reader(value, saved_state)
    for optimizer in state["optimizer"].read_items():
        _check_optimizer(optimizer, saved_state)
    for name, kind in state.read_table().items():
        if name not in ("extra", "optimizer", "run", "loaders", "streams"):
            for value in kind.read_items():
                decoded = decode_reader(value, saved_state)
                if name == "scheduler":
                    decoded.read_mapping()


def find_later_failures(objects: StatefulObjects, saved_state: CollectedState) -> list[str]:
    """Return one message for each saved value that would be loaded without an error, but would cause one later.

    Only values for torch's own optimizers and schedulers are checked, and nothing is changed. It must be called after
    `find_misfits` has found no problem.

    Args:
        objects: Objects that should load the state.
        saved_state: State of the checkpoint.
    """
    problems = []
    names = map_parameter_names(objects.models)
    for optimizer, entry in zip(objects.optimizers, saved_state.state["optimizer"]):
        if type(optimizer) in _ELEMENTWISE:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                name = names.get(id(parameter), "")
                shape = tuple(objects.get_part(parameter).shape)
                problems += _find_wrong_shapes(
                    name, shape, decode_value(entry["values"].get(name, {}), saved_state.tensors)
                )
    for index, (obj, value) in enumerate(
        zip(objects.others.get("scheduler", ()), saved_state.state.get("scheduler", ()))
    ):
        if type(obj).__module__ == torch.optim.lr_scheduler.__name__:
            problems += _find_wrong_types(
                obj.state_dict(), decode_value(value, saved_state.tensors), f"schedule {index}'s state"
            )
    return problems


def _find_wrong_shapes(name: str, shape: tuple[int, ...], values: Mapping[Any, Any]) -> list[str]:
    """Return one message for each value of a parameter's optimizer state with another type or shape than expected.

    Args:
        name: Name of the parameter.
        shape: Shape of the parameter, or of this rank's part of it.
        values: Saved state of the parameter.
    """
    problems = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor | float | int | None) and not is_sharded(value):
            problems.append(f"the optimizer's {key} of {name} is a {type(value).__name__}, where a tensor belongs")
        elif is_sharded(value) or isinstance(value, torch.Tensor):
            saved_shape = tuple(value.shape)
            if prod(saved_shape) != 1 and saved_shape != shape:
                problems.append(f"the optimizer's {key} of {name} has the shape {saved_shape}, the parameter {shape}")
    return problems


def _find_wrong_types(own: Any, saved: Any, where: str) -> list[str]:
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
            for problem in _find_wrong_types(own[key], saved[key], f"{where} {key}")
        ]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        problems = []
        if where.endswith("_lrs") and len(own) != len(saved):  # one learning rate per parameter group
            problems.append(f"{where} has {len(saved)} entries, {len(own)} belong there")
        for own_item, saved_item in zip(own, saved):
            problems += _find_wrong_types(own_item, saved_item, where)
        return problems
    for own_types, allowed in _ALLOWED_TYPES:
        if isinstance(own, own_types) and not isinstance(saved, allowed):
            return [f"{where} is a {type(saved).__name__}, where a {type(own).__name__} belongs"]
    return []


def decode_reader(reader: TypedReader, saved_state: CollectedState) -> TypedReader:
    """Decode a value of the manifest, and return a `TypedReader` that checks the type of the decoded value.

    Args:
        reader: Reader of the encoded value. The result names the same path in error messages.
        saved_state: State of the checkpoint with the tensors to which the value refers.

    Raises:
        CheckpointError: If the value cannot be decoded.
    """
    return TypedReader(decode_value(reader.value, saved_state.tensors), reader.where)


def _check_optimizer(saved: TypedReader, saved_state: CollectedState) -> None:
    """Raise `CheckpointError` if the saved state of an optimizer does not have the structure that `collect_optimizer` writes."""
    num_betas = 2 if saved["type"].read_text() in _ELEMENTWISE_NAMES.split() else None  # Adan has three
    names_by_group = [group.read_texts() for group in saved["params"].read_items()]
    groups = saved["groups"].read_items(len(names_by_group))
    for group in groups:
        _check_options(decode_reader(group, saved_state), num_betas)
    names = {name for group_names in names_by_group for name in group_names}
    if len(names) != sum(map(len, names_by_group)):
        saved["params"].raise_error("the parameters' names, each of them once,")
    for name, entry in saved["values"].read_table().items():
        if name not in names:
            entry.raise_error("no state: it belongs to none of the parameters")
        decode_reader(entry, saved_state).read_mapping()
    if whole := saved.get("whole"):
        decode_reader(whole, saved_state)
    saved["rest"].read_mapping()
    decode_reader(saved["rest"], saved_state).read_mapping()
    if loose := saved.get("loose"):
        decode_reader(loose, saved_state).read_mapping()


def _check_options(group: TypedReader, num_betas: int | None) -> None:
    """Raise `CheckpointError` if a numeric option of a parameter group, such as `lr`, is not a number.

    Args:
        group: Options of the group.
        num_betas: Required length of `betas`, or None for any length.
    """
    group.read_mapping()
    if params := group.get("params"):
        params.raise_error("no list of parameters")
    for name in ("lr", "weight_decay", "momentum", "eps", "initial_lr", "dampening", "alpha", "rho"):
        option = group.get(name)
        if option is not None and isinstance(option.value, str | bytes | dict | bool):
            option.raise_error("a number")
    if betas := group.get("betas"):
        for beta in betas.read_items(num_betas):
            if not isinstance(beta.value, torch.Tensor):
                beta.read_number()


def check_references(saved_state: CollectedState) -> None:
    """Raise `CheckpointError` if the state refers to a tensor twice, or to a model's tensor.

    Without this check, reading could allocate more memory than the total size of the files.

    Raises:
        CheckpointError: If there is such a reference.
    """
    seen: set[str] = set()
    for name in (reference["name"] for reference in find_references(saved_state.state)):
        if name not in saved_state.tensors:
            continue
        if name in seen or name.startswith("model/"):
            raise CheckpointError(f"the manifest's state has the tensor {name!r} in a second place")
        seen.add(name)
