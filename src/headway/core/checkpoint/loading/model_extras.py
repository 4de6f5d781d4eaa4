"""Load the values of a model that are not dense weights: extra state, and sparse and quantized tensors.

Checkpoints hold these values encoded as JSON and tensors. They are replaced, whereas dense weights are copied in place.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from headway.core.checkpoint.format.dense import is_dense
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.loading.rollback import LoadRollback, copy_state
from headway.core.checkpoint.state import CollectedState, is_extra
from headway.core.weights.compiled import get_bare_submodule


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


def find_extra_misfits(
    model: torch.nn.Module, own: Mapping[str, Any], saved_state: CollectedState, index: int
) -> list[str]:
    """Return one message for each sparse or quantized tensor, or extra state, that the model and the checkpoint do not share.

    Extra state that the checkpoint lacks is allowed.

    Args:
        model: Model without wrappers.
        own: Values of the model's state dict by name.
        saved_state: State of the checkpoint.
        index: Index of the model in the run.
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


def _make_logical_name(name: str, prefix: str) -> str:
    """Return the logical name of an entry of a model's state dict, without the model's prefix.

    Args:
        name: Name of the entry in the model.
        prefix: Prefix of the model, such as `model/0/`.
    """
    return to_logical_name(prefix + name).removeprefix(prefix)


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Return the layout, dtype, shape and quantization scheme of a tensor as text."""
    kind = "quantized" if tensor.is_quantized else str(tensor.layout)
    scheme = f", {tensor.qscheme()}" if tensor.is_quantized else ""
    return f"{kind} of {tensor.dtype} and {tuple(tensor.shape)}{scheme}"
