"""String enumerations whose members are equal to their text, as in Accelerate."""

from enum import Enum


class StringEnum(str, Enum):
    """String enumeration whose members are equal to their values and print as such: `DynamoBackend.NO == "NO"`."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members."""
        return [str(member.value) for member in cls]


class DynamoBackend(StringEnum):
    """Backends of torch.compile, with the names that Accelerate uses."""

    NO, EAGER, AOT_EAGER, INDUCTOR = "NO", "EAGER", "AOT_EAGER", "INDUCTOR"
    AOT_TS_NVFUSER, NVPRIMS_NVFUSER, CUDAGRAPHS, OFI = "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI"
    FX2TRT, ONNXRT, TENSORRT = "FX2TRT", "ONNXRT", "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE, TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE"
    TVM, HPU_BACKEND, NEURON = "TVM", "HPU_BACKEND", "NEURON"
