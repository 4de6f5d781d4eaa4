"""The state of a run as named tensors and JSON, and back into the objects: all of it or nothing.

Names are logical: `model/0/` and the bare module's names; `optimizer/0/`, the parameter's name and the key. So another
world size, another wrapping, or another order of parameter groups finds the same tensors.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

import torch

from headway.checkpoint.values import decode, encode
from headway.checkpoint.weights import untied
from headway.errors import CheckpointError


class Stateful(Protocol):
    """Anything with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: numbers, text, tensors, and containers of them."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take a state up."""


@dataclass
class Parts:
    """The objects whose state a checkpoint holds.

    Attributes:
        models: bare modules.
        optimizers: torch's own optimizers.
        others: by kind (`scheduler`, `loader`, `custom` ...), objects with state_dict and load_state_dict.
        export: yields a model's (name, tensor) pairs.
        left_out: indices of models that are neither compared nor loaded.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Sequence[Stateful]]
    export: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]
    left_out: set[int] = field(default_factory=set)

    def chosen(self) -> list[tuple[int, torch.nn.Module]]:
        """The models that are loaded, with their numbers."""
        return [(index, model) for index, model in enumerate(self.models) if index not in self.left_out]


@dataclass
class Collected:
    """A run's state, taken apart: tensors and tied names by logical name, the rest as JSON.

    Attributes:
        owned: names of tensors that nothing else refers to, so that objects may keep them.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


def collect(parts: Parts) -> Collected:
    """Take the state apart; tensors are not copied.

    Raises:
        CheckpointError: something in a state_dict can only be pickled.
    """
    out = Collected()
    extras = []
    for index, model in enumerate(parts.models):
        named = [(f"model/{index}/{name}", value) for name, value in parts.export(model)]
        kept, tied = untied((name, value) for name, value in named if isinstance(value, torch.Tensor))
        out.tensors.update(kept)
        out.aliases.update(tied)
        extras.append({
            name: encode(value, f"extra/{name}", out.tensors) for name, value in named if not isinstance(value, torch.Tensor)
        })  # fmt: skip
    names = parameter_names(parts.models)
    out.state["extra"] = extras
    out.state["optimizer"] = [
        _optimizer_state(optimizer, names, index, out.tensors) for index, optimizer in enumerate(parts.optimizers)
    ]
    for kind, objects in parts.others.items():
        out.state[kind] = [
            encode(obj.state_dict(), f"{kind}/{index}", out.tensors) for index, obj in enumerate(objects)
        ]
    return out


def parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """The logical name of each parameter, by its id."""
    return {
        id(parameter): f"{index}/{name}"
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def _keys(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group; one that is in no model is named by its place."""
    return [
        [names.get(id(p), f"group{g}/{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    saved = optimizer.state_dict()
    keys = _keys(optimizer, names)
    by_number = {
        number: key
        for group, group_keys in zip(saved["param_groups"], keys)
        for number, key in zip(group["params"], group_keys)
    }
    prefix = f"optimizer/{index}"
    groups = [
        {
            name: encode(value, f"{prefix}/groups/{g}/{name}", tensors)
            for name, value in group.items()
            if name != "params"
        }
        for g, group in enumerate(saved["param_groups"])
    ]
    values = {
        by_number.get(number, str(number)): {
            str(key): encode(value, f"{prefix}/{by_number.get(number, number)}/{key}", tensors)
            for key, value in entry.items()
        }
        for number, entry in saved["state"].items()
    }
    rest = {name: encode(value, f"{prefix}/{name}", tensors) for name, value in saved.items()
            if name not in ("param_groups", "state")}  # fmt: skip
    return {"type": type(optimizer).__qualname__, "params": keys, "groups": groups, "values": values, "rest": rest}


# -------------------------------------------------------------------- back


def misfits(parts: Parts, found: Collected) -> list[str]:
    """Everything about the saved state that does not fit the objects; nothing is changed."""
    problems: list[str] = []
    count = len(found.state.get("extra", ()))
    if count != len(parts.models):
        return [f"{count} models were saved, {len(parts.models)} are prepared"]
    for index, model in parts.chosen():
        problems += _model_misfits(dict(parts.export(model)), found, f"model/{index}/")
    saved = found.state.get("optimizer", ())
    if len(saved) != len(parts.optimizers):
        problems.append(f"{len(saved)} optimizers were saved, {len(parts.optimizers)} are prepared")
    names = parameter_names(parts.models)
    for index, (optimizer, entry) in enumerate(zip(parts.optimizers, saved)):
        problems += _optimizer_misfits(optimizer, names, entry, index)
    for kind, objects in parts.others.items():
        num_saved = len(found.state.get(kind, ()))
        if num_saved != len(objects):
            problems.append(
                f"{num_saved} states of kind {kind!r} were saved, there are {len(objects)} such objects now"
            )
    return problems


def _model_misfits(own: Mapping[str, Any], found: Collected, prefix: str) -> list[str]:
    saved = {name[len(prefix) :]: tensor for name, tensor in found.tensors.items() if name.startswith(prefix)}
    for name, target in found.aliases.items():
        if name.startswith(prefix) and target in found.tensors:
            saved[name[len(prefix) :]] = found.tensors[target]
    mine = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    problems = []
    for name in mine.keys() - saved.keys():
        near = get_close_matches(name, saved.keys() - mine.keys(), 1)
        problems.append(f"{prefix}{name} is not in the checkpoint" + (f"; it has {near[0]}" if near else ""))
    problems += [f"{prefix}{name} is in the checkpoint, the model has none" for name in saved.keys() - mine.keys()]
    for name in mine.keys() & saved.keys():
        if mine[name].shape != saved[name].shape:
            problems.append(
                f"{prefix}{name} has the shape {tuple(mine[name].shape)}, the checkpoint's {tuple(saved[name].shape)}"
            )
    return sorted(problems)


def _optimizer_misfits(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], entry: Mapping[str, Any], index: int
) -> list[str]:
    problems = []
    if entry["type"] != type(optimizer).__qualname__:
        problems.append(f"optimizer {index} is {type(optimizer).__qualname__}; the saved one was {entry['type']}")
    saved, own = [set(keys) for keys in entry["params"]], [set(keys) for keys in _keys(optimizer, names)]
    if saved != own:
        lacking = sorted(set().union(*own) - set().union(*saved))[:3]
        extra = sorted(set().union(*saved) - set().union(*own))[:3]
        problems.append(
            f"optimizer {index} has other parameters or groups than the saved one: {len(own)} groups against {len(saved)}"
            + (f"; not saved: {', '.join(lacking)}" if lacking else "") + (f"; only saved: {', '.join(extra)}" if extra else "")
        )  # fmt: skip
    return problems


def restore(parts: Parts, found: Collected) -> None:
    """Put the saved state into the objects. What can fail in user code is done first, and undone where it fails.

    Raises:
        CheckpointError: a load_state_dict failed; everything is as it was.
    """
    others = [(obj, decode(value, found.tensors), f"{kind} {index}") for kind, objects in parts.others.items()
              for index, (obj, value) in enumerate(zip(objects, found.state[kind]))]  # fmt: skip
    names = parameter_names(parts.models)
    own = {id(found.tensors[name]) for name in found.owned}
    prepared = [_decoded(optimizer, names, entry, found.tensors)
                for optimizer, entry in zip(parts.optimizers, found.state["optimizer"])]  # fmt: skip
    undo: list[tuple[Any, dict[str, Any]]] = []
    try:
        for obj, state, _ in others:
            undo.append((obj, obj.state_dict()))
            obj.load_state_dict(state)
        for optimizer, state in zip(parts.optimizers, prepared):
            undo.append((optimizer, optimizer.state_dict()))
            _load_optimizer(optimizer, state, own)
        for index, model in parts.chosen():
            _load_model(dict(parts.export(model)), found, f"model/{index}/", model, found.state["extra"][index])
    except Exception as error:
        for obj, before in reversed(undo):
            obj.load_state_dict(before)
        raise CheckpointError(
            f"a state could not be taken up ({type(error).__name__}: {error}); nothing was changed"
        ) from error


def _decoded(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    entry: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """The state dict that this optimizer would have given, in its own order of parameters."""
    own = optimizer.state_dict()["param_groups"]
    numbers = {key: n for keys, group in zip(_keys(optimizer, names), own) for key, n in zip(keys, group["params"])}
    groups = [{**decode(group, tensors), "params": mine["params"]} for group, mine in zip(entry["groups"], own)]
    values = {numbers[key]: decode(value, tensors) for key, value in entry["values"].items()}
    return {"state": values, "param_groups": groups, **decode(entry["rest"], tensors)}


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], own: Container[int]) -> None:
    optimizer.load_state_dict(_copied(state, own))
    # torch casts floating state to its parameter's dtype; a state that was kept in another must come back in it.
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    for parameter, number in zip(flat, numbers):
        for key, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.clone().to(loaded.device)


def _copied(value: Any, own: Container[int]) -> Any:
    """Tensors of a mapped file must not become an optimizer's own: they would keep the file open, and cannot be written.

    Args:
        value: a state.
        own: ids of tensors that may.
    """
    if isinstance(value, torch.Tensor):
        return value if id(value) in own else value.clone()
    if isinstance(value, dict):
        return {key: _copied(item, own) for key, item in value.items()}
    return [_copied(item, own) for item in value] if isinstance(value, list) else value


def _load_model(
    own: Mapping[str, Any], found: Collected, prefix: str, model: torch.nn.Module, extra: Mapping[str, Any]
) -> None:
    values = {name[len(prefix) :]: decode(value, found.tensors) for name, value in extra.items()}
    for name, value in values.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.set_extra_state(value)
    with torch.no_grad():
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                full = prefix + name
                tensor.copy_(found.tensors[found.aliases.get(full, full)])
