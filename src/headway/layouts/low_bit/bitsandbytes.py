"""Support for bitsandbytes optimizers, including 8-bit and paged ones: state conversion and overridden options."""

from typing import Any

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor, replace_local
from headway.errors import CheckpointError
from headway.layouts.low_bit.blocks import dequantize_blocks, quantize_blocks

BLOCK_SIZE = 256
"""Number of values in a quantization block. It is fixed in bitsandbytes' kernels."""
_NESTED = "__bnb_optimizer_quant_state__"
"""Key under which an optimizer's `state_dict` nests quantization codes, scales and code tables."""
_MOMENTS = ("state1", "state2")
"""Names of the state tensors that contain an optimizer's moments."""


def keeps_low_bit_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes' optimizers, whose states have 8 or 32 bits and can be paged."""
    return any(
        (kind.__module__, kind.__name__) == ("bitsandbytes.optim.optimizer", "Optimizer8bit")
        for kind in type(optimizer).__mro__
    )


def needs_whole_norms(optimizer: Any) -> bool:
    """Whether a bitsandbytes optimizer uses the norms of whole parameters, so that it cannot update shards.

    LAMB, LARS, and any optimizer with a limit on the norm of its updates (`max_unorm`) use these norms.
    """
    return keeps_low_bit_state(optimizer) and (
        optimizer.args.max_unorm > 0.0 or optimizer.optimizer_name in ("lamb", "lars")
    )


def export_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its moments as float32 values on the CPU. The sharding does not change.

    A tensor of two moments (`state1` of AdEMAMix) becomes two tensors with the parameter's shape, `state1_0` and
    `state1_1`.

    Args:
        entry: State of one parameter, from the optimizer or from its state dict.
    """
    flat = {name: value for name, value in entry.items() if name != _NESTED} | entry.get(_NESTED, {})
    states = {name: value for name, value in flat.items() if name in _MOMENTS and isinstance(value, torch.Tensor)}
    made = {
        name: value for name, value in flat.items() if name not in states and not name.startswith(("qmap", "absmax"))
    }
    like = next((value for value in states.values() if is_dtensor(value)), None)
    num_dims = min((value.ndim for value in states.values()), default=0)
    for name, state in states.items():
        local = get_local_shard(state).detach()
        scales, table = (flat.get(f"{part}{name[-1]}") for part in ("absmax", "qmap"))
        is_double = local.ndim > num_dims
        for number, each in enumerate(local if is_double else [local]):
            if scales is not None and table is not None:
                # Scales and table are DTensors if the parameter's shard has their size, such as 256 values.
                own, levels = get_local_shard(scales), get_local_shard(table)
                own = own[number] if is_double else own
                values = dequantize_blocks(each.to(own.device), own, levels, BLOCK_SIZE)
            else:
                values = each
            values = values.cpu()  # values of all parameters could exceed the device's memory
            part = f"{name}_{number}" if is_double else name
            made[part] = values if like is None else replace_local(like, values, like.stride())
    return made


def import_entry(
    optimizer: Any, parameter: torch.Tensor, entry: dict[str, Any], place: tuple[int, int]
) -> dict[str, Any]:
    """Convert a parameter's portable state to the optimizer's own: 8-bit codes, scales and tables, or 32-bit values.

    Args:
        optimizer: Optimizer of bitsandbytes.
        parameter: Parameter, which may be a DTensor. The state is sharded like the parameter.
        entry: State as `export_entry` returns it. A state that has quantization tables (`qmap...`) is already in the
            optimizer's form. It is returned unchanged, except that nested values of a state dict are moved to the top
            level and to the parameter's device.
        place: Index of the parameter's group, and index of the parameter in this group.

    Raises:
        CheckpointError: If the state contains quantization codes of the whole parameter, but the parameter is sharded.
    """
    own = get_local_shard(parameter).detach()
    if _NESTED in entry:  # codes and scales, as earlier versions of Headway saved them
        if is_dtensor(parameter):
            raise CheckpointError(
                f"the saved state of {type(optimizer).__name__} has the codes of whole parameters, and this layout has shards. "
                "Load it with strategy='ddp', and save it again: then any layout can load it"
            )
        flat = {name: value for name, value in entry.items() if name != _NESTED} | entry[_NESTED]
        return {
            name: value.to(own.device) if isinstance(value, torch.Tensor) else value for name, value in flat.items()
        }
    if any(name.startswith("qmap") for name in entry):
        return entry
    optimizer.init_state(optimizer.param_groups[place[0]], own, *place)
    made: dict[str, Any] = optimizer.state.pop(own)
    for name, value in entry.items():
        if not name.startswith("state"):
            made[name] = value.to(own.device) if isinstance(value, torch.Tensor) else value
            continue
        moment, _, number = name.partition("_")
        target = made[moment][int(number)] if number else made[moment]
        values = get_local_shard(value).detach()
        if target.dtype == torch.uint8:
            table, scales = made[f"qmap{moment[-1]}"], made[f"absmax{moment[-1]}"]
            codes, found = quantize_blocks(values.to(scales.device, torch.float32), table, BLOCK_SIZE)
            target.copy_(codes)
            (scales[int(number)] if number else scales).copy_(found)
        else:
            target.copy_(values)
    if is_dtensor(parameter):
        stride = parameter.stride()
        shape = own.shape
        made = {
            name: replace_local(parameter, value, stride) if name in _MOMENTS and value.shape == shape else value
            for name, value in made.items()
        }
    return made


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
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in manager.pid2config:
                manager.index2config[(number, place)] = manager.pid2config[id(parameter)]


def complete_empty_state(optimizer: Any, parameter: torch.Tensor, place: tuple[int, int]) -> None:
    """Increase the step count of an empty shard, for which bitsandbytes launches no kernel.

    Args:
        optimizer: Optimizer of bitsandbytes.
        parameter: Plain tensor without elements, which is a key of the optimizer's state.
        place: Index of the parameter's group, and index of the parameter in this group.
    """
    if parameter not in optimizer.state:
        optimizer.init_state(optimizer.param_groups[place[0]], parameter, *place)
    optimizer.state[parameter]["step"] += 1
