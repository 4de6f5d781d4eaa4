"""Convert the state of an optimizer to named tensors and JSON, and back, keyed by the names of the parameters.

An optimizer's tensor is named `optimizer/0/`, then the parameter's name and the key of the state. Therefore a run with
another order of parameter groups finds the same tensors.

An optimizer receives its state in the saved dtypes and types, although torch would cast them. Low-bit optimizer
states (of torchao and bitsandbytes) are saved as float32 values and quantized again when loaded. A quantization block
can span several rows of a rank's local tensor, so quantized values fit only the layout in which they were computed.
Dequantized values fit all layouts.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch

from headway.core import extensions
from headway.core.checkpoint.format.values import decode_value, encode_value, is_object, map_items
from headway.core.runtime.collectives.tree import map_tensors
from headway.core.strategies.fully_sharded.dtensors import wrap_replica
from headway.core.training.prepared.low_bit import find_low_bit_extension, load_low_bit_extension
from headway.core.weights.pieces import is_dtensor, is_sharded
from headway.errors import CheckpointError

# -------------------------------------------------------------------- save


def collect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return an optimizer's state as JSON, and add its tensors to `tensors`.

    The state of each parameter is stored under the parameter's name. A state dict that does not have torch's format is
    stored as one value. Low-bit states are converted to float32.

    Args:
        optimizer: Optimizer whose state is collected.
        names: Names by parameter `id`, as `map_parameter_names` returns them.
        index: Index of the optimizer.
        tensors: Dict to which the state's tensors are added, by logical name.

    Raises:
        CheckpointError: If the state holds something that only pickle could store, or state of a tensor that is in no
            parameter group.
    """
    check_state_keys(optimizer, index)
    saved = optimizer.state_dict()
    keys = list_parameter_keys(optimizer, names)
    if not has_torch_format(optimizer, saved):
        return _collect_as_one_value(optimizer, saved, keys, index, tensors)
    key_by_number = {
        number: key
        for group, group_keys in zip(saved["param_groups"], keys)
        for number, key in zip(group["params"], group_keys)
    }
    prefix = f"optimizer/{index}"
    groups = [
        _encode_by_key(
            {name: value for name, value in group.items() if name != "params"}, f"{prefix}/groups/{g}", tensors
        )
        for g, group in enumerate(saved["param_groups"])
    ]
    export = get_state_exporter(optimizer)
    values = {
        key_by_number[number]: _encode_by_key(export(entry), f"{prefix}/{key_by_number[number]}", tensors)
        for number, entry in saved["state"].items()
        if number in key_by_number
    }
    # Some optimizers keep state that belongs to no parameter under keys of their own.
    loose = {key: value for key, value in saved["state"].items() if key not in key_by_number}
    rest = {name: value for name, value in saved.items() if name not in ("param_groups", "state")}
    return {
        "type": type(optimizer).__qualname__,
        "params": keys,
        "groups": groups,
        "values": values,
        "rest": _encode_by_key(rest, prefix, tensors),
        **({"loose": _encode_by_key(loose, f"{prefix}/loose", tensors)} if loose else {}),
    }


