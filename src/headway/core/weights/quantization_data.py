"""Quantization data of bitsandbytes' 4-bit layers (scales and code tables) in a model's state dict.

Such a layer stores packed values in its weight, and the data to unpack them in a `QuantState`, which both the weight and
the layer refer to. The layer exports this data only through the weight. A layout that replaces the weight, by a shard or
by a meta tensor, would lose it, and checkpoints of different layouts would not have the same tensors.

One of the exported tensors holds JSON: the settings, and the mean of the scales (`nested_offset`), whose last digits can
depend on the device. So this tensor can have another length in another run, and no copy of it reaches the layer.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from headway.core.weights.compiled import get_bare_submodule

SETTINGS_PREFIX = ".weight.quant_state.bitsandbytes__"
"""What follows a layer's name in the name of the tensor with its settings. The type of quantization, such as nf4, follows."""
_OFFSET = "nested_offset"
"""Key of the mean of the scales in the settings of a layer whose scales are quantized too (`bnb_4bit_use_double_quant`)."""


def add_quantization_data(model: torch.nn.Module, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the pairs (name, value) of a state dict, with the quantization data of every 4-bit layer after its weight.

    The data has the names that bitsandbytes gives it, such as `q_proj.weight.absmax`. It is the same on all ranks.

    Args:
        model: Model whose state dict the pairs are from.
        tensors: Pairs of the state dict. They may have the data of some layers already.
    """
    data_by_weight = _collect_data(model)
    data_names = list_data_names(model)
    for name, value in tensors:
        if name in data_names:
            continue  # it follows its weight, so that the order is the same on all ranks
        yield name, value
        for key, tensor in data_by_weight.get(name, {}).items():
            yield f"{name}.{key}", tensor


def list_data_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the quantization data of all 4-bit layers, such as `q_proj.weight.absmax`."""
    return {f"{weight}.{key}" for weight, data in _collect_data(model).items() for key in data}


def _collect_data(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return the quantization data of each 4-bit layer, by the name of its weight."""
    data = ((name, get_quantization_data(module)) for name, module in model.named_modules())
    return {f"{name}.weight": tensors for name, tensors in data if tensors is not None}


def get_quantization_data(layer: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the quantization data of a 4-bit layer of bitsandbytes, or None for any other layer.

    The keys are those of `QuantState.as_dict(packed=True)`, such as "absmax".

    The call can replace `layer.quant_state`. After `copy.deepcopy`, the layer and its weight have separate copies of one
    `QuantState`. The layer computes with the copy of the weight, so the layer gets that one.
    """
    state: Any = getattr(layer, "quant_state", None)
    if not hasattr(state, "as_dict"):
        return None
    state_of_weight = getattr(layer.weight, "quant_state", None)
    if state_of_weight is not None and state_of_weight is not state:
        layer.quant_state = state = state_of_weight
    data: dict[str, torch.Tensor] = state.as_dict(packed=True)
    return data


def has_settings(name: str) -> bool:
    """Whether a tensor's name is that of the settings of a 4-bit layer, which the tensor holds as JSON in bytes."""
    return SETTINGS_PREFIX in name


def find_settings_misfit(own: torch.Tensor, saved: torch.Tensor) -> str | None:
    """Return the reason why a layer cannot use the saved quantization data, or None if it can.

    Args:
        own: Settings that the layer exports: a uint8 tensor that holds JSON.
        saved: Settings from the checkpoint, in the same format.
    """
    own_settings, saved_settings = _decode_settings(own), _decode_settings(saved)
    names = sorted(own_settings.keys() | saved_settings.keys())
    differences = [
        f"{name}={own_settings.get(name)!r}, the checkpoint's {saved_settings.get(name)!r}"
        for name in names
        if name != _OFFSET and own_settings.get(name) != saved_settings.get(name)
    ]
    return f"was quantized with {'; '.join(differences)}" if differences else None


def restore_offset(model: torch.nn.Module, name: str, saved: torch.Tensor) -> None:
    """Restore the mean of a 4-bit bitsandbytes layer's scales (`quant_state.offset`) in place.

    Do nothing if the saved settings have no mean, because the scales are not quantized.

    Args:
        model: Model that contains the layer.
        name: Name of the tensor with the layer's settings in the state dict.
        saved: Settings from the checkpoint: a uint8 tensor that holds JSON.
    """
    set_offset(get_bare_submodule(model, name.partition(SETTINGS_PREFIX)[0]), saved)


def set_offset(layer: Any, saved: torch.Tensor) -> None:
    """Set the mean of a 4-bit layer's scales in place, if the scales are quantized.

    Args:
        layer: Layer of bitsandbytes.
        saved: Settings from the checkpoint: a uint8 tensor that holds JSON.
    """
    offset = _decode_settings(saved).get(_OFFSET)
    if offset is not None:
        layer.quant_state.offset.fill_(offset)


def _decode_settings(settings: torch.Tensor) -> dict[str, Any]:
    """Return the settings that a tensor of type uint8 holds as JSON."""
    return json.loads(bytes(settings.tolist()))  # type: ignore[no-any-return]
