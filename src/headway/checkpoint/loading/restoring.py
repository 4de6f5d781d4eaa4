"""A saved state back into the objects: all of it or nothing. First everything is checked, then everything changes.

What runs the user's code may still fail, so it goes first, each step with its way back; weights, which were checked and
have no way back without a second copy of them, go last.

A model's saved tensors against its own: what does not fit, what is cast, the values put in, and the way back. From a load that
failed half-way what was changed goes back, last first, and every step of it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy
import torch

from headway.checkpoint.format.tensors import copied, is_dense, is_unmade
from headway.checkpoint.format.values import decode, encode, logical, map_items
from headway.checkpoint.loading.files import pairs
from headway.checkpoint.state import (
    CollectedState,
    StatefulObjects,
    decode_optimizer,
    is_extra,
    is_weight,
    load_optimizer,
    optimizer_misfits,
    parameter_names,
    undo_optimizer,
)
from headway.errors import CheckpointError
from headway.weights.pieces import held, is_dtensor
from headway.weights.shards import bits, dtype_name, is_same, raw_bytes


class LoadRollback:
    """What a load has changed so far."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Any]]] = []

    def add(self, what: str, back: Callable[[], Any]) -> None:
        """`what` is about to change; `back` puts it back."""
        self._steps.append((what, back))

    def run(self) -> list[str]:
        """Put everything back; returns a line for each that could not be."""
        problems = []
        while self._steps:
            what, back = self._steps.pop()
            try:
                back()
            except Exception as error:  # the others go back all the same
                problems.append(f"{what} ({type(error).__name__}: {error})")
        return problems


def preserved(state: Any) -> Callable[[], Any]:
    """A function that returns the state as it is now, whatever becomes of it; tensors are copied to the host meanwhile."""
    kept = _keep(state)
    return lambda: _back(kept)


def is_same_state(one: Any, other: Any) -> bool:
    """Do the two hold the same values, bit by bit? Of what no checkpoint holds nobody knows: False."""
    told = []
    for state in (one, other):
        tensors: dict[str, torch.Tensor] = {}
        try:
            told.append((encode(state, "", tensors), tensors))
        except CheckpointError:
            return False
    (first, mine), (second, theirs) = told
    return bool(first == second) and all(
        tensor.dtype == theirs[name].dtype and torch.equal(raw_bytes(held(tensor)), raw_bytes(held(theirs[name])))
        for name, tensor in mine.items()
    )


class _TensorValue:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad and tensor.is_leaf
        self._is_parameter = isinstance(tensor, torch.nn.Parameter)
        plain = bits(tensor.detach())
        self._dtype = tensor.dtype
        self._copy = plain.clone() if tensor.device.type == "cpu" else plain.cpu()

    def back(self) -> torch.Tensor:
        tensor = self._copy.to(self._device).view(self._dtype)
        if self._is_parameter:
            return torch.nn.Parameter(tensor, self._needs_grad)
        return tensor.requires_grad_() if self._needs_grad else tensor


def _keep(value: Any) -> Any:
    if is_dtensor(value):
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return _TensorValue(value) if is_dense(value) and not value.is_meta else value
    if isinstance(value, numpy.ndarray):
        return value.copy()
    return map_items(_keep, value)


def _back(value: Any) -> Any:
    return value.back() if isinstance(value, _TensorValue) else map_items(_back, value)


