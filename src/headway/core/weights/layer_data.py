"""Quantization data of layers, such as scales and code tables, when weights are loaded from files.

Quantized layers of bitsandbytes store this data in addition to their parameters and buffers. A 4-bit layer has, among others,
`absmax` and `quant_map`, and an 8-bit layer has `SCB`. Packed weights cannot be dequantized without it.
"""

from collections.abc import Mapping

import torch

from headway.core.weights import _torch
from headway.core.weights.files import EXTRA_STATE, StoredTensor
from headway.core.weights.locations import TensorLocation
from headway.core.weights.quantization_data import (
    SETTINGS_PREFIX,
    find_settings_misfit,
    get_quantization_data,
    has_settings,
    set_offset,
)

_FORMAT = "weight_format"
"""Data of an 8-bit layer that describes the order of its values. The layer exports a new tensor each time."""


def map_layer_data(locations: Mapping[str, TensorLocation]) -> dict[str, torch.Tensor]:
    """Return the quantization data of all quantized layers, such as the scales of their weights.

    The tensors share memory with the layers, so changes in place change the layers. The settings of 4-bit layers and the
    formats of 8-bit layers are copies.

    Args:
        locations: Locations of the model's tensors, by name.

    Returns:
        Tensors by name. A name begins like that of the layer's weight, such as "q_proj.weight.absmax" or "q_proj.SCB".
    """
    return {
        f"{name.removesuffix('weight')}{key}": tensor
        for name, location in locations.items()
        if location.leaf == "weight"
        for key, tensor in _list_data(location.module).items()
    }


def _list_data(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the data of one layer, by the names that it has in the layer's state dict."""
    quantization_data = get_quantization_data(layer)
    if quantization_data is not None:
        return {f"weight.{key}": tensor for key, tensor in quantization_data.items()}
    exported = _torch.export_by_own_method(layer)
    known_names = {*layer._parameters, *layer._buffers, EXTRA_STATE}
    return {
        key: value
        for key, value in exported.items()
        if key not in known_names and type(value) in (torch.Tensor, torch.nn.Parameter)
    }


def find_data_misfits(
    data: Mapping[str, torch.Tensor],
    locations: Mapping[str, TensorLocation],
    stored: Mapping[str, StoredTensor],
    keys: Mapping[str, str],
    unexpected: list[str],
) -> list[str]:
    """Return one message for each tensor of quantization data that the checkpoint lacks, or that does not fit.

    Layers whose weight is missing or has another shape are skipped, because another check reports them. Settings of another
    kind of quantization are removed from `unexpected`, because a message here reports them.

    Args:
        data: The model's data, by name.
        locations: Locations of the model's tensors, by name.
        stored: Tensors of the checkpoint, by their names in it.
        keys: Names in the checkpoint, by names of weights and data in the model.
        unexpected: Names of stored tensors that match nothing in the model.
    """
    problems = []
    for name, own in data.items():
        weight = get_weight_name(name)
        if weight not in keys or stored[keys[weight]].shape != tuple(locations[weight].tensor.shape):
            continue
        key = keys.get(name) or _find_other_settings(name, keys[weight], unexpected)
        if key is None:
            problems.append(f"{name} is missing from the checkpoint, which has packed values in {keys[weight]}")
            continue
        if key in unexpected:
            unexpected.remove(key)
        problem = _find_misfit(name, own, stored[key])
        if problem is not None:
            problems.append(f"{name} {problem}")
    return problems


def get_weight_name(name: str) -> str:
    """Return the name of the weight to which the data with this name belongs."""
    layer, has_weight, _ = name.rpartition(".weight.")
    prefix = layer if has_weight else name.rpartition(".")[0]
    return f"{prefix}.weight" if prefix else "weight"


def _find_other_settings(name: str, weight_key: str, unexpected: list[str]) -> str | None:
    """Return the stored name of settings of another type of quantization, such as fp4 instead of nf4.

    Return None if there are none, or if the data with this name is not the settings of a 4-bit layer.

    Args:
        name: Name of the data in the model.
        weight_key: Name of the layer's weight in the checkpoint.
        unexpected: Names of stored tensors that match nothing in the model.
    """
    prefix = weight_key.removesuffix(".weight") + SETTINGS_PREFIX
    return next((key for key in unexpected if key.startswith(prefix)), None) if has_settings(name) else None


def _find_misfit(name: str, own: torch.Tensor, stored: StoredTensor) -> str | None:
    """Return the reason why stored data does not fit a layer's own data, or None if it does."""
    if has_settings(name):
        return find_settings_misfit(own, read_tensor(stored))
    if stored.shape != tuple(own.shape) or stored.dtype != own.dtype:
        return (
            f"has the shape {list(own.shape)} and {own.dtype}, the checkpoint's {list(stored.shape)} and {stored.dtype}"
        )
    if name.endswith(_FORMAT) and read_tensor(stored).item() != own.item():
        return f"is {own.item()}, the checkpoint's {read_tensor(stored).item()}"
    return None


def load_layer_data(
    locations: Mapping[str, TensorLocation], keys: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> int:
    """Load the data of quantized layers in place, and return the number of bytes that were read.

    Layers whose weights are on another pipeline stage are skipped.

    Args:
        locations: Locations of the model's tensors, by name.
        keys: Name of each data tensor in the checkpoint, by its name in the model.
        stored: Tensors of the checkpoint, by their names in it.
    """
    num_bytes = 0
    data = map_layer_data(locations)
    for name, key in keys.items():
        if name not in data:
            continue
        value = read_tensor(stored[key])
        num_bytes += value.nbytes
        if has_settings(name):
            set_offset(locations[get_weight_name(name)].module, value)
        else:
            with torch.no_grad():
                data[name].copy_(value)
    return num_bytes


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Read a whole tensor of a checkpoint into host memory."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.fill(tensor, (0,) * tensor.ndim)
    return tensor
