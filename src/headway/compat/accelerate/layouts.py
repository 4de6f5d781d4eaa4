"""Accelerate's names of layouts: its enumerations."""

from enum import Enum

from headway.config.launch import Spelled
from headway.config.layout_choice import ResolvedLayout
from headway.runtime.process import ProcessRuntime


class DistributedType(str, Enum):
    """How work is shared. Headway's are NO, FSDP, DEEPSPEED and MULTI_*, by the kind of device (GPU: any without a name)."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - the older name of the same member
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(Spelled):
    """Values of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Spelled):
    """Random streams, for `rng_types`."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


def distributed_type(runtime: ProcessRuntime, chosen: ResolvedLayout | None = None) -> DistributedType:
    """What Accelerate calls this process's surroundings; with a layout of shards, FSDP or DEEPSPEED."""
    if runtime.world_size == 1:
        return DistributedType.NO
    if chosen is not None and chosen.layout.num_shards > 1:
        return DistributedType.DEEPSPEED if chosen.is_deepspeed else DistributedType.FSDP
    kind = runtime.hardware.kind
    return getattr(DistributedType, f"MULTI_{kind.upper()}", DistributedType.MULTI_GPU)
