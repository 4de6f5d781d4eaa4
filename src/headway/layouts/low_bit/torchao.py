"""Conversion of the states of torchao's 8-bit and 4-bit optimizers (`AdamW8bit`, `AdamW4bit`, `AdamWFp8` ...)."""

from typing import Any

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor, replace_local
from headway.layouts.low_bit.blocks import restore_extremes

_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""Whether the values of each quantized state are signed, by the name of the state."""
_MIN_SIZE = 4096
"""Number of values below which torchao does not quantize the state of a tensor."""


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is one of torchao's quantized optimizer states, which stores codes instead of values."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("torchao.optim.")


def keeps_low_bit_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is a torchao optimizer that keeps its states in 8 or 4 bits."""
    is_torchao = any(
        (kind.__module__, kind.__name__) == ("torchao.optim.adam", "_AdamBase") for kind in type(optimizer).__mro__
    )
    # torchao's optimizers without quantization have the same base class, and an infinite block size.
    return is_torchao and getattr(optimizer, "block_size", float("inf")) != float("inf")


def export_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its moments as float32 values on the CPU. The sharding does not change.

    The moments of small tensors are not quantized. They are converted to float32, too, because ranks with shards of
    different sizes must agree on the dtype.

    Args:
        entry: State of one parameter.
    """
    return {name: _dequantize(value) if name in _SIGNED else value for name, value in entry.items()}


def _dequantize(tensor: Any) -> Any:
    """Return a moment as float32 values on the CPU, sharded as before. Other values than tensors are returned unchanged."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local: Any = get_local_shard(tensor).detach()
    if is_quantized(local):
        values = local.dequantize(torch.float32).contiguous()
        if hasattr(local, "qmap"):
            restore_extremes(values, local.scale, local.qmap[0], local.block_size)
    else:
        values = local.to(torch.float32)
    values = values.cpu()  # values of all parameters could exceed the device's memory
    return replace_local(tensor, values, tensor.stride()) if is_dtensor(tensor) else values


def describe_export(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state as `export_entry` would, with meta tensors in place of this rank's moments."""
    return {
        name: torch.empty(get_local_shard(value).shape, device="meta")
        if name in _SIGNED and isinstance(value, torch.Tensor)
        else value
        for name, value in entry.items()
    }


def import_entry(optimizer: Any, parameter: torch.Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its moments quantized by the optimizer's own rules.

    Args:
        optimizer: Optimizer of torchao.
        parameter: Parameter, which may be a DTensor. The state is sharded like the parameter.
        entry: State as `export_entry` returns it. Moments that are already quantized do not change.
    """
    shard = get_local_shard(parameter).detach()
    state = dict(entry)
    for name in _SIGNED.keys() & entry.keys():
        values = get_local_shard(entry[name])
        if not is_quantized(values):
            buffer = optimizer._new_buffer(shard, _SIGNED[name])
            buffer.copy_(values.to(buffer.device))
            state[name] = replace_local(parameter, buffer, parameter.stride()) if is_dtensor(parameter) else buffer
    return state


def is_cut_between_blocks(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether torchao would quantize the state of the full parameter but not that of this rank's shard.

    This happens if the size of the shard is not a multiple of torchao's block size. Shards that are too small to be
    quantized at all do not count.

    Args:
        optimizer: Optimizer of torchao.
        parameter: DTensor.
    """
    block_size = optimizer.block_size
    shard_size = get_local_shard(parameter).numel()
    return parameter.numel() % block_size == 0 and shard_size >= _MIN_SIZE and shard_size % block_size != 0
