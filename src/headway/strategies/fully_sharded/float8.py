"""float8 all-gathers: a sharded weight of a float8 layer is cast before it is gathered, by one scale for all of its parts.

torchao's tensor around the part does the cast and gives the gathered float8 values to the layer. The scale needs the largest value of
all parts. It is computed for all weights in one exchange: without that, each gather would begin with an exchange of its own, in
forward and in backward. That happens after an update, for who calls a block alone; and again as a forward begins, because weights may
have been changed in between (a checkpoint, an optimizer that swaps averages), so that an older scale would cut values off.
"""

from collections.abc import Iterable
from typing import Any

import torch

from headway.common.optional import Later
from headway.config.engines import Float8Options
from headway.config.parallelism import ShardingOptions
from headway.errors import UnsupportedError
from headway.log import get_logger
from headway.strategies.blocks import holders_of

torchao = Later("torchao.float8")
weights = Later("torchao.float8.fsdp_utils")

log = get_logger(__name__)


def check_float8(
    number_format: str,
    options: Float8Options | None,
    sharding: ShardingOptions,
    num_parts: int,
    num_sequence_parts: int = 1,
) -> None:
    """Can a layout of this kind compute in float8 as it is asked to?

    Args:
        number_format: the run's mixed_precision.
        options: of float8.
        sharding: of shards.
        num_parts: among how many ranks a matrix is split (tensor parallelism).
        num_sequence_parts: among how many ranks a sequence is split (context parallelism).

    Raises:
        UnsupportedError: it cannot.
    """
    if number_format != "fp8":
        return
    if num_parts > 1:
        raise UnsupportedError(
            "mixed_precision='fp8' does not support tensor parallelism yet: the parts of a matrix would have scales of their own; "
            "use strategy='fsdp' or 'hsdp', or mixed_precision='bf16'"
        )
    if num_sequence_parts > 1:
        raise UnsupportedError(
            "mixed_precision='fp8' does not support context parallelism (cp): parts of a sequence would have scales of their own, so "
            "that they cannot be compared with the whole; use strategy='fsdp' or 'hsdp', or mixed_precision='bf16'"
        )
    if options is not None and options.all_gather and _is_partly_kept(sharding):
        raise UnsupportedError(
            f"ShardingOptions(reshard_after_forward={sharding.reshard_after_forward}) keeps parts of gathered weights, which torch "
            "cannot do with weights in float8; use True or False, or Float8Options(fsdp_all_gather=False)"
        )


def _is_partly_kept(sharding: ShardingOptions) -> bool:
    chosen = sharding.reshard_after_forward
    return chosen is not None and not isinstance(chosen, bool)


def wrap_weights(
    model: torch.nn.Module, options: Float8Options | None, sharding: ShardingOptions, num_shards: int
) -> int:
    """Let weights of float8 layers be gathered in float8, before they are sharded; returns how many.

    Those stay plain that are shared by several modules, whose scales go by rows, or whose rows cannot be divided among the shards.

    Args:
        model: whose layers have been converted.
        options: of float8.
        sharding: of shards.
        num_shards: among how many ranks a weight is cut.
    """
    wish = None if options is None else options.all_gather
    layers: list[Any] = [module for module in model.modules() if _is_float8(module)]
    if wish is False or not layers or _is_partly_kept(sharding):
        return 0
    holders, count = holders_of(model), 0
    for layer in layers:
        weight, cast = layer.weight, layer.config.cast_config_weight
        is_one_scale = cast.scaling_granularity.value == "tensorwise" and cast.scaling_type.value == "dynamic"
        # torchao rounds scales in the layer only.
        is_one_scale = is_one_scale and not layer.config.round_scales_to_power_of_2
        if is_one_scale and len(holders[id(weight)][1]) == 1 and weight.shape[0] % num_shards == 0:
            wrapped = weights.WeightWithDynamicFloat8CastTensor(
                weight.detach(), layer.linear_mm_config, cast.target_dtype
            )
            layer.weight = torch.nn.Parameter(wrapped, requires_grad=weight.requires_grad)
            count += 1
    if count or wish:
        log.info("%d of %d float8 weights of %s are gathered in float8", count, len(layers), type(model).__name__)
    return count


def scale_before_forward(model: torch.nn.Module) -> None:
    """From now on all scales are computed, in one exchange, as a forward of the sharded model begins."""
    model.register_forward_pre_hook(lambda model, args: compute_scales([model]), prepend=True)


def compute_scales(models: Iterable[torch.nn.Module]) -> None:
    """The scales of weights as they are now, one exchange for each model that has such weights; all ranks call it."""
    for model in models:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)


def _is_float8(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and hasattr(module, "linear_mm_config")
