"""Accelerate's enumerations and bases of settings that Headway itself has no use for."""

from enum import Enum, EnumMeta
from typing import Any


class EnumWithContains(EnumMeta):
    """Enumerations that answer `value in Kind` for values too."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration whose text is its value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """All values."""
        return [each.value for each in cls]


class ComputeEnvironment(str, Enum):
    """Where a script runs; Headway starts on machines, not through SageMaker."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum):
    """SageMaker's own ways to share work; Headway has none of them."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, Enum):
    """The engine for float8; in Headway it is AO, torchao."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CannotPadNestedTensorWarning(UserWarning):
    """Accelerate's warning about nested tensors that it does not pad; Headway never emits it."""
