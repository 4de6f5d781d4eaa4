"""What a card has, and what it takes before the first tensor: one table, with the source of each number."""

from dataclasses import dataclass

from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.units import parse_bytes

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A target.

    Attributes:
        name: as it is asked for.
        memory: bytes on the card; None: not known, as on a CPU.
        capability: compute capability; (0, 0) on a CPU.
        overhead: the smallest and the largest number of bytes that the driver's context and loaded libraries take beside tensors.
        cublas: bytes of cuBLAS's workspace, for each thread that multiplies matrices.
        source: where the overhead comes from.
    """

    name: str
    memory: int | None
    capability: tuple[int, int]
    overhead: tuple[int, int]
    cublas: int
    source: str

    @property
    def is_cuda(self) -> bool:
        """Does it have CUDA's allocator and kernels?"""
        return self.capability > (0, 0)


_AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""`:4096:2:16:8`, what torch asks for where CUBLAS_WORKSPACE_CONFIG is not set."""
_HOPPER = 32 * MIB
_LAZY = "assumed: a context and the kernels that a step loads lazily (CUDA 11.7 and later); not measured on this card"
_LAZY_RANGE = (400 * MIB, 900 * MIB)

_3090 = (
    "published with the table of docs/forecast.md: 2564 MiB in use on the card with BERT-large's weights alone, of which they are "
    "1278; libraries that the first step loads are not in it: up to 400 MiB are assumed"
)

DEVICES = {
    device.name: device
    for device in (
        Device("cpu", None, (0, 0), (0, 0), 0, "memory of tensors only"),
        Device("rtx-3090", 24 * GIB, (8, 6), (1286 * MIB, 1686 * MIB), _AMPERE, _3090),
        Device("rtx-4090", 24564 * MIB, (8, 9), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("t4", 15360 * MIB, (7, 5), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("v100-16gb", 16384 * MIB, (7, 0), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("v100-32gb", 32768 * MIB, (7, 0), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("a10g", 23028 * MIB, (8, 6), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("l4", 23034 * MIB, (8, 9), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("l40s", 46068 * MIB, (8, 9), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("a100-40gb", 40960 * MIB, (8, 0), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("a100-80gb", 81920 * MIB, (8, 0), _LAZY_RANGE, _AMPERE, _LAZY),
        Device("h100", 81559 * MIB, (9, 0), _LAZY_RANGE, _HOPPER, _LAZY),
        Device("h200", 143771 * MIB, (9, 0), _LAZY_RANGE, _HOPPER, _LAZY),
    )
}


def find(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: it is not in the table.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        hint = did_you_mean(name, list(DEVICES))
        raise ConfigError(f"device={name!r} is not in the table{hint or ''}; it has {', '.join(DEVICES)}")
    return device


def budget_of(device: Device, budget: int | str | None) -> int | None:
    """Bytes that a run may take from the card, its context included; None: no limit is known.

    Args:
        device: the target.
        budget: None: all of its memory. Decimal units are powers of 1000, binary ones of 1024.
    """
    if budget is None:
        return device.memory
    return parse_bytes(budget)
