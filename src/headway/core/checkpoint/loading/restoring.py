"""Restore objects from a saved state, all or nothing. `misfits.find_misfits` has checked everything before.

Steps that run the user's code can still fail. They run first, each with an undo step (`LoadRollback`). Weights are
copied last, because they have been checked completely, and undoing the copy would need a second copy of all weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint.format.dense import copy_tensor
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.loading.chunked import iterate_pairs, read_whole
from headway.core.checkpoint.loading.device_copies import copy_pairs, move_state
from headway.core.checkpoint.loading.misfits import ModelMatch, match_models, remove_repeats
from headway.core.checkpoint.loading.model_extras import decode_extras, load_extras
from headway.core.checkpoint.loading.rollback import LoadRollback, copy_state, restore_object
from headway.core.checkpoint.optimizer_state import (
    decode_optimizer,
    has_torch_format,
    list_devices,
    load_optimizer,
    make_optimizer_undo,
)
from headway.core.checkpoint.state import CollectedState, Stateful, StatefulObjects, map_parameter_names
from headway.core.training.prepared.low_bit import find_low_bit_extension
from headway.core.weights.quantization_data import has_settings, restore_offset
from headway.core.weights.tensor_bytes import view_as_bits
from headway.errors import CheckpointError


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
            weights = (
                (tensor, match.saved[name])
                for match in matches
                for name, tensor in match.own.items()
                if not has_settings(name)
            )
            copy_pairs((pair for own, saved in weights for pair in iterate_pairs(own, saved)), copy_saved_values)
            _restore_offsets(matches)
        objects.apply_loaded_values()
    except Exception as error:
        raise CheckpointError(
            f"not all weights could be copied ({type(error).__name__}: {error}). The model contains a mixture of old and new "
            "weights, so end the run"
        ) from error


def _restore_offsets(matches: Sequence[ModelMatch]) -> None:
    """Restore the mean of the quantized scales in each 4-bit layer of bitsandbytes, from the checkpoint's settings.

    A layer exports this mean as JSON in a new tensor, so copying saved values into that tensor does not change the layer.
    """
    for match in matches:
        for name in filter(has_settings, match.exported):
            saved = match.saved[to_logical_name(f"model/{match.index}/{name}")]
            restore_offset(match.model, name, read_whole(saved))


def _restore_objects(objects: StatefulObjects, saved_state: CollectedState, rollback: LoadRollback) -> None:
    """Restore everything except the models' weights. Everything is decoded before the first object is changed.

    Args:
        objects: Objects to change.
        saved_state: State of the checkpoint, which fits them.
        rollback: Rollback to which an undo step is added before each change.
    """
    decoded = _decode_states(objects, saved_state)
    for label, obj, state in decoded.others:
        rollback.add(label, partial(restore_object, obj, copy_state(obj.state_dict())))
        obj.load_state_dict(state)
    for index, (optimizer, state) in enumerate(zip(objects.optimizers, decoded.optimizer_states)):
        rollback.add(f"optimizer {index}", make_optimizer_undo(optimizer))
        if not has_torch_format(optimizer, state):  # the wrapped optimizer is changed in place
            rollback.add(
                f"what optimizer {index} wraps", partial(restore_object, optimizer, copy_state(optimizer.state_dict()))
            )
        load_optimizer(optimizer, state)
    for (index, model), values in zip(objects.list_models_to_load(), decoded.model_extras):
        if values:
            load_extras(dict(objects.export(model)), values, model, index, rollback)


class _DecodedStates(NamedTuple):
    """States of all objects except the models' weights, decoded from a checkpoint.

    Attributes:
        others: Triples of (name of the object for messages, object, its state dict).
        optimizer_states: State dict of each optimizer.
        model_extras: For each model to load, its extra states and nondense tensors by logical name.
    """

    others: list[tuple[str, Stateful, dict[str, Any]]]
    optimizer_states: list[dict[str, Any]]
    model_extras: list[dict[str, Any]]


def _decode_states(objects: StatefulObjects, saved_state: CollectedState) -> _DecodedStates:
    """Return the states that the objects will load. No object is changed.

    Large tensors of optimizers are moved to the devices of their parameters here, on several threads.

    Args:
        objects: Objects that will load the states.
        saved_state: State of the checkpoint, which fits them.
    """
    tensors, names = _OwnedTensors(saved_state), map_parameter_names(objects.models)
    others = []
    for kind, objects_of_kind in objects.others.items():
        for index, (obj, value) in enumerate(zip(objects_of_kind, saved_state.state[kind])):
            others.append((f"{kind} {index}", obj, decode_value(value, tensors)))
    optimizer_states = [
        decode_optimizer(optimizer, names, entry, tensors)
        for optimizer, entry in zip(objects.optimizers, saved_state.state["optimizer"])
    ]
    for optimizer, state in zip(objects.optimizers, optimizer_states):
        if has_torch_format(optimizer, state) and find_low_bit_extension(optimizer) is None:
            move_state(state["state"], list_devices(optimizer))
    model_extras = [decode_extras(saved_state, index, tensors) for index, _ in objects.list_models_to_load()]
    return _DecodedStates(others, optimizer_states, model_extras)


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


def copy_saved_values(own: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy saved values into a model's own tensor, whose elements can share memory.

    Call it only if `find_misfit` has returned None for the two tensors.

    Args:
        own: Tensor of the model.
        saved: Saved values.
    """
    reduced, value = remove_repeats(own, saved)
    assert value is not None  # otherwise find_misfits() has refused it
    if reduced.dtype == value.dtype:
        reduced, value = view_as_bits(reduced), view_as_bits(value)
    reduced.copy_(value)