def _own_tensors(own: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {logical(prefix + name): value for name, value in own.items() if is_weight(name, value)}


def saved_tensors(found: CollectedState, prefix: str) -> dict[str, Any]:
    """A model's saved weights by their logical names, tied ones too."""
    saved = {name: tensor for name, tensor in found.tensors.items() if name.startswith(prefix)}
    for name, target in found.aliases.items():
        if name.startswith(prefix) and target in found.tensors:
            saved[name] = found.tensors[target]
    return {name: tensor for name, tensor in saved.items() if not is_extra(name)}


def model_misfits(model: torch.nn.Module, own: Mapping[str, Any], found: CollectedState, index: int) -> list[str]:
    """Everything about a model's saved tensors that does not fit its own; nothing is changed.

    Raises:
        CheckpointError: the saved extra state is nothing that was saved.
    """
    prefix = f"model/{index}/"
    saved, mine = saved_tensors(found, prefix), _own_tensors(own, prefix)
    problems = []
    for name in mine.keys() - saved.keys():
        near = get_close_matches(name, saved.keys() - mine.keys(), 1)
        problems.append(
            f"{name} is not in the checkpoint" + (f"; it has {near[0].removeprefix(prefix)}" if near else "")
        )
    problems += [f"{name} is in the checkpoint, the model has none" for name in saved.keys() - mine.keys()]
    for name in mine.keys() & saved.keys():
        problem = misfit(mine[name], saved[name])
        if problem is not None:
            problems.append(f"{name} {problem}")
    return sorted(problems + _extra_misfits(model, own, found, index))


def misfit(own: Any, saved: Any) -> str | None:
    """Why the saved values cannot be put into a model's own tensor; of a spread one, into what lies here."""
    here = held(own)
    if is_unmade(here):
        return "has no shape yet (of a lazy module): run one forward before the load"
    if tuple(own.shape) != tuple(saved.shape):
        return f"has the shape {tuple(own.shape)}, the checkpoint's {tuple(saved.shape)}"
    if here.is_meta:
        return "lies on the meta device, which has no memory: let the model be made before the load"
    if here.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in torch.inference_mode(), and cannot be changed: make the model outside of it"
    return next((problem for pair in pairs(own, saved) if (problem := _part_misfit(*pair)) is not None), None)


def _part_misfit(own: torch.Tensor, saved: torch.Tensor) -> str | None:
    problem = None if own.dtype == saved.dtype else _cast_problem(own.dtype, saved)
    if problem is not None:
        return problem
    narrow, value = _without_repeats(own, saved)
    if value is None or not _fits_overlaps(narrow, value):
        return "has elements that share memory (as expand() makes them), and other values were saved for them"
    return None


def _cast_problem(dtype: torch.dtype, saved: torch.Tensor) -> str | None:
    """Why values of one dtype cannot be taken as another: the kind of number differs, or some become others."""
    told = f"is of {dtype}, the checkpoint's of {saved.dtype}"
    is_castable = bits(saved) is saved and bits(torch.empty(0, dtype=dtype)).dtype == dtype
    if not is_castable or not torch.can_cast(saved.dtype, dtype) or dtype is torch.bool:
        return told
    cast = saved.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Compared in float32 at the least: small formats have no isfinite.
        is_lost = bool((_wide(saved).isfinite() & ~_wide(cast).isfinite()).any())
    else:
        is_lost = not torch.equal(cast.to(saved.dtype), saved) or bool(((cast < 0) != (saved < 0)).any())
    return f"{told}, and holds values that are too large for it" if is_lost else None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
    return tensor.float() if is_small else tensor


def _without_repeats(own: torch.Tensor, saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An expanded tensor as what it was expanded from, and the values for that; None where these differ."""
    value = saved
    for dim, (size, stride) in enumerate(zip(own.shape, own.stride())):
        if stride == 0 and size > 1:
            own, first = own.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            if not is_same(first.expand_as(value), value):
                return own, None
            value = first
    return own, value


def _fits_overlaps(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Would a tensor that is laid out like this hold these values?"""
    if not own.numel() or own.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(own):
        return True
    like = bits(torch.empty_strided(own.shape, own.stride(), dtype=value.dtype))
    return is_same(like.copy_(bits(value)), value)


def _weights(parts: StatefulObjects, found: CollectedState) -> Iterator[tuple[str, Any, Any]]:
    """(name, own tensor, saved one) of the weights of the models that are loaded; `misfits` has found nothing."""
    for index, model in parts.chosen():
        prefix = f"model/{index}/"
        saved = saved_tensors(found, prefix)
        for name, tensor in _own_tensors(dict(parts.export(model)), prefix).items():
            yield name, tensor, saved[name]


def put_in(own: torch.Tensor, saved: torch.Tensor) -> None:
    """Put saved values into a model's own tensor, whose elements may share memory; `misfit` has found nothing."""
    narrow, value = _without_repeats(own, saved)
    assert value is not None  # else it is a misfit
    if narrow.dtype == value.dtype:
        narrow, value = bits(narrow), bits(value)
    narrow.copy_(value)


# -------------------------------------------------------------------- extra state; sparse and quantized tensors


def _parts(own: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """A model's own tensors that are not dense."""
    return {
        logical(prefix + name).removeprefix(prefix): value
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and not is_dense(value) and not is_extra(name)
    }


def saved_extras(found: CollectedState, index: int, source: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What was saved of a model besides its weights, by name.

    Args:
        found: the saved state.
        index: the model's number.
        source: its tensors, or such that a model may keep.

    Raises:
        CheckpointError: it is nothing that was saved.
    """
    prefix = f"model/{index}/"
    values = {name.removeprefix(prefix): source[name] for name in source if name.startswith(prefix) and is_extra(name)}
    return values | {name: decode(value, source) for name, value in found.state["extra"][index].items()}


def _extra_misfits(model: torch.nn.Module, own: Mapping[str, Any], found: CollectedState, index: int) -> list[str]:
    prefix = f"model/{index}/"
    saved, mine = saved_extras(found, index, found.tensors), _parts(own, prefix)
    names = {logical(prefix + name).removeprefix(prefix): name for name in own}
    problems = []
    for name, tensor in mine.items():
        value = saved.get(name)
        if _holder(model, names[name]) is None:
            problems.append(f"{prefix}{name} is a {_described(tensor)} that the model keeps under another name")
        elif not isinstance(value, torch.Tensor):
            problems.append(f"{prefix}{name} is not in the checkpoint")
        elif _described(value) != _described(tensor):
            problems.append(f"{prefix}{name} is {_described(tensor)}, the checkpoint's {_described(value)}")
    extras = {logical(prefix + name).removeprefix(prefix) for name in own if is_extra(name)}
    lost = saved.keys() - mine.keys() - extras
    return problems + [f"{prefix}{name} is in the checkpoint, the model has none" for name in lost]


def _described(tensor: torch.Tensor) -> str:
    kind = "quantized" if tensor.is_quantized else str(tensor.layout)
    scheme = f", {tensor.qscheme()}" if tensor.is_quantized else ""
    return f"{kind} of {tensor.dtype} and {tuple(tensor.shape)}{scheme}"


def load_extras(
    own: Mapping[str, Any], values: Mapping[str, Any], model: torch.nn.Module, index: int, undo: LoadRollback
) -> None:
    """Put in what is not a weight, in code of the user's for the most part.

    Args:
        own: the model's state.
        values: what `saved_extras` gave.
        model: whose modules take their extra states up.
        index: its number.
        undo: learns how to put back what changes.
    """
    prefix = f"model/{index}/"
    for name in own:
        key = logical(prefix + name).removeprefix(prefix)
        if key not in values:
            continue
        if is_extra(name):
            owner = model.get_submodule(name.rpartition(".")[0])
            before = preserved(own[name])
            undo.add(prefix + key, lambda owner=owner, before=before: owner.set_extra_state(before()))  # type: ignore[misc]
            owner.set_extra_state(values[key])
        else:
            _replace(model, name, values[key], prefix + key, undo)


def _holder(model: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a model keeps a tensor of that name; None where its state dict calls it otherwise."""
    path, _, last = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return None
    return next((held for held in (owner._parameters, owner._buffers) if held.get(last) is not None), None)


def _replace(model: torch.nn.Module, name: str, value: torch.Tensor, told: str, undo: LoadRollback) -> None:
    """Sparse and quantized tensors take another place in memory with other values, so they are exchanged."""
    held, last = _holder(model, name), name.rpartition(".")[2]
    assert held is not None  # else it is a misfit
    old = held[last]
    if isinstance(old, torch.nn.Parameter):
        undo.add(told, partial(setattr, old, "data", old.data))
        old.data = value.to(old.device)
    else:
        undo.add(told, partial(held.__setitem__, last, old))
        held[last] = value.to(old.device)


def misfits(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """Everything about the saved state that does not fit the objects; nothing is changed.

    That it is a state, with a list of each kind, `resume.saved` has seen.
    """
    problems: list[str] = []
    count = len(found.state["extra"])
    if count != len(parts.models):
        advice = "" if parts.models else ": prepare() comes before"
        return [f"{count} models were saved, {len(parts.models)} are prepared{advice}"]
    for index, model in parts.chosen():
        problems += model_misfits(model, dict(parts.export(model)), found, index)
    count = len(found.state["optimizer"])
    if count != len(parts.optimizers):
        problems.append(f"{count} optimizers were saved, {len(parts.optimizers)} are prepared")
    names = parameter_names(parts.models)
    for index, (optimizer, entry) in enumerate(zip(parts.optimizers, found.state["optimizer"])):
        problems += optimizer_misfits(optimizer, names, entry, index)
    for kind, objects in parts.others.items():
        count = len(found.state.get(kind, ()))
        if count != len(objects):
            problems.append(f"{count} states of kind {kind!r} were saved, there are {len(objects)} such objects now")
    return problems


def cast_lines(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """A line for each pair of dtypes that a load of the models casts between."""
    counted: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    first: dict[tuple[torch.dtype, torch.dtype], str] = {}
    for name, own, saved in _weights(parts, found):
        if saved.dtype != own.dtype:
            counted[saved.dtype, own.dtype] += 1
            first.setdefault((saved.dtype, own.dtype), name)
    return [
        f"{first[pair]}{f' and {count - 1} more tensors' if count > 1 else ''}: {dtype_name(pair[0])} -> {dtype_name(pair[1])}"
        for pair, count in counted.items()
    ]


class _OwnedTensors(Mapping[str, torch.Tensor]):
    """Tensors that an object may keep: those of a mapped file would keep it open, and cannot be written."""

    def __init__(self, found: CollectedState) -> None:
        self._found = found

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._found.tensors[name]
        return tensor if name in self._found.owned else copied(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.tensors)

    def __len__(self) -> int:
        return len(self._found.tensors)


def restore(
    parts: StatefulObjects,
    found: CollectedState,
    more: Callable[[LoadRollback], None] | None = None,
    agree: Callable[[str | None], Iterable[str]] | None = None,
) -> None:
    """Put the saved state into the objects, which it fits.

    Args:
        parts: the objects.
        found: what was saved; `misfits` has found nothing.
        more: changes what else belongs to a load, and tells the undo of each step before it.
        agree: tells all ranks this one's failure or None, and returns those of all; None: there are no others.

    Raises:
        CheckpointError: a load_state_dict failed, on any rank; everything is as it was, or the message says what is not.
    """
    undo, failure, cause = LoadRollback(), None, None
    try:
        _restore_objects(parts, found, undo)
        if more is not None:
            more(undo)
    except Exception as error:
        failure, cause = f"{type(error).__name__}: {error}", error
    except BaseException:
        undo.run()
        raise
    failures = list(agree(failure)) if agree is not None else [failure] if failure else []
    if failures:
        left = undo.run()
        told = f"but this could not be put back, so end the run: {'; '.join(left)}" if left else "nothing was changed"
        raise CheckpointError(f"a state could not be taken up ({'; '.join(failures)}); {told}") from cause
    try:
        for _, own, saved in _weights(parts, found):
            with torch.no_grad():
                for part, values in pairs(own, saved):
                    put_in(part, values)
        parts.settle()
    except Exception as error:
        raise CheckpointError(
            f"the weights could not be copied to the end ({type(error).__name__}: {error}): the model is in between, so end the run"
        ) from error


def _restore_objects(parts: StatefulObjects, found: CollectedState, undo: LoadRollback) -> None:
    tensors, names = _OwnedTensors(found), parameter_names(parts.models)
    others = [
        (obj, decode(value, tensors), f"{kind} {index}")
        for kind, objects in parts.others.items()
        for index, (obj, value) in enumerate(zip(objects, found.state[kind]))
    ]
    states = [
        decode_optimizer(optimizer, names, entry, tensors)
        for optimizer, entry in zip(parts.optimizers, found.state["optimizer"])
    ]
    extras = [saved_extras(found, index, tensors) for index, _ in parts.chosen()]
    for obj, state, told in others:
        undo.add(told, partial(put_back, obj, preserved(obj.state_dict())))
        obj.load_state_dict(state)
    for index, (optimizer, state) in enumerate(zip(parts.optimizers, states)):
        undo.add(f"optimizer {index}", undo_optimizer(optimizer))
        load_optimizer(optimizer, state)
    for (index, model), values in zip(parts.chosen(), extras):
        load_extras(dict(parts.export(model)), values, model, index, undo)


def put_back(obj: Any, before: Callable[[], Any]) -> None:
    """Let an object have its former state again, as `preserved` gave it."""
    try:
        obj.load_state_dict(before())
    except Exception:
        # What refuses every state has most likely changed nothing either.
        if not is_same_state(obj.state_dict(), before()):
            raise
