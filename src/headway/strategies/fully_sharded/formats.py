"""In which dtypes sharded parameters are gathered and their gradients summed.

Under mixed precision forwards run under autocast, as everywhere. Autocast alone would keep a half-precision copy of each whole weight
from forward to backward, which sharding is there to avoid; so blocks are gathered in half precision to begin with, and autocast has
nothing to copy. Their inputs are not cast: the residual stream stays float32, as it does under DDP. The root (embeddings, the last
norm, the head) is gathered in float32, and so are norms that a device cannot compute from half-precision weights.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headway.common.optional import Later
from headway.config.parallelism import ShardingOptions
from headway.errors import StateError
from headway.log import get_logger
from headway.strategies.fully_sharded import fsdp_state as gathered
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
            if isinstance(module, formats.keeps_norms) and id(module) not in seen and module._parameters:
                seen.add(id(module))
                if any(p is not None for p in module._parameters.values()):
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
