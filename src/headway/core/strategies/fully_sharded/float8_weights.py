"""All-gathers of float8 weights: a sharded weight of a float8 layer is cast before it is gathered.

torchao's tensor subclass around the shard casts it, with one scale for all of its shards, and passes the gathered float8
values to the layer. The scale needs the largest absolute value over all shards. The scales of all weights are computed
in one collective. Otherwise each all-gather, in forward and in backward, would need another collective first.

The scales are computed after an update, for scripts that call a block alone. They are computed again when a forward
begins, because weights can change in between: a checkpoint is loaded, or an optimizer swaps in averaged weights. An
older scale would clip values.
"""

from collections.abc import Iterable
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.config.float8 import Float8Options
from headway.core.config.parallelism import ShardingOptions
from headway.core.strategies.blocks import find_parameter_owners
from headway.core.strategies.fully_sharded.dtensors import get_local_shard, wrap_shard
from headway.core.weights.pieces import is_dtensor
from headway.log import get_logger

torchao = LazyModule("torchao.float8")
fsdp_utils = LazyModule("torchao.float8.fsdp_utils")
log = get_logger(__name__)


def _is_partly_resharded(sharding: ShardingOptions) -> bool:
    """Whether FSDP reshards weights over fewer ranks after forward, for an all-gather among these ranks in backward."""
    reshard = sharding.reshard_after_forward
    return reshard is not None and not isinstance(reshard, bool)


def wrap_float8_weights(
    model: torch.nn.Module, options: Float8Options | None, sharding: ShardingOptions, num_shards: int
) -> int:
    """Wrap weights of float8 layers so that they are all-gathered in float8. Call this before weights are sharded.

    A weight is not wrapped if several modules use it, its scales are per row or rounded to powers of 2, or its rows
    cannot be divided evenly among the shards. No weight is wrapped if the options disable float8 all-gathers, or if
    gathered weights are partly kept after forward.

    Args:
        model: Model whose layers were converted to float8.
        options: Options of float8. None: the defaults.
        sharding: Options of sharding.
        num_shards: Number of shards of a weight.

    Returns:
        Number of weights that are gathered in float8.
    """
    is_requested = None if options is None else options.all_gather
    layers: list[Any] = [module for module in model.modules() if _is_float8(module)]
    if is_requested is False or not layers or _is_partly_resharded(sharding):
        return 0
    parameter_owners, count = find_parameter_owners(model), 0
    for layer in layers:
        weight, cast = layer.weight.detach(), layer.config.cast_config_weight
        local = get_local_shard(weight)  # with tensor parallelism, this rank's part
        has_dynamic_scale = cast.scaling_granularity.value == "tensorwise" and cast.scaling_type.value == "dynamic"
        # torchao rounds scales in the layer, not in the all-gather.
        has_suitable_scale = has_dynamic_scale and not layer.config.round_scales_to_power_of_2
        _, owners = parameter_owners[id(layer.weight)]
        if has_suitable_scale and len(owners) == 1 and local.shape[0] % num_shards == 0:
            wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(local, layer.linear_mm_config, cast.target_dtype)
            if is_dtensor(weight):
                wrapped = wrap_shard(wrapped, weight.device_mesh, weight.placements, weight.shape, weight.stride())
            layer.weight = torch.nn.Parameter(wrapped, requires_grad=layer.weight.requires_grad)
            count += 1
    if count or is_requested:
        log.info("%d of %d float8 weights of %s are gathered in float8", count, len(layers), type(model).__name__)
    return count


def compute_float8_scales(models: Iterable[torch.nn.Module]) -> None:
    """Compute the float8 scales of the current weights, in one collective per model that has such weights.

    All ranks must call it.
    """
    for model in models:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)


def _is_float8(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and hasattr(module, "linear_mm_config")
