"""The state of a run as named tensors and JSON; an optimizer's by the names of its parameters, and back.

Names are logical: `model/0/` and the bare module's names; `optimizer/0/`, the parameter's name and the key. So another
world size, another wrapping, or another order of parameter groups finds the same tensors.

Tensors of which each rank has its own: in a checkpoint, beside the one for all, rows of a tensor that the ranks write together.

An optimizer takes its state up in its own dtypes and types, whatever torch casts. Optimizer states in few bits (torchao's AdamW8bit,
AdamW4bit, AdamWFp8) are saved as float32 values, quantised again when loaded. Their blocks run over a rank's part as if it had no
rows, so codes and scales fit no other layout; the values they stand for fit all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from headway.checkpoint.format.tensors import is_dense, refusal
from headway.checkpoint.format.values import decode, encode, is_object, logical, map_items
from headway.common.optional import Later
from headway.errors import CheckpointError
from headway.weights.export import untied
from headway.weights.pieces import ShardCutter, ShardPiece, TensorBox, TensorSplit, held, is_dtensor, is_spread

dtensor = Later("torch.distributed.tensor")

EXTRA = "_extra_state"
"""How torch calls the extra state of a module in its state dict."""
ROWS = "rows/"
"""How the names of tensors begin of which each rank has its own; what follows is the name of the one for all."""
_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are kept in few bits, and whether their values have signs."""


class Stateful(Protocol):
    """Anything with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: numbers, text, tensors, and containers of them."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take a state up."""


@dataclass
class StatefulObjects:
    """The objects whose state a checkpoint holds.

    Attributes:
        models: bare modules.
        optimizers: torch's own optimizers.
        others: by kind (`scheduler`, `loader`, `custom` ...), objects with state_dict and load_state_dict.
        export: yields a model's (name, tensor) pairs.
        left_out: indices of models that are neither compared nor loaded.
        part_of: a parameter as it is spread here: itself, or a piece.
        exposed: a block in which an optimizer shows its state, where an engine keeps it elsewhere.
        settle: what was loaded is in place: engines go on from it.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Sequence[Stateful]]
    export: Callable[[torch.nn.Module], Iterable[tuple[str, Any]]]
    left_out: set[int] = field(default_factory=set)
    part_of: Callable[[torch.Tensor], Any] = lambda parameter: parameter
    exposed: Callable[[torch.optim.Optimizer], AbstractContextManager[Any]] = lambda optimizer: nullcontext()
    settle: Callable[[], None] = lambda: None

    def chosen(self) -> list[tuple[int, torch.nn.Module]]:
        """The models that are loaded, with their numbers."""
        return [(index, model) for index, model in enumerate(self.models) if index not in self.left_out]


@dataclass
class CollectedState:
    """A run's state, taken apart: tensors and tied names by logical name, the rest as JSON.

    Attributes:
        tensors: plain ones, DTensors or pieces; of what was read, those that are spread are placed as this run's own are.
        aliases: tied names, and the name that holds their values.
        state: the rest.
        owned: names of tensors that nothing else refers to, so that objects may keep them.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


def collect(parts: StatefulObjects) -> CollectedState:
    """Take the state apart; tensors are not copied.

    Raises:
        CheckpointError: something in a state_dict can only be pickled, or could not be loaded.
    """
    out = CollectedState()
    extras = []
    for index, model in enumerate(parts.models):
        named = [(logical(f"model/{index}/{name}"), value) for name, value in parts.export(model)]
        for name, value in named:
            is_tensor = isinstance(value, torch.Tensor) or is_spread(value)
            problem = refusal(held(value)) if is_tensor else None
            if not is_tensor and not is_extra(name):
                problem = f"a {type(value).__qualname__} in the model's state dict, which holds tensors: save it in get_extra_state()"
            if problem is not None:
                raise CheckpointError(f"{name} is {problem}")
        kept, tied = untied((name, _plain(value)) for name, value in named if is_weight(name, value))
        out.tensors.update(kept)
        out.aliases.update(tied)
        rest = [(name.split("/", 2)[2], _plain(value)) for name, value in named if not is_weight(name, value)]
        extras.append({name: encode(value, f"extra/{index}/{name}", out.tensors) for name, value in rest})
    names = parameter_names(parts.models)
    out.state["extra"] = extras
    out.state["optimizer"] = []
    for index, optimizer in enumerate(parts.optimizers):
        with parts.exposed(optimizer):
            out.state["optimizer"].append(collect_optimizer(optimizer, names, index, out.tensors))
    for kind, objects in parts.others.items():
        out.state[kind] = [
            encode(obj.state_dict(), f"{kind}/{index}", out.tensors) for index, obj in enumerate(objects)
        ]
    return out


