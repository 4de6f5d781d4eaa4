"""Restore objects from a saved state, all or nothing: everything is checked before anything is changed.

Steps that run the user's code can still fail. They run first, each with an undo step. Weights are copied last, because
they have been checked completely, and undoing the copy would need a second copy of all weights.

Before a load, `find_misfits` compares a model's saved tensors with its own, and `describe_casts` lists the dtypes that
will be cast. After a failure, changes are undone in reverse order, and each undo step runs even if another fails.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy
import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint.format.tensors import copy_tensor, get_saved_stride, is_dense, is_uninitialized, set_stride
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import decode_value, encode_value, map_items
from headway.core.checkpoint.loading.device_copies import copy_pairs, move_state
from headway.core.checkpoint.loading.files import iterate_pairs
from headway.core.checkpoint.state import (
    CollectedState,
    StatefulObjects,
    decode_optimizer,
    find_optimizer_misfits,
    has_torch_format,
    is_extra,
    is_weight,
    list_devices,
    load_optimizer,
    make_optimizer_undo,
    map_parameter_names,
)
from headway.core.training.prepared.optimizer import find_low_bit_extension
from headway.core.weights.compiled import get_bare_submodule
from headway.core.weights.pieces import get_local_part, is_dtensor
from headway.core.weights.shards import get_dtype_name, is_bit_identical, view_as_bits
from headway.errors import CheckpointError


class LoadRollback:
    """List of steps that undo the changes that a load has made so far."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Any]]] = []

    def add(self, name: str, undo_step: Callable[[], Any]) -> None:
        """Add an undo step. Call this method before the change is made.

        Args:
            name: Name of the object that will be changed, for messages.
            undo_step: Function that undoes the change.
        """
        self._steps.append((name, undo_step))

    def run(self) -> list[str]:
        """Run all undo steps in reverse order, and return one message for each step that failed."""
        problems = []
        while self._steps:
            name, undo_step = self._steps.pop()
            try:
                undo_step()
            except Exception as error:  # the other steps must run too
                problems.append(f"{name} ({type(error).__name__}: {error})")
        return problems


def copy_state(state: Any) -> Callable[[], Any]:
    """Copy a state, and return a function that rebuilds it. Later changes to the original do not affect the copy.

    Dense tensors are copied to host memory. DTensors are copied on their device. Sparse, quantized and meta tensors,
    and objects of unknown types, are kept without a copy.
    """
    copy = _copy_value(state)
    return lambda: _rebuild_value(copy)


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states have bit-identical values. False if a state contains a value that a checkpoint cannot hold."""
    own_tensors: dict[str, torch.Tensor] = {}
    other_tensors: dict[str, torch.Tensor] = {}
    try:
        if encode_value(one, "", own_tensors) != encode_value(other, "", other_tensors):
            return False
    except CheckpointError:
        return False
    return all(
        is_bit_identical(get_local_part(tensor), get_local_part(other_tensors[name]))
        for name, tensor in own_tensors.items()
    )


class _TensorCopy:
    """Copy of a dense tensor in host memory, which can be rebuilt with its device, stride and kind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad and tensor.is_leaf
        self._is_parameter = isinstance(tensor, torch.nn.Parameter)
        plain = view_as_bits(tensor.detach())
        self._stride = get_saved_stride(tensor)
        self._dtype = tensor.dtype
        self._copy = plain.clone() if tensor.device.type == "cpu" else plain.cpu()

    def rebuild(self) -> torch.Tensor:
        tensor = self._copy.to(self._device).view(self._dtype)
        if self._stride is not None:
            tensor = set_stride(tensor, self._stride)
        if self._is_parameter:
            return torch.nn.Parameter(tensor, self._needs_grad)
        return tensor.requires_grad_() if self._needs_grad else tensor


def _copy_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            return value.detach().clone()
        return _TensorCopy(value) if is_dense(value) and not value.is_meta else value
    if isinstance(value, numpy.ndarray):
        return value.copy()
    return map_items(_copy_value, value)


