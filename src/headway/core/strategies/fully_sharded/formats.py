"""Dtypes in which FSDP gathers parameters and reduces gradients under mixed precision.

Forwards run under autocast, as in other strategies. Autocast alone would keep a half-precision copy of each unsharded
weight from forward to backward, which sharding should avoid. So blocks are gathered in half precision, and autocast has
nothing to copy. Their inputs are not cast: the residual stream stays float32, as under DDP. The root (embeddings, the
last norm, the head) is gathered in float32, and so are norms that a device cannot compute from half-precision weights.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.config.parallelism import ShardingOptions
from headway.core.strategies._torch import BatchNormBase
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import StateError

fsdp = LazyModule("torch.distributed.fsdp")

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Running statistics are float32 on every device, and the weights must have the same dtype.
_NORMS_WITH_STATISTICS = BatchNormBase
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True)
class MixedPrecisionFormats:
    """Dtypes of sharded parameters and gradients.

    Attributes:
        blocks: Mixed-precision policy of units below the root.
        root: Mixed-precision policy of the root, and of norms that stay in float32.
        float32_norms: Classes of norms within blocks that become separate units in float32.
        message: Log message about the conversion. Empty if nothing is converted.
    """

    blocks: Any
    root: Any
    float32_norms: tuple[type, ...]
    message: str = ""


def choose_formats(options: ShardingOptions, number_format: str, device_type: str) -> MixedPrecisionFormats:
    """Return the dtypes of sharded parameters and gradients.

    Args:
        options: Options of sharding, which override `number_format`.
        number_format: Mixed precision of the run, such as "bf16".
        device_type: Type of the device that computes, such as "cuda".
    """
    reduce, output = _parse_dtype(options.reduce_dtype), _parse_dtype(options.output_dtype)
    requested = _parse_dtype(options.param_dtype)
    half = _HALF_DTYPES.get(number_format)
    if half is None:
        # Without autocast, a unit's inputs must have the type of its parameters.
        is_cast = requested is not None
        reduce = reduce or (torch.float32 if is_cast else None)
        policy = partial(
            fsdp.MixedPrecisionPolicy, param_dtype=requested, reduce_dtype=reduce, cast_forward_inputs=is_cast
        )
        message = "" if requested is None else f"all units compute with {get_dtype_name(requested)} parameters"
        return MixedPrecisionFormats(policy(), policy(output_dtype=output), (), message)
    param = requested or half
    policy = partial(fsdp.MixedPrecisionPolicy, cast_forward_inputs=False)
    blocks = policy(param_dtype=param, reduce_dtype=reduce or torch.float32)
    root = policy(reduce_dtype=reduce, output_dtype=output)
    # On accelerators autocast computes these norms in float32 with any weights. On a CPU torch rejects mixed types.
    norms = (_NORMS_WITH_STATISTICS, *_NORMS) if device_type == "cpu" else (_NORMS_WITH_STATISTICS,)
    message = (
        f"mixed_precision={number_format!r}: blocks are gathered in {get_dtype_name(param)}, the root and its residual stream "
        f"keep their dtype; gradients of blocks are summed in {get_dtype_name(reduce or torch.float32)}, and the optimizer's "
        "parameters keep their dtype"
    )
    return MixedPrecisionFormats(blocks, root, norms, message)


def iterate_float32_norms(
    units: Iterable[torch.nn.Module], formats: MixedPrecisionFormats
) -> Iterator[torch.nn.Module]:
    """Yield the norm layers that are inside units, have parameters, and stay in float32."""
    seen = {id(unit) for unit in units}
    for unit in units:
        for module in unit.modules():
            has_own = any(p is not None for p in module._parameters.values())
            if isinstance(module, formats.float32_norms) and id(module) not in seen and has_own:
                seen.add(id(module))
                yield module


def check_formats(model: torch.nn.Module, expected: dict[int, torch.dtype]) -> None:
    """Raise an error before the first update if parameters or gradients do not have the expected dtypes.

    Args:
        model: Sharded model.
        expected: Dtype of each sharded parameter when it was set up, by the parameter's ID.

    Raises:
        StateError: If user code has converted parameters or gradients to another dtype.
    """
    for record in fsdp_state.iterate_records(model):
        shard, gathered = record.sharded_param, fsdp_state.get_gathered_parameter(record)
        storage_dtype = expected.get(id(shard))
        if storage_dtype is None:
            continue
        compute_dtype = record.mp_policy.param_dtype or storage_dtype
        checks = [("its part", shard.dtype, storage_dtype)]
        if shard.grad is not None:
            checks.append(("its gradient", shard.grad.dtype, storage_dtype))
        if gathered is not None and storage_dtype.is_floating_point:
            checks.append(("the gathered parameter", gathered.dtype, compute_dtype))
        for description, dtype, expected_dtype in checks:
            if dtype != expected_dtype:
                raise StateError(
                    f"the parameter {record._param_fqn} of {type(model).__name__}: {description} is "
                    f"{get_dtype_name(dtype)} instead of {get_dtype_name(expected_dtype)}. "
                    "Convert models (model.to(dtype)) before prepare(), not after"
                )


def _parse_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