def _collect_as_one_value(
    optimizer: torch.optim.Optimizer, saved: Any, keys: list[list[str]], index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the state of an optimizer whose state dict does not have torch's format, as JSON.

    The state dict is stored as one value, like that of a registered object.

    Args:
        optimizer: Optimizer whose state is collected.
        saved: State dict of the optimizer.
        keys: Names of the optimizer's parameters, as one list per parameter group.
        index: Index of the optimizer.
        tensors: Dict to which the state's tensors are added, by logical name.

    Raises:
        CheckpointError: If the state holds sharded tensors. Without a parameter name they cannot be loaded in another
            layout.
    """
    own_tensors: dict[str, torch.Tensor] = {}
    whole = encode_value(saved, f"optimizer/{index}/whole", own_tensors)
    sharded = next((name for name, value in own_tensors.items() if is_sharded(value)), None)
    if sharded is not None:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has no 'state' and 'param_groups' as torch's optimizers have, and {sharded} is "
            "sharded: its place in another layout would be unknown. Return these two from state_dict(), or train without sharding"
        )
    tensors.update(own_tensors)
    return {
        "type": type(optimizer).__qualname__,
        "params": keys,
        "groups": [{} for _ in keys],
        "values": {},
        "rest": {},
        "whole": whole,
    }


def _encode_by_key(values: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encode a value like `values.encode_value`, but name the tensors in a dict by `prefix`, a slash, and their keys.

    This applies only to a dict whose keys are all strings. For another value, the name of each tensor is `prefix` plus
    its path.

    Args:
        values: Value to encode.
        prefix: Prefix of the tensors' names.
        tensors: Dict to which the value's tensors are added, by logical name.
    """
    if type(values) is dict and is_object(values):
        return {key: encode_value(value, f"{prefix}/{key}", tensors) for key, value in values.items()}
    return encode_value(values, prefix, tensors)


def get_state_exporter(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Return a function that converts the low-bit state of one parameter to float32 values.

    The function returns any other state unchanged.
    """
    low_bit = load_low_bit_extension()
    return partial(low_bit.export_state, optimizer) if low_bit is not None else lambda entry: entry


def check_state_keys(optimizer: torch.optim.Optimizer, index: int) -> None:
    """Raise `CheckpointError` if an optimizer holds state for a tensor that is in none of its parameter groups.

    Custom keys of the state that are not tensors are allowed, except integers that torch would use as parameter
    numbers.

    Args:
        optimizer: Optimizer to check.
        index: Index of the optimizer, for messages.

    Raises:
        CheckpointError: If torch could not tell to which parameter a state belongs.
    """
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameter_ids = {id(p) for p in parameters}
    for key in state:
        if isinstance(key, torch.Tensor) and id(key) not in parameter_ids:
            raise CheckpointError(
                f"optimizer {index} keeps state of a tensor of shape {tuple(key.shape)} that is in none of its parameter groups: "
                "add the tensor to a group again, or delete its entry in optimizer.state"
            )
        if isinstance(key, int) and 0 <= key < len(parameters):
            raise CheckpointError(
                f"optimizer {index} keeps state under {key!r}, which torch would load as the state of parameter "
                f"{int(key)}: use another key"
            )


def has_torch_format(optimizer: torch.optim.Optimizer, saved: Any) -> bool:
    """Whether an optimizer's state dict has torch's format: states by parameter number, and the parameter groups.

    Each group must list as many parameters as the optimizer's group. A wrapper can use another format, such as its
    inner optimizer's state dict under another key.

    Args:
        optimizer: Optimizer to which the state dict belongs.
        saved: State dict of the optimizer.
    """
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return False
    groups = saved.get("param_groups")
    if not isinstance(groups, list):
        return False
    saved_lengths = [len(group.get("params", ())) for group in groups if isinstance(group, dict)]
    return saved_lengths == [len(group["params"]) for group in optimizer.param_groups]


def list_parameter_keys(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, as one list per parameter group.

    A parameter that belongs to no model is named after the index of its group and its index within the group.

    Args:
        optimizer: Optimizer with the parameter groups.
        names: Names by parameter `id`, as `map_parameter_names` returns them.
    """
    return [
        [names.get(id(p), f"group{g}/{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


# -------------------------------------------------------------------- load


def find_optimizer_misfits(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], entry: Any, index: int
) -> list[str]:
    """Return one message for each reason why a saved optimizer state does not fit an optimizer.

    Args:
        optimizer: Optimizer that should load the state.
        names: Names by parameter `id`, as `map_parameter_names` returns them.
        entry: Saved state, whose structure has been checked.
        index: Index of the optimizer, for messages.
    """
    problems = []
    if entry["type"] != type(optimizer).__qualname__:
        problems.append(f"optimizer {index} is {type(optimizer).__qualname__}; the saved one was {entry['type']}")
    keys = list_parameter_keys(optimizer, names)
    if not has_equal_groups(keys, entry):
        problems.append(extensions.load("feature", "explain_group_misfit")(keys, entry, index))
    return problems


def has_equal_groups(keys: list[list[str]], entry: Any) -> bool:
    """Whether an optimizer's parameter groups contain the same parameters as the saved ones.

    Args:
        keys: Names of the optimizer's parameters, as one list per parameter group.
        entry: Saved state of the optimizer.
    """
    if "whole" in entry:  # the state dict of a wrapper might depend on the order of the parameters
        return bool(keys == entry["params"])
    return [set(each) for each in keys] == [set(each) for each in entry["params"]]


def decode_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    entry: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return a state dict that an optimizer can load, built from its saved state.

    Parameters are numbered in the order of this optimizer, not in that of the saved run. A state dict that was saved as
    one value, because it did not have torch's format, is returned as it was saved.

    Args:
        optimizer: Optimizer that will load the state dict.
        names: Names by parameter `id`, as `map_parameter_names` returns them.
        entry: Saved state as JSON.
        tensors: Saved tensors by logical name.

    Raises:
        CheckpointError: If `entry` is not a state that `collect_optimizer` could have written.
    """
    if "whole" in entry:
        return cast(dict[str, Any], decode_value(entry["whole"], tensors))
    own_numbers = _number_parameters(optimizer)
    numbers: dict[str, int] = {}
    for group_keys, group_numbers in zip(list_parameter_keys(optimizer, names), own_numbers):
        numbers.update(zip(group_keys, group_numbers))
    groups, rest = decode_value(entry["groups"], tensors), decode_value(entry["rest"], tensors)
    loose = decode_value(entry.get("loose", {}), tensors)
    if not all(isinstance(each, dict) for each in (*groups, rest, loose)):
        raise CheckpointError("the saved state of an optimizer has another type where a dict is expected")
    values = {numbers[key]: decode_value(value, tensors) for key, value in entry["values"].items()}
    for group in groups:  # names in the saved order; without them, the optimizer keeps its own
        group.pop("param_names", None)
    return {
        "state": {**values, **loose},
        "param_groups": [{**group, "params": params} for group, params in zip(groups, own_numbers)],
        **rest,
    }


def list_devices(optimizer: torch.optim.Optimizer) -> dict[int, torch.device]:
    """Return the device of each parameter, keyed by the parameter's number in the optimizer's state dict."""
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in _number_parameters(optimizer) for number in group]
    return {number: parameter.device for number, parameter in zip(numbers, flat)}


def _number_parameters(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Number an optimizer's parameters consecutively for a state dict. Return one list of numbers per parameter group.

    A parameter that occurs more than once keeps the number of its first occurrence.
    """
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(id(p), len(numbers)) for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict into an optimizer without casts.

    torch's `load_state_dict` would cast floating-point state to the parameter's dtype, even inside containers. A state
    dict in another format than torch's is passed to the optimizer unchanged. The values of a low-bit optimizer are
    quantized again.

    Args:
        optimizer: Optimizer that loads the state.
        state: State dict, as `decode_optimizer` returns it.
    """
    if not has_torch_format(optimizer, state):
        optimizer.load_state_dict(state)
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    low_bit = find_low_bit_extension(optimizer)
    own = {number: state["state"][number] for number in numbers if number in state["state"]}
    rest = {key: value for key, value in state["state"].items() if key not in own}
    state_for_torch = dict(rest)
    if low_bit is None:  # torch would move all values that will be quantized to the device at once
        state_for_torch |= {number: _wrap_opaque_values(value) for number, value in own.items()}
    groups = [{**group, "params": _IndexedList(group["params"])} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "state": state_for_torch, "param_groups": groups})
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, number in zip(flat, numbers):
        if number in own and low_bit is not None:
            optimizer.state[parameter] = own[number]
        elif number in own and parameter in optimizer.state:
            optimizer.state[parameter] = _restore_dtypes(own[number], optimizer.state[parameter], parameter.device)
    if isinstance(optimizer, torch.optim.LBFGS):
        _replicate_vectors(optimizer)
    if low_bit is not None:
        low_bit.quantize_states(optimizer)


def _replicate_vectors(optimizer: torch.optim.LBFGS) -> None:
    """Convert the loaded state of LBFGS to replicated DTensors if the parameters are DTensors.

    LBFGS concatenates all gradients into one vector. If they are DTensors, the result is a replicated DTensor, which
    cannot be combined with plain tensors. Checkpoints contain these vectors as plain tensors, which fit all layouts.
    """
    first, *_ = optimizer.param_groups[0]["params"]  # LBFGS keeps its state under its first parameter
    if is_dtensor(first) and first in optimizer.state:
        optimizer.state[first] = map_tensors(partial(wrap_replica, template=first), optimizer.state[first])


def _wrap_opaque_values(value: Any) -> Any:
    """Wrap each iterable that is not a plain container in `_OpaqueValue`, so that torch's `load_state_dict` copies it as is.

    torch would rebuild such an iterable from its items. Dicts, lists and tuples are copied recursively.
    """
    if type(value) is dict:
        return {key: _wrap_opaque_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_wrap_opaque_values(item) for item in value])
    return _OpaqueValue(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else value


def _restore_dtypes(wanted: Any, loaded: Any, device: torch.device) -> Any:
    """Return a loaded optimizer state on the given device, with each tensor in the dtype in which it was saved.

    Args:
        wanted: Saved state, with the original dtypes.
        loaded: State after torch's `load_state_dict`, which might have cast it.
        device: Device of the parameter.
    """
    if isinstance(loaded, _OpaqueValue):
        return _move_tensors(loaded.value, device)
    if isinstance(wanted, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == wanted.dtype else wanted.to(loaded.device)
    if isinstance(wanted, dict) and isinstance(loaded, dict):
        for key in wanted.keys() & loaded.keys():
            loaded[key] = _restore_dtypes(wanted[key], loaded[key], device)
    if type(wanted) is type(loaded) and isinstance(wanted, list | tuple) and len(wanted) == len(loaded):
        return type(wanted)([_restore_dtypes(value, item, device) for value, item in zip(wanted, loaded)])
    return loaded


def _move_tensors(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors moved to the device. Containers are copied, other values returned unchanged."""
    return (
        value.to(device)
        if isinstance(value, torch.Tensor)
        else map_items(lambda item: _move_tensors(item, device), value)
    )


class _OpaqueValue:
    """Wrapper that protects a value from conversion in torch's `load_state_dict`.

    torch would convert some values to text, or could not reconstruct them.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class _IndexedList(list[int]):
    """List of parameter numbers in which `in` takes constant time.

    torch's `load_state_dict` looks up the parameter of each state tensor in these lists. With 10,000 parameters in one
    group, the search in a plain list takes a third of the time of a load.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__(numbers)
        self._number_set = set(self)

    def __contains__(self, number: object) -> bool:
        return number in self._number_set


def make_optimizer_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Record an optimizer's attributes, parameter groups and state, and return a function that restores them.

    Tensors are recorded by reference. A later change of their values is not undone.
    """
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    state = getattr(optimizer, "state", {})
    # The dicts are restored in place, because the script or a scheduler may hold references to them.
    entries = [(key, value, dict(value) if isinstance(value, dict) else value) for key, value in state.items()]

    def undo_changes() -> None:
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

    return undo_changes
