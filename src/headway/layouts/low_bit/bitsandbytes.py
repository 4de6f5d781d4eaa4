"""Support for bitsandbytes optimizers, including 8-bit and paged ones: state conversion and overridden options."""

from typing import Any, NamedTuple

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor, replace_local
from headway.errors import CheckpointError
from headway.layouts.low_bit.blocks import dequantize_blocks, quantize_blocks

BLOCK_SIZE = 256
"""Number of values in a quantization block. It is fixed in bitsandbytes' kernels."""
_NESTED_KEY = "__bnb_optimizer_quant_state__"
"""Key under which an optimizer's `state_dict` nests quantization codes, scales and code tables."""
_MOMENTS = ("state1", "state2")
"""Names of the state tensors that contain an optimizer's moments."""


class GroupPosition(NamedTuple):
    """Position of a parameter in an optimizer.

    Attributes:
        group_index: Index of the parameter's group.
        parameter_index: Index of the parameter in this group.
    """

    group_index: int
    parameter_index: int


def keeps_low_bit_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes' optimizers, whose states have 8 or 32 bits and can be paged."""
    return any(
        (kind.__module__, kind.__name__) == ("bitsandbytes.optim.optimizer", "Optimizer8bit")
        for kind in type(optimizer).__mro__
    )


def needs_whole_norms(optimizer: Any) -> bool:
    """Whether a bitsandbytes optimizer uses the norms of full parameters, so that it cannot update shards.

    LAMB, LARS, and any optimizer with a limit on the norm of its updates (`max_unorm`) use these norms.
    """
    return keeps_low_bit_state(optimizer) and (
        optimizer.args.max_unorm > 0.0 or optimizer.optimizer_name in ("lamb", "lars")
    )


def export_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its moments as float32 values on the CPU. The sharding does not change.

    A tensor of two moments (`state1` of AdEMAMix) becomes two tensors with the parameter's shape, `state1_0` and
    `state1_1`. Scales and code tables (`absmax...`, `qmap...`) are left out.

    Args:
        entry: State of one parameter, from the optimizer or from its state dict.
    """
    state = _flatten_entry(entry)
    moments = {name: value for name, value in state.items() if name in _MOMENTS and isinstance(value, torch.Tensor)}
    exported = {
        name: value for name, value in state.items() if name not in moments and not name.startswith(("qmap", "absmax"))
    }
    dtensor = next((value for value in moments.values() if is_dtensor(value)), None)
    # AdEMAMix stacks two moments in `state1`, which then has one dimension more than `state2` and the parameter.
    num_dims = min((value.ndim for value in moments.values()), default=0)
    for name, moment in moments.items():
        local = get_local_shard(moment).detach()
        scales, table = state.get(f"absmax{name[-1]}"), state.get(f"qmap{name[-1]}")
        is_stacked = local.ndim > num_dims
        for index, codes in enumerate(local if is_stacked else [local]):
            values = codes  # a moment with 32 bits has no scales and no table
            if scales is not None and table is not None:
                # Scales and table are DTensors if the parameter's shard has their size, such as 256 values.
                local_scales = get_local_shard(scales)
                block_scales = local_scales[index] if is_stacked else local_scales
                codes_on_device = codes.to(block_scales.device)
                values = dequantize_blocks(codes_on_device, block_scales, get_local_shard(table), BLOCK_SIZE)
            values = values.cpu()  # values of all parameters could exceed the device's memory
            exported_name = f"{name}_{index}" if is_stacked else name
            exported[exported_name] = values if dtensor is None else replace_local(dtensor, values, dtensor.stride())
    return exported


def describe_export(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state as `export_entry` would, with meta tensors in place of this rank's moments."""
    described = {}
    state = _flatten_entry(entry)
    num_dims = min((state[name].ndim for name in _MOMENTS if isinstance(state.get(name), torch.Tensor)), default=0)
    for name, value in state.items():
        if name in _MOMENTS and isinstance(value, torch.Tensor):
            shape = get_local_shard(value).shape
            is_stacked = len(shape) > num_dims
            dtype = value.dtype if value.is_floating_point() else torch.float32
            for index in range(shape[0] if is_stacked else 1):
                exported_name = f"{name}_{index}" if is_stacked else name
                described[exported_name] = torch.empty(shape[1:] if is_stacked else shape, dtype=dtype, device="meta")
        elif not name.startswith(("qmap", "absmax")):
            described[name] = value
    return described