def _rebuild_value(value: Any) -> Any:
    return value.rebuild() if isinstance(value, _TensorCopy) else map_items(_rebuild_value, value)


def _collect_own_tensors(own: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {to_logical_name(prefix + name): value for name, value in own.items() if is_weight(name, value)}


def collect_saved_tensors(saved_state: CollectedState, prefix: str) -> dict[str, Any]:
    """Return a model's saved weights, without extra state, by logical name. Tied weights occur under all their names.

    Args:
        saved_state: State of the checkpoint.
        prefix: Prefix of the model's logical names, such as `model/0/`.
    """
    saved = {name: tensor for name, tensor in saved_state.tensors.items() if name.startswith(prefix)}
    for name, target in saved_state.aliases.items():
        if name.startswith(prefix) and target in saved_state.tensors:
            saved[name] = saved_state.tensors[target]
    return {name: tensor for name, tensor in saved.items() if not is_extra(name)}


@dataclass(frozen=True)
class ModelMatch:
    """A model's own weights, paired with the weights that a checkpoint has for it.

    Attributes:
        index: Index of the model.
        model: Model without wrappers.
        exported: Values of the model's state dict, by name.
        own: The model's own weights by logical name, such as `model/0/` plus the name in the model.
        saved: Saved weights by logical name. Tied weights occur under each of their names.
    """

    index: int
    model: torch.nn.Module
    exported: dict[str, Any]
    own: dict[str, Any]
    saved: dict[str, Any]


def match_models(objects: StatefulObjects, saved_state: CollectedState) -> list[ModelMatch]:
    """Return the models to load, each paired with its saved weights. The state dict of each model is exported once.

    Args:
        objects: Objects that should load the state.
        saved_state: State of the checkpoint.
    """
    matches = []
    for index, model in objects.list_models_to_load():
        prefix, exported = f"model/{index}/", dict(objects.export(model))
        matches.append(
            ModelMatch(
                index,
                model,
                exported,
                own=_collect_own_tensors(exported, prefix),
                saved=collect_saved_tensors(saved_state, prefix),
            )
        )
    return matches


def find_model_misfits(match: ModelMatch, saved_state: CollectedState) -> list[str]:
    """Return one message for each tensor that the model or the checkpoint lacks, or whose saved values do not fit.

    Nothing is changed. The messages are sorted.

    Args:
        match: The model's own and saved weights.
        saved_state: State of the checkpoint.

    Raises:
        CheckpointError: If a saved value that is not a weight, such as extra state, cannot be decoded, or a file
            differs from the manifest.
    """
    prefix = f"model/{match.index}/"
    saved, own = match.saved, match.own
    problems = []
    for name in own.keys() - saved.keys():
        near = get_close_matches(name, saved.keys() - own.keys(), 1)
        problems.append(
            f"{name} is not in the checkpoint" + (f"; it has {near[0].removeprefix(prefix)}" if near else "")
        )
    problems += [f"{name} is in the checkpoint, the model has none" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        problem = find_misfit(own[name], saved[name])
        if problem is not None:
            problems.append(f"{name} {problem}")
    return sorted(problems + _find_extra_misfits(match.model, match.exported, saved_state, match.index))


def find_misfit(own: Any, saved: Any) -> str | None:
    """Return the reason why saved values cannot be copied into a model's own tensor, or None if they can.

    The shapes of the full tensors are compared. If a tensor is sharded, only values of this rank's shard are checked.

    Args:
        own: Tensor or shard of the model.
        saved: Saved tensor, in memory or in files.
    """
    local = get_local_part(own)
    if is_uninitialized(local):
        return "has no shape yet (of a lazy module): run one forward before the load"
    if tuple(own.shape) != tuple(saved.shape):
        return f"has the shape {tuple(own.shape)}, the checkpoint's {tuple(saved.shape)}"
    if local.is_meta:
        return "is on the meta device, which has no values: build the model with values before the load"
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), and cannot be changed: make the model outside of it"
    for own_part, saved_part in iterate_pairs(own, saved):
        problem = _find_shard_misfit(own_part, saved_part)
        if problem is not None:
            return problem
    return None


def _find_shard_misfit(own: torch.Tensor, saved: torch.Tensor) -> str | None:
    """Return the reason why saved values cannot be copied into a part of a tensor on this rank, or None if they can."""
    problem = None if own.dtype == saved.dtype else _find_cast_problem(own.dtype, saved)
    if problem is not None:
        return problem
    reduced, value = _remove_repeats(own, saved)
    if value is None or not _can_hold(reduced, value):
        return "has elements that share memory (as expand() makes them), and other values were saved for them"
    return None


def _find_cast_problem(dtype: torch.dtype, saved: torch.Tensor) -> str | None:
    """Return the reason why saved values cannot be cast to another dtype, or None if they can.

    The cast is refused if torch forbids it, for example from float to integer, or if the target is bool. It is also
    refused if a finite value would become infinite, or an integer would change.

    Args:
        dtype: Target dtype, which differs from that of the saved values.
        saved: Saved values.
    """
    message = f"is of {dtype}, the checkpoint's of {saved.dtype}"
    is_castable = view_as_bits(saved) is saved and view_as_bits(torch.empty(0, dtype=dtype)).dtype == dtype
    if not is_castable or not torch.can_cast(saved.dtype, dtype) or dtype is torch.bool:
        return message
    cast = saved.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Compared in float32 or wider, because torch has no isfinite() for the smallest float dtypes.
        is_lost = bool((_widen_small_float(saved).isfinite() & ~_widen_small_float(cast).isfinite()).any())
    else:
        is_lost = not torch.equal(cast.to(saved.dtype), saved) or bool(((cast < 0) != (saved < 0)).any())
    return f"{message}, and holds values that are too large for it" if is_lost else None


def _widen_small_float(tensor: torch.Tensor) -> torch.Tensor:
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
    return tensor.float() if is_small else tensor


def _remove_repeats(own: torch.Tensor, saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reduce the repeated dims (stride 0) of an expanded tensor to size 1, and the saved values to the same shape.

    Args:
        own: Tensor, which might have been made by `expand`.
        saved: Saved values of the tensor's shape.

    Returns:
        Pair of (reduced tensor, reduced saved values). The values are None if they differ along a repeated dim.
    """
    reduced, value = own, saved
    for dim, (size, stride) in enumerate(zip(own.shape, own.stride())):
        if stride == 0 and size > 1:
            reduced, first = reduced.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            if not is_bit_identical(first.expand_as(value), value):
                return reduced, None
            value = first
    return reduced, value


def _can_hold(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor can hold given values although several of its elements might share an address.

    It can if the values of all elements that share an address are equal.
    """
    if not own.numel() or own.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(own):
        return True
    # If the elements at one address get different values, only the last one is left, and the copy differs.
    copy = view_as_bits(torch.empty_strided(own.shape, own.stride(), dtype=value.dtype))
    return is_bit_identical(copy.copy_(view_as_bits(value)), value)


def copy_saved_values(own: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy saved values into a model's own tensor, whose elements can share memory.

    Call it only if `find_misfit` has returned None for the two tensors.

    Args:
        own: Tensor of the model.
        saved: Saved values.
    """
    reduced, value = _remove_repeats(own, saved)
    assert value is not None  # otherwise find_misfits() has refused it
    if reduced.dtype == value.dtype:
        reduced, value = view_as_bits(reduced), view_as_bits(value)
    reduced.copy_(value)


# -------------------------------------------------------------------- extra state; sparse and quantized tensors


def _make_logical_name(name: str, prefix: str) -> str:
    """Return the logical name of an entry of a model's state dict, without the model's prefix.

    Args:
        name: Name of the entry in the model.
        prefix: Prefix of the model, such as `model/0/`.
    """
    return to_logical_name(prefix + name).removeprefix(prefix)


def _collect_nondense_tensors(own: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return a model's own tensors that are sparse or quantized, by logical name without the model's prefix.

    Args:
        own: The model's exported state, by name.
        prefix: Prefix of the model, such as `model/0/`.
    """
    return {
        _make_logical_name(name, prefix): value
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and not is_dense(value) and not is_extra(name)
    }


def decode_extras(saved_state: CollectedState, index: int, source: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a model's saved values that are not weights (extra state, sparse and quantized tensors), by name.

    Args:
        saved_state: State of the checkpoint.
        index: Index of the model.
        source: Saved tensors by logical name, or copies of them that a model may keep.

    Raises:
        CheckpointError: If a value cannot be decoded.
    """
    prefix = f"model/{index}/"
    values = {name.removeprefix(prefix): source[name] for name in source if name.startswith(prefix) and is_extra(name)}
    return values | {name: decode_value(value, source) for name, value in saved_state.state["extra"][index].items()}


def _find_extra_misfits(
    model: torch.nn.Module, own: Mapping[str, Any], saved_state: CollectedState, index: int
) -> list[str]:
    """Return one message for each sparse or quantized tensor, or extra state, that the model and the checkpoint do not share.

    Extra state that the checkpoint lacks is allowed.
    """
    prefix = f"model/{index}/"
    saved, own_tensors = decode_extras(saved_state, index, saved_state.tensors), _collect_nondense_tensors(own, prefix)
    names = {_make_logical_name(name, prefix): name for name in own}
    problems = []
    for name, tensor in own_tensors.items():
        value = saved.get(name)
        if _find_tensor_dict(model, names[name]) is None:
            problems.append(f"{prefix}{name} is a {_describe_tensor(tensor)} that the model keeps under another name")
        elif not isinstance(value, torch.Tensor):
            problems.append(f"{prefix}{name} is not in the checkpoint")
        elif _describe_tensor(value) != _describe_tensor(tensor):
            problems.append(f"{prefix}{name} is {_describe_tensor(tensor)}, the checkpoint's {_describe_tensor(value)}")
    extras = {_make_logical_name(name, prefix) for name in own if is_extra(name)}
    unexpected = saved.keys() - own_tensors.keys() - extras
    return problems + [f"{prefix}{name} is in the checkpoint, the model has none" for name in unexpected]


def _describe_tensor(tensor: torch.Tensor) -> str:
    kind = "quantized" if tensor.is_quantized else str(tensor.layout)
    scheme = f", {tensor.qscheme()}" if tensor.is_quantized else ""
    return f"{kind} of {tensor.dtype} and {tuple(tensor.shape)}{scheme}"


def load_extras(
    own: Mapping[str, Any], values: Mapping[str, Any], model: torch.nn.Module, index: int, rollback: LoadRollback
) -> None:
    """Load a model's extra state and its sparse and quantized tensors. Loading extra state runs the user's code.

    Args:
        own: The model's exported state, by name.
        values: Values that `decode_extras` returned.
        model: Model without wrappers, which is changed.
        index: Index of the model.
        rollback: Rollback to which an undo step is added before each change.
    """
    prefix = f"model/{index}/"
    for name in own:
        key = _make_logical_name(name, prefix)
        if key not in values:
            continue
        if is_extra(name):
            module: Any = get_bare_submodule(model, name.rpartition(".")[0])
            rollback.add(prefix + key, partial(_restore_extra_state, module, copy_state(own[name])))
            module.set_extra_state(values[key])
        else:
            _replace_tensor(model, name, values[key], prefix + key, rollback)


def _restore_extra_state(module: Any, rebuild_state: Callable[[], Any]) -> None:
    module.set_extra_state(rebuild_state())


def _find_tensor_dict(model: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Return the dict of parameters or buffers that contains a tensor, or None if the model has no such tensor.

    Args:
        model: Model without wrappers.
        name: Name of the tensor in the model.
    """
    path, _, last = name.rpartition(".")
    try:
        module = get_bare_submodule(model, path)
    except AttributeError:
        return None
    if module._parameters.get(last) is not None:
        return module._parameters
    return module._buffers if module._buffers.get(last) is not None else None


def _replace_tensor(
    model: torch.nn.Module, name: str, value: torch.Tensor, description: str, rollback: LoadRollback
) -> None:
    """Replace a sparse or quantized tensor of a model by a saved one.

    The tensor cannot be changed in place, because the saved values might need a different amount of memory.

    Args:
        model: Model without wrappers.
        name: Name of the tensor in the model.
        value: Saved tensor.
        description: Name of the tensor for messages about a failed rollback.
        rollback: Rollback to which an undo step is added before the change.
    """
    tensors, last = _find_tensor_dict(model, name), name.rpartition(".")[2]
    assert tensors is not None  # otherwise find_misfits() has refused it
    old = tensors[last]
    if isinstance(old, torch.nn.Parameter):
        rollback.add(description, partial(setattr, old, "data", old.data))
        old.data = value.to(old.device)
    else:
        rollback.add(description, partial(tensors.__setitem__, last, old))
        tensors[last] = value.to(old.device)


def find_misfits(
    objects: StatefulObjects, saved_state: CollectedState, matches: Sequence[ModelMatch] | None = None
) -> list[str]:
    """Return one message for each reason why a saved state does not fit the objects that should load it.

    Nothing is changed. The saved state must have been checked by `resume.saved`, so that it has one list for each
    kind of object.

    Args:
        objects: Objects that should load the state.
        saved_state: State of the checkpoint.
        matches: Result of `match_models`. Default: None, `match_models` is called.
    """
    problems: list[str] = []
    count = len(saved_state.state["extra"])
    if count != len(objects.models):
        advice = "" if objects.models else ": prepare() comes before"
        return [f"{count} models were saved, {len(objects.models)} are prepared{advice}"]
    for match in match_models(objects, saved_state) if matches is None else matches:
        problems += find_model_misfits(match, saved_state)
    count = len(saved_state.state["optimizer"])
    if count != len(objects.optimizers):
        problems.append(f"{count} optimizers were saved, {len(objects.optimizers)} are prepared")
    names = map_parameter_names(objects.models)
    for index, (optimizer, entry) in enumerate(zip(objects.optimizers, saved_state.state["optimizer"])):
        problems += find_optimizer_misfits(optimizer, names, entry, index)
    for kind, group in objects.others.items():
        count = len(saved_state.state.get(kind, ()))
        if count != len(group):
            problems.append(f"{count} states of kind {kind!r} were saved, there are {len(group)} such objects now")
    return problems


def describe_casts(matches: Sequence[ModelMatch]) -> list[str]:
    """Return one message for each kind of dtype cast, such as float32 to bfloat16, that loading the models requires.

    Args:
        matches: Result of `match_models`, in which `find_misfits` has found no problem.
    """
    names_by_cast: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for match in matches:
        for name, own in match.own.items():
            saved = match.saved[name]
            if saved.dtype != own.dtype:
                names_by_cast.setdefault((saved.dtype, own.dtype), []).append(name)
    lines = []
    for (saved_dtype, own_dtype), names in names_by_cast.items():
        others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        lines.append(f"{names[0]}{others}: {get_dtype_name(saved_dtype)} -> {get_dtype_name(own_dtype)}")
    return lines


class _OwnedTensors(Mapping[str, torch.Tensor]):
    """Mapping of saved tensors by name, for objects that may keep them.

    Views of mapped files are copied on access, because they are read-only and keep the file open.
    """

    def __init__(self, saved_state: CollectedState) -> None:
        self._saved_state = saved_state

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._saved_state.tensors[name]
        return tensor if name in self._saved_state.owned else copy_tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved_state.tensors)

    def __len__(self) -> int:
        return len(self._saved_state.tensors)


@pause_garbage_collection()
def restore_objects(
    objects: StatefulObjects,
    saved_state: CollectedState,
    restore_rest: Callable[[LoadRollback], None] | None = None,
    exchange_errors: Callable[[str | None], Iterable[str]] | None = None,
) -> None:
    """Restore the objects from a saved state that fits them.

    Args:
        objects: Objects to change.
        saved_state: State of the checkpoint. `find_misfits` must have found no problem with it.
        restore_rest: Function that restores all other state. It receives the `LoadRollback`, and adds an undo step
            before each change. Default: None, there is no other state.
        exchange_errors: Function that sends this rank's error message, or None, to all ranks, and returns the error
            messages of all ranks. Default: None, there are no other ranks.

    Raises:
        CheckpointError: If an object could not load its state on any rank, or the weights could not be copied on this
            rank. In the first case, all changes are undone, or the message names the objects that could not be
            restored. In the second case, the model is left partly changed.
    """
    rollback, failure, cause = LoadRollback(), None, None
    try:
        _restore_objects(objects, saved_state, rollback)
        if restore_rest is not None:
            restore_rest(rollback)
    except Exception as error:
        failure, cause = f"{type(error).__name__}: {error}", error
    except BaseException:
        rollback.run()
        raise
    if exchange_errors is not None:
        failures = list(exchange_errors(failure))
    else:
        failures = [] if failure is None else [failure]
    if failures:
        unrestored = rollback.run()
        warning = f"but this state could not be restored, so end the run: {'; '.join(unrestored)}"
        outcome = warning if unrestored else "nothing was changed"
        raise CheckpointError(f"a state could not be loaded ({'; '.join(failures)}); {outcome}") from cause
    try:
        # Exported again: loading the other objects may have run code that replaced a model's tensors.
        with torch.no_grad():
            matches = match_models(objects, saved_state)
            weights = ((tensor, match.saved[name]) for match in matches for name, tensor in match.own.items())
            copy_pairs((pair for own, saved in weights for pair in iterate_pairs(own, saved)), copy_saved_values)
        objects.apply_loaded_values()
    except Exception as error:
        raise CheckpointError(
            f"not all weights could be copied ({type(error).__name__}: {error}). The model contains a mixture of old and new "
            "weights, so end the run"
        ) from error


def _restore_objects(objects: StatefulObjects, saved_state: CollectedState, rollback: LoadRollback) -> None:
    """Restore everything except the models' weights. Everything is decoded before the first object is changed."""
    tensors, names = _OwnedTensors(saved_state), map_parameter_names(objects.models)
    others = [
        (obj, decode_value(value, tensors), f"{kind} {index}")
        for kind, group in objects.others.items()
        for index, (obj, value) in enumerate(zip(group, saved_state.state[kind]))
    ]
    states = [
        decode_optimizer(optimizer, names, entry, tensors)
        for optimizer, entry in zip(objects.optimizers, saved_state.state["optimizer"])
    ]
    for optimizer, state in zip(objects.optimizers, states):
        if has_torch_format(optimizer, state) and find_low_bit_extension(optimizer) is None:
            move_state(state["state"], list_devices(optimizer))
    extras = [decode_extras(saved_state, index, tensors) for index, _ in objects.list_models_to_load()]
    for obj, state, label in others:
        rollback.add(label, partial(restore_object, obj, copy_state(obj.state_dict())))
        obj.load_state_dict(state)
    for index, (optimizer, state) in enumerate(zip(objects.optimizers, states)):
        rollback.add(f"optimizer {index}", make_optimizer_undo(optimizer))
        if not has_torch_format(optimizer, state):  # the wrapped optimizer is changed in place
            rollback.add(
                f"what optimizer {index} wraps", partial(restore_object, optimizer, copy_state(optimizer.state_dict()))
            )
        load_optimizer(optimizer, state)
    for (index, model), values in zip(objects.list_models_to_load(), extras):
        if values:
            load_extras(dict(objects.export(model)), values, model, index, rollback)


def restore_object(obj: Any, rebuild_state: Callable[[], Any]) -> None:
    """Load the state that an object had before a failed load.

    Args:
        obj: Object with `state_dict` and `load_state_dict`.
        rebuild_state: Function that returns the former state, as `copy_state` returned it.

    Raises:
        Exception: The error of `load_state_dict`, unless the object still has its former state.
    """
    try:
        obj.load_state_dict(rebuild_state())
    except Exception:
        # An object that refuses every state has most likely changed nothing.
        if not is_same_state(obj.state_dict(), rebuild_state()):
            raise
