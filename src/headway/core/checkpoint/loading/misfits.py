"""Find out whether a saved state fits the objects that should load it, before anything is changed.

`find_misfits` compares models and optimizers with the saved ones, and `describe_casts` lists the dtypes that will be
cast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from headway.core.checkpoint.format.dense import is_uninitialized
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.loading.chunked import iterate_pairs, read_whole
from headway.core.checkpoint.loading.model_extras import find_extra_misfits
from headway.core.checkpoint.optimizer_state import find_optimizer_misfits
from headway.core.checkpoint.state import CollectedState, StatefulObjects, is_extra, is_weight, map_parameter_names
from headway.core.weights.pieces import get_local_part
from headway.core.weights.quantization_data import find_settings_misfit, has_settings
from headway.core.weights.tensor_bytes import get_dtype_name, is_bit_identical, view_as_bits


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
    if matches is None:
        matches = match_models(objects, saved_state)
    for match in matches:
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


def _collect_own_tensors(own: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the model's dense tensors by logical name, from the values of its state dict by name."""
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
        if has_settings(name):
            problem = find_settings_misfit(own[name], read_whole(saved[name]))
        else:
            problem = find_misfit(own[name], saved[name])
        if problem is not None:
            problems.append(f"{name} {problem}")
    return sorted(problems + find_extra_misfits(match.model, match.exported, saved_state, match.index))


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
    reduced, value = remove_repeats(own, saved)
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
    return f"{message}, and contains values that are too large for it" if is_lost else None


def _widen_small_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float16, bfloat16 or float8 tensor as float32, and any other tensor unchanged."""
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
    return tensor.float() if is_small else tensor


def remove_repeats(own: torch.Tensor, saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
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