def _flatten_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with the nested values of a state dict moved to the top level."""
    nested: dict[str, Any] = entry.get(_NESTED_KEY, {})
    return {name: value for name, value in entry.items() if name != _NESTED_KEY} | nested


def import_entry(
    optimizer: Any, parameter: torch.Tensor, entry: dict[str, Any], position: GroupPosition
) -> dict[str, Any]:
    """Convert a parameter's portable state to the optimizer's own: 8-bit codes, scales and tables, or 32-bit values.

    Args:
        optimizer: Optimizer of bitsandbytes.
        parameter: Parameter, which may be a DTensor. The state is sharded like the parameter.
        entry: State as `export_entry` returns it. A state that has quantization tables (`qmap...`) is already in the
            optimizer's form. It is returned unchanged, except that nested values of a state dict are moved to the top
            level and to the parameter's device.
        position: Position of the parameter in the optimizer.

    Raises:
        CheckpointError: If the state contains quantization codes of the full parameter, but the parameter is sharded.
    """
    shard = get_local_shard(parameter).detach()
    if _NESTED_KEY in entry:  # codes and scales, as earlier versions of Headway saved them
        if is_dtensor(parameter):
            raise CheckpointError(
                f"the saved state of {type(optimizer).__name__} has the codes of full parameters, and this layout has shards. "
                "Load it with strategy='ddp', and save it again: then any layout can load it"
            )
        return {
            name: value.to(shard.device) if isinstance(value, torch.Tensor) else value
            for name, value in _flatten_entry(entry).items()
        }
    if any(name.startswith("qmap") for name in entry):
        return entry
    optimizer.init_state(optimizer.param_groups[position.group_index], shard, *position)
    state: dict[str, Any] = optimizer.state.pop(shard)
    for name, value in entry.items():
        if not name.startswith("state"):
            state[name] = value.to(shard.device) if isinstance(value, torch.Tensor) else value
            continue
        moment, _, index = name.partition("_")  # "state1_0" is the first of two moments that `state1` stacks
        target = state[moment][int(index)] if index else state[moment]
        values = get_local_shard(value).detach()
        if target.dtype != torch.uint8:  # a moment with 32 bits
            target.copy_(values)
            continue
        table, all_scales = state[f"qmap{moment[-1]}"], state[f"absmax{moment[-1]}"]
        scales = all_scales[int(index)] if index else all_scales
        codes, new_scales = quantize_blocks(values.to(scales.device, torch.float32), table, BLOCK_SIZE)
        target.copy_(codes)
        scales.copy_(new_scales)
    if is_dtensor(parameter):
        for name in _MOMENTS:
            if name in state and state[name].shape == shard.shape:
                state[name] = replace_local(parameter, state[name], parameter.stride())
    return state


def register_overrides(optimizer: Any) -> None:
    """Register overridden options (`GlobalOptimManager`) by the positions of their parameters in the groups.

    bitsandbytes also stores options by parameter ID, but `prepare` replaces parameters with shards that have other IDs.
    Do nothing if no options are overridden.

    Args:
        optimizer: Optimizer of bitsandbytes, whose groups contain the parameters that the script has registered.
    """
    manager = optimizer.mng
    if not manager.pid2config and not manager.module_weight_config_triple:
        return
    optimizer.check_overrides()
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in manager.pid2config:
                manager.index2config[(group_index, index)] = manager.pid2config[id(parameter)]


def count_empty_step(optimizer: Any, parameter: torch.Tensor, position: GroupPosition) -> None:
    """Increase the step count of an empty shard, for which bitsandbytes launches no kernel. Create a missing state.

    Args:
        optimizer: Optimizer of bitsandbytes.
        parameter: Plain tensor without elements, which is a key of the optimizer's state.
        position: Position of the parameter in the optimizer.
    """
    if parameter not in optimizer.state:
        optimizer.init_state(optimizer.param_groups[position.group_index], parameter, *position)
    optimizer.state[parameter]["step"] += 1