def in_pieces(collected: CollectedState) -> CollectedState:
    """The state with what is spread over ranks as this rank's pieces, cut alike on every rank.

    Raises:
        CheckpointError: values that were not reduced yet.
    """
    cutter, made = ShardCutter(), dict[str, Any]()
    for name, value in collected.tensors.items():
        try:
            made[name] = cutter.piece(value) if is_dtensor(value) else value
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return replace(collected, tensors=made)


def is_weight(name: str, value: Any) -> bool:
    """Is it a dense tensor of a model, which lies in a file as it is? Others are kept as what they are made of."""
    if isinstance(value, ShardPiece):
        return not is_extra(name)
    return isinstance(value, torch.Tensor) and is_dense(value) and not is_extra(name)


def is_extra(name: str) -> bool:
    """Is it what a module's `get_extra_state` returned?"""
    return name.rpartition(".")[2].rpartition("/")[2] == EXTRA


def _plain(value: Any) -> Any:
    """A model's own tensor, of whatever class, as a plain one: a load puts the values into the object that is there."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    if is_dtensor(plain):
        return plain
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """The logical name of each parameter, by its id."""
    return {
        id(parameter): logical(f"{index}/{name}")
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def row_of(value: torch.Tensor, rank: int, count: int) -> ShardPiece:
    """This rank's row of the tensor that `count` ranks make up."""
    sizes = ((1,) * count, *((size,) for size in value.shape))
    row = TensorBox((rank, *(0 for _ in value.shape)), value.detach()[None], True)
    return ShardPiece((count, *value.shape), value.dtype, (row,), None, TensorSplit(sizes, tuple(range(count))))


def place_of(shape: tuple[int, ...], rank: int) -> ShardPiece:
    """Where a rank's row lies in a tensor of rows."""
    row = TensorBox((rank, *(0 for _ in shape[1:])), torch.empty((1, *shape[1:]), device="meta"), False)
    return ShardPiece(shape, torch.float32, (row,))


# -------------------------------------------------------------------- optimizers


def is_quantised(tensor: Any) -> bool:
    """Is it one of torchao's, which looks like its values and holds codes?"""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("torchao.optim.")


