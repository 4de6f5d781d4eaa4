"""Accelerate's enumerations: kinds of distribution, precisions, compilers, random streams."""

from enum import Enum

from headway.runtime.process import ProcessRuntime


class Spelled(str, Enum):
    """Members are their text: `DistributedType.NO == "NO"`, and printing one gives that text."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values."""
        return [str(member.value) for member in cls]


class DistributedType(str, Enum):
    """How processes share the work. Headway's are NO, MULTI_CPU, MULTI_GPU and MULTI_XPU; the others are there to compare with."""

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
    NPU = "npu"
    SDAA = "sdaa"
    MUSA = "musa"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DynamoBackend(Spelled):
    """torch.compile's backends, by Accelerate's names."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


_BY_DEVICE = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}


def distributed_type(runtime: ProcessRuntime) -> DistributedType:
    """What Accelerate calls this process's surroundings."""
    if runtime.world_size == 1:
        return DistributedType.NO
    return _BY_DEVICE.get(runtime.hardware.kind, DistributedType.MULTI_CPU)
