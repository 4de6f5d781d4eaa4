"""An optimizer's state by the names of its parameters, and back: in its own dtypes and types, whatever torch casts.

Optimizer states in few bits (torchao's AdamW8bit, AdamW4bit, AdamWFp8): saved as float32 values, quantised again when loaded.

Their blocks run over a rank's part as if it had no rows, so codes and scales fit no other layout; the values they stand for fit all.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from headway.checkpoint.format.values import decode, encode, is_object, map_items
from headway.common.optional import Later
from headway.errors import CheckpointError
from headway.weights.pieces import held, is_dtensor

dtensor = Later("torch.distributed.tensor")

_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are kept in few bits, and whether their values have signs."""


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