def values_of(state: Any) -> Any:
    """A parameter's state, with quantised tensors as the float32 values that they stand for, cut as they were."""
    if isinstance(state, dict):
        return {name: values_of(value) for name, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    local: Any = state._local_tensor if is_dtensor(state) else state
    if not is_quantised(local):
        return state
    values = local.dequantize(torch.float32)
    if not is_dtensor(state):
        return values
    given = {"run_check": False, "shape": state.shape, "stride": state.stride()}
    return dtensor.DTensor.from_local(values, state.device_mesh, state.placements, **given)


def quantise(optimizer: torch.optim.Optimizer) -> None:
    """Put loaded values into few bits again, where this optimizer keeps them so."""
    make: Any = getattr(optimizer, "_new_buffer", None)
    if make is None or not any(kind.__module__.startswith("torchao.optim.") for kind in type(optimizer).__mro__):
        return
    for parameter, state in optimizer.state.items():
        for name, is_signed in _SIGNED.items():
            if name in state:
                buffer = make(parameter, is_signed)
                local = buffer._local_tensor if is_dtensor(buffer) else buffer
                if is_quantised(local):
                    local.copy_(held(state[name]))
                    state[name] = buffer


def parameter_keys(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The name of each parameter of each group; one that is in no model is named by its place."""
    return [
        [names.get(id(p), f"group{g}/{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def collect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Its state as JSON; tensors are put into `tensors`.

    Raises:
        CheckpointError: something in it can only be pickled, or belongs to a tensor that it does not hold.
    """
    check_owners(optimizer, index)
    saved = optimizer.state_dict()
    keys = parameter_keys(optimizer, names)
    by_number = {
        number: key
        for group, group_keys in zip(saved["param_groups"], keys)
        for number, key in zip(group["params"], group_keys)
    }
    prefix = f"optimizer/{index}"
    groups = [
        _encoded({name: value for name, value in group.items() if name != "params"}, f"{prefix}/groups/{g}", tensors)
        for g, group in enumerate(saved["param_groups"])
    ]
    values = {
        by_number[number]: _encoded(values_of(entry), f"{prefix}/{by_number[number]}", tensors)
        for number, entry in saved["state"].items()
        if number in by_number
    }
    loose = {key: value for key, value in saved["state"].items() if key not in by_number}
    rest = {name: value for name, value in saved.items() if name not in ("param_groups", "state")}
    return {
        "type": type(optimizer).__qualname__,
        "params": keys,
        "groups": groups,
        "values": values,
        "rest": _encoded(rest, prefix, tensors),
        **({"loose": _encoded(loose, f"{prefix}/loose", tensors)} if loose else {}),
    }


def _encoded(values: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    """As `encode`, but the names of tensors go on with a slash."""
    if type(values) is dict and is_object(values):
        return {key: encode(value, f"{prefix}/{key}", tensors) for key, value in values.items()}
    return encode(values, prefix, tensors)


def check_owners(optimizer: torch.optim.Optimizer, index: int) -> None:
    """Does each state belong to a parameter of a group, or to a name of the optimizer's own?

    Raises:
        CheckpointError: torch itself could not say whose it is.
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict):
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in held}
    for key in state:
        if isinstance(key, torch.Tensor) and id(key) not in known:
            raise CheckpointError(
                f"optimizer {index} keeps state of a tensor of shape {tuple(key.shape)} that is in none of its parameter groups: "
                "add it to a group again, or delete optimizer.state[it]"
            )
        if isinstance(key, int) and 0 <= key < len(held):
            raise CheckpointError(
                f"optimizer {index} keeps state under {key!r}, which torch takes for its parameter {int(key)}: use another key"
            )


def optimizer_misfits(optimizer: torch.optim.Optimizer, names: Mapping[int, str], entry: Any, index: int) -> list[str]:
    """Everything about a saved state, which has the parts of one, that does not fit this optimizer."""
    problems = []
    if entry["type"] != type(optimizer).__qualname__:
        problems.append(f"optimizer {index} is {type(optimizer).__qualname__}; the saved one was {entry['type']}")
    keys = parameter_keys(optimizer, names)
    saved, own = [set(each) for each in entry["params"]], [set(each) for each in keys]
    if saved != own:
        lacking = sorted(set().union(*own) - set().union(*saved))[:3]
        extra = sorted(set().union(*saved) - set().union(*own))[:3]
        problems.append(
            f"optimizer {index} has other parameters or groups than the saved one: {len(own)} groups against {len(saved)}"
            + (f"; not saved: {', '.join(lacking)}" if lacking else "")
            + (f"; only saved: {', '.join(extra)}" if extra else "")
        )
    return problems


def decode_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    entry: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """The state dict that this optimizer would have given, in its own order of parameters.

    Raises:
        CheckpointError: this is nothing that was saved.
    """
    own = _numbered(optimizer)
    numbers = {key: n for keys, group in zip(parameter_keys(optimizer, names), own) for key, n in zip(keys, group)}
    groups, rest = decode(entry["groups"], tensors), decode(entry["rest"], tensors)
    loose = decode(entry.get("loose", {}), tensors)
    if not all(isinstance(each, dict) for each in (*groups, rest, loose)):
        raise CheckpointError("the saved state of an optimizer has something else where a dict belongs")
    values = {numbers[key]: decode(value, tensors) for key, value in entry["values"].items()}
    return {
        "state": {**values, **loose},
        "param_groups": [{**group, "params": mine} for group, mine in zip(groups, own)],
        **rest,
    }


def _numbered(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The numbers of the parameters of each group in a state dict: one that occurs again keeps its first."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(id(p), len(numbers)) for p in group["params"]] for group in optimizer.param_groups]


class _OpaqueValue:
    """A value that torch hands through as it is, where it would cast it to text or fail to make it again."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _held(value: Any) -> Any:
    if type(value) is dict:
        return {key: _held(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_held(item) for item in value])
    return _OpaqueValue(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else value


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Let it take a state up, exactly: torch casts floating state to its parameter's dtype, also within containers."""
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    own = {number: state["state"][number] for number in numbers if number in state["state"]}
    optimizer.load_state_dict({**state, "state": {**state["state"], **{n: _held(value) for n, value in own.items()}}})
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, number in zip(flat, numbers):
        if number in own and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(own[number], optimizer.state[parameter], parameter.device)
    quantise(optimizer)


def _exact(wanted: Any, loaded: Any, device: torch.device) -> Any:
    """What was loaded, where that is; tensors in the dtype that they were saved in."""
    if isinstance(loaded, _OpaqueValue):
        return _moved(loaded.value, device)
    if isinstance(wanted, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == wanted.dtype else wanted.to(loaded.device)
    if isinstance(wanted, dict) and isinstance(loaded, dict):
        for key in wanted.keys() & loaded.keys():
            loaded[key] = _exact(wanted[key], loaded[key], device)
    if type(wanted) is type(loaded) and isinstance(wanted, list | tuple) and len(wanted) == len(loaded):
        return type(wanted)([_exact(value, item, device) for value, item in zip(wanted, loaded)])
    return loaded


def _moved(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on the device."""
    return value.to(device) if isinstance(value, torch.Tensor) else map_items(lambda item: _moved(item, device), value)


def undo_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that puts the optimizer back as it is now, tensors and all, whatever a load made of it."""
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    state = getattr(optimizer, "state", {})
    entries = [(key, value, dict(value) if isinstance(value, dict) else value) for key, value in state.items()]

    def back() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups[:] = [group for group, _ in groups]
        for group, before in groups:
            group.clear()
            group.update(before)
        state.clear()
        for key, value, before in entries:
            if isinstance(value, dict):
                value.clear()
                value.update(before)
            state[key] = value

    return back
