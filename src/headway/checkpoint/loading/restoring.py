"""A saved state back into the objects: all of it or nothing. First everything is checked, then everything changes.

What runs the user's code may still fail, so it goes first, each step with its way back; weights, which were checked and
have no way back without a second copy of them, go last.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from headway.checkpoint.format.tensors import copied
from headway.checkpoint.format.values import decode
from headway.checkpoint.loading.model import (
    LoadRollback,
    casts,
    is_same_state,
    load_extras,
    load_weights,
    model_misfits,
    preserved,
    saved_extras,
)
from headway.checkpoint.optimizers import decode_optimizer, load_optimizer, optimizer_misfits, undo_optimizer
from headway.checkpoint.state import CollectedState, StatefulObjects, parameter_names
from headway.errors import CheckpointError
from headway.weights.shards import dtype_name


def misfits(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """Everything about the saved state that does not fit the objects; nothing is changed.

    Raises:
        CheckpointError: it is nothing that was saved.
    """
    problems: list[str] = []
    count = _count(found, "extra")
    if count != len(parts.models):
        advice = "" if parts.models else ": prepare() comes before"
        return [f"{count} models were saved, {len(parts.models)} are prepared{advice}"]
    for index, model in parts.chosen():
        problems += model_misfits(model, dict(parts.export(model)), found, index)
    count = _count(found, "optimizer")
    if count != len(parts.optimizers):
        problems.append(f"{count} optimizers were saved, {len(parts.optimizers)} are prepared")
    names = parameter_names(parts.models)
    for index, (optimizer, entry) in enumerate(zip(parts.optimizers, found.state["optimizer"] if count else ())):
        problems += optimizer_misfits(optimizer, names, entry, index)
    for kind, objects in parts.others.items():
        count = _count(found, kind)
        if count != len(objects):
            problems.append(f"{count} states of kind {kind!r} were saved, there are {len(objects)} such objects now")
    return problems


def _count(found: CollectedState, kind: str) -> int:
    """How many states of that kind were saved."""
    states = found.state.get(kind, [])
    if not isinstance(states, list):
        raise CheckpointError(f"the manifest has a {type(states).__name__} where the states of kind {kind!r} belong")
    return len(states)


def cast_lines(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """A line for each pair of dtypes that a load of the models casts between."""
    counted: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    first: dict[tuple[torch.dtype, torch.dtype], str] = {}
    for index, model in parts.chosen():
        for name, saved, own in casts(dict(parts.export(model)), found, index):
            counted[saved, own] += 1
            first.setdefault((saved, own), name)
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
        for index, model in parts.chosen():
            load_weights(dict(parts.export(model)), found, index)
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
