"""In which dtypes sharded parameters are gathered and their gradients summed; float8's scales, one for all ranks.

Under mixed precision forwards run under autocast, as everywhere. Autocast alone would keep a half-precision copy of each whole weight
from forward to backward, which sharding is there to avoid; so blocks are gathered in half precision to begin with, and autocast has
nothing to copy. Their inputs are not cast: the residual stream stays float32, as it does under DDP. The root (embeddings, the last
norm, the head) is gathered in float32, and so are norms that a device cannot compute from half-precision weights.

float8 all-gathers: a sharded weight of a float8 layer is cast before it is gathered, by one scale for all of its parts.

torchao's tensor around the part does the cast and gives the gathered float8 values to the layer. The scale needs the largest value of
all parts. It is computed for all weights in one exchange: without that, each gather would begin with an exchange of its own, in
forward and in backward. That happens after an update, for who calls a block alone; and again as a forward begins, because weights may
have been changed in between (a checkpoint, an optimizer that swaps averages), so that an older scale would cut values off.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headway.common.optional import Later
from headway.config.engines import Float8Options
from headway.config.parallelism import ShardingOptions
from headway.errors import StateError, UnsupportedError
from headway.log import get_logger
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.parts import holders_of
from headway.weights.shards import dtype_name

fsdp = Later("torch.distributed.fsdp")

log = get_logger(__name__)

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Running statistics are float32 on every device, and must have their weights' type.
_WITH_STATISTICS = torch.nn.modules.batchnorm._NormBase
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True)
class MixedPrecisionFormats:
    """The formats of one run.

    Attributes:
        blocks: policy of units below the root.
        root: policy of the root, and of norms that stay in float32.
        keeps_norms: norms within blocks are units of their own, in float32.
        told: what is said at the start; empty where nothing is converted.
    """

    blocks: Any
    root: Any
    keeps_norms: tuple[type, ...]
    told: str = ""


def choose_formats(options: ShardingOptions, number_format: str, device_type: str) -> MixedPrecisionFormats:
    """The formats that the run's mixed_precision and the options of sharding mean.

    Args:
        options: of sharding; what they say wins.
        number_format: the run's mixed_precision.
        device_type: of the device that computes.
    """
    reduce, output = _dtype(options.reduce_dtype), _dtype(options.output_dtype)
    given = _dtype(options.param_dtype)
    half = _HALF.get(number_format)
    if half is None:
        # Without autocast, a unit's inputs must have the type of its parameters.
        reduce = reduce or (None if given is None else torch.float32)
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=given, reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=given is not None
        )
        told = "" if given is None else f"all units compute with {dtype_name(given)} parameters"
        inner = fsdp.MixedPrecisionPolicy(param_dtype=given, reduce_dtype=reduce, cast_forward_inputs=given is not None)
        return MixedPrecisionFormats(inner, policy, (), told)
    param = given or half
    blocks = fsdp.MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce or torch.float32, cast_forward_inputs=False
    )
    root = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=False)
    # Autocast computes these norms in float32 on accelerators, whatever their weights are; on a CPU torch refuses the mixture.
    norms = (_WITH_STATISTICS, *_NORMS) if device_type == "cpu" else (_WITH_STATISTICS,)
    told = (
        f"mixed_precision={number_format!r}: blocks are gathered in {dtype_name(param)}, the root and its residual stream keep "
        f"their dtype; gradients of blocks are summed in {dtype_name(reduce or torch.float32)}, and the optimizer's parameters keep "
        "their dtype"
    )
    return MixedPrecisionFormats(blocks, root, norms, told)


def norms_within(units: Iterable[torch.nn.Module], formats: MixedPrecisionFormats) -> Iterator[torch.nn.Module]:
    """Norms with parameters that lie in these units and stay in float32, each once."""
    seen = {id(unit) for unit in units}
    for unit in units:
        for module in unit.modules():
            has_own = any(p is not None for p in module._parameters.values())
            if isinstance(module, formats.keeps_norms) and id(module) not in seen and has_own:
                seen.add(id(module))
                yield module


def check_formats(model: torch.nn.Module, expected: dict[int, torch.dtype]) -> None:
    """Before the first update: parameters and gradients have the types they were promised to have.

    Args:
        model: a sharded one.
        expected: by id of a sharded parameter, its type when it was set up.

    Raises:
        StateError: something has converted them.
    """
    for record in gathered.records(model):
        part, whole = record.sharded_param, gathered.whole_parameter(record)
        wanted = expected.get(id(part))
        if wanted is None:
            continue
        computed = record.mp_policy.param_dtype or wanted
        found = {"its part": (part.dtype, wanted)}
        if part.grad is not None:
            found["its gradient"] = (part.grad.dtype, wanted)
        if whole is not None and wanted.is_floating_point:
            found["the gathered parameter"] = (whole.dtype, computed)
        for what, (dtype, should) in found.items():
            if dtype != should:
                raise StateError(
                    f"the parameter {record._param_fqn} of {type(model).__name__}: {what} is {dtype_name(dtype)} instead of "
                    f"{dtype_name(should)}. Convert models (model.to(dtype)) before prepare(), not after"
                )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


torchao = Later("torchao.float8")
weights = Later("torchao.float8.fsdp_utils")


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
