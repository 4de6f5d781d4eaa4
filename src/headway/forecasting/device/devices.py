"""What a card has and computes at most, and what it takes before the first tensor: tables, with the source of each number.

What a device computes at most is what its maker states for dense matrix products. Dense: without structured sparsity; half-precision
products add up in float32. In TFLOP/s:

- NVIDIA data sheets of T4 (2019), V100 (2020), A10G, A100, A30, A40 (2021), L4, L40, L40S, H100 (2023), H200, B100 (2024); for B200
  the HGX data sheet (2025). Where a sheet states only the figure "with sparsity", the half of it stands here.
- NVIDIA's white papers of the GA102 (2021), Ada (2023) and RTX Blackwell (2025) GPUs for GeForce RTX 3090, 4090 and
  5090, and RTX A6000.
- AMD data sheets of Instinct MI210 and MI250X (2022), MI300X (2023), MI325X (2024). AMD has no TF32 before MI300.
"""

import re
from dataclasses import dataclass, replace

from headway.common import env
from headway.common.text import parse_bytes
from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.forecasting.device import calibration

MIB = 1 << 20
GIB = 1 << 30

DATA_SHEETS: dict[str, tuple[float | None, float | None, float | None, float]] = {
    "B200": (2250.0, 2250.0, 1125.0, 75.0),
    "H200 NVL": (835.5, 835.5, 417.5, 60.0),
    "H200": (989.5, 989.5, 494.5, 67.0),
    "H100 NVL": (835.5, 835.5, 417.5, 60.0),
    "H100 PCIe": (756.5, 756.5, 378.0, 51.0),
    "H100": (989.5, 989.5, 494.5, 67.0),
    "B100": (1750.0, 1750.0, 875.0, 60.0),
    "A100": (312.0, 312.0, 156.0, 19.5),
    "A10G": (70.0, 70.0, 35.0, 31.2),
    "A30": (165.0, 165.0, 82.0, 10.3),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "L40S": (362.1, 362.1, 183.0, 91.6),
    "L40": (181.0, 181.0, 90.5, 90.5),
    "L4": (121.0, 121.0, 60.0, 30.3),
    "T4": (None, 65.0, None, 8.1),
    "V100-PCIE": (None, 112.0, None, 14.0),
    "V100": (None, 125.0, None, 15.7),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 71.0, 35.6, 35.6),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
    "MI250X": (383.0, 383.0, None, 95.7),
    "MI210": (181.0, 181.0, None, 45.3),
}
"""A name in the device's own name: (bf16, fp16, tf32, fp32); the first entry that fits counts. None: it has no such units."""


@dataclass(frozen=True)
class Rates:
    """What a device can do at most, as its maker publishes it.

    Attributes:
        full: floating point operations a second in float32, without TF32, as torch computes unless it is told otherwise.
        half: the same in half precision on dense tensor cores, sums in float32; bfloat16 from compute capability 8.0 on.
        bandwidth: bytes a second of its memory.
    """

    full: float
    half: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """A target.

    Attributes:
        name: as it is asked for.
        memory: bytes on the card; None: not known, as on a CPU.
        capability: compute capability; (0, 0) on a CPU.
        overhead: bytes that the driver's context and loaded libraries take beside tensors: least, likely, most.
        cublas: bytes of cuBLAS's workspace, for each thread that multiplies matrices.
        source: where the overhead comes from.
        rates: what it computes and moves in a second at most.
        processors: streaming multiprocessors.
    """

    name: str
    memory: int | None
    capability: tuple[int, int]
    overhead: tuple[int, int, int]
    cublas: int
    source: str
    rates: Rates
    processors: int = 100

    @property
    def threads(self) -> int:
        """That one of its processors holds."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability, 2048)

    @property
    def is_cuda(self) -> bool:
        """Does it have CUDA's allocator and kernels?"""
        return self.capability > (0, 0)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a forecast for it cannot vouch for."""
        return (f"overhead of {self.name}: {self.source}",) if self.is_cuda else ()


MARGIN = 0.02
"""Of what the allocator takes: what may come on top, such as workspaces that no table knows. Assumed."""
LEAST_MARGIN = 192 * MIB
"""A block that fits nowhere: 152 MiB at the most in 164 rows beside torch's allocator."""
_LATE_KERNELS = 128 * MIB
_NEAR = 0.05
"""Drivers report a little less memory, or more, than a product has by its name."""

_AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""`:4096:2:16:8`, what torch asks for where CUBLAS_WORKSPACE_CONFIG is not set."""
_HOPPER = 32 * MIB

# In use on the card with BERT-large's weights alone, as published beside the table of docs/forecast_reference.md, less what torch
# takes for these weights. The rows of the table themselves are not in it.
_3090_CONTEXT = (2564 - 1294) * MIB
# Code for compute capability 8.6 in the libraries of nvidia-cublas-cu11 11.10.3.66 (May 2022), uncompressed: 61 MiB in libcublas,
# 377 in libcublasLt. Before CUDA 11.7 all of it is loaded with the first matrix product, which comes after the reading above.
_3090_CUBLAS = (61 + 377) * MIB
_3090 = (
    "RTX 3090, CUDA 11 of 2022, with a desktop: 1270 MiB published for a process that holds weights alone, and 438 MiB of cuBLAS's "
    "code, counted in its package; CUDA 11.7 and later load less"
)
_ASSUMED = "assumed: a context, the driver's own share and lazily loaded kernels; not measured on this card"
_ASSUMED_RANGE = (400 * MIB, 750 * MIB, 1400 * MIB)
_ANY = "only its memory was given: kernels are taken to be those of compute capability 8.0, and the rest is assumed"
_V100 = (
    "V100, CUDA 11: 1343 MiB published for a process with kernels loaded and no model; CUDA 11.7 and later load less"
)


_H100_OVERHEAD = (527 * MIB, 770 * MIB, 1000 * MIB)
_H100 = (
    "measured on an H100 80GB HBM3, driver 580, torch 2.11 for CUDA 13: 527 MiB for a context, 767 to 771 with a training step's "
    "kernels; of its 81,559 MiB the driver keeps 480"
)


def _rates(card: str, bandwidth: float) -> Rates:
    """Of a card's data sheet, and GB/s of its memory."""
    _, half, _, full = DATA_SHEETS[card]
    assert half is not None
    return Rates(full * 1e12, half * 1e12, bandwidth * 1e9)


def _assumed(
    name: str, memory: int, capability: tuple[int, int], rates: Rates, processors: int, cublas: int = _AMPERE
) -> Device:
    return Device(name, memory * MIB, capability, _ASSUMED_RANGE, cublas, _ASSUMED, rates, processors)


def _v100(name: str, memory: int) -> Device:
    overhead = (400 * MIB, 1343 * MIB, 1500 * MIB)
    return Device(name, memory * MIB, (7, 0), overhead, _AMPERE, _V100, _rates("V100", 900), 80)


_CPU_RATES = Rates(100e9, 100e9, 20e9)
"""Assumed: processors differ too much for one figure."""
_UNKNOWN_RATES = Rates(20e12, 150e12, 1000e9)
"""Of a card that is not in the table: assumed; they only weigh operations against each other."""

DEVICES = {
    device.name: device
    for device in (
        Device("cpu", None, (0, 0), (0, 0, 0), 0, "memory of tensors only", _CPU_RATES),
        Device(
            "rtx-3090",
            24 * GIB,
            (8, 6),
            (_3090_CONTEXT, _3090_CONTEXT + _3090_CUBLAS, _3090_CONTEXT + _3090_CUBLAS),
            _AMPERE,
            _3090,
            _rates("RTX 3090", 936),
            82,
        ),
        _assumed("rtx-4090", 24564, (8, 9), _rates("RTX 4090", 1008), 128),
        _assumed("rtx-5090", 32607, (12, 0), _rates("RTX 5090", 1792), 170),
        _assumed("a6000", 49140, (8, 6), _rates("RTX A6000", 768), 84),
        _assumed("a40", 46068, (8, 6), _rates("A40", 696), 84),
        _assumed("l40", 46068, (8, 9), _rates("L40", 864), 142),
        _assumed("t4", 15360, (7, 5), _rates("T4", 320), 40),
        _v100("v100-16gb", 16384),
        _v100("v100-32gb", 32768),
        _assumed("a10g", 23028, (8, 6), _rates("A10G", 600), 80),
        _assumed("l4", 23034, (8, 9), _rates("L4", 300), 58),
        _assumed("l40s", 46068, (8, 9), _rates("L40S", 864), 142),
        _assumed("a100-40gb", 40960, (8, 0), _rates("A100", 1555), 108),
        _assumed("a100-80gb", 81920, (8, 0), _rates("A100", 2039), 108),
        Device("h100", 81079 * MIB, (9, 0), _H100_OVERHEAD, _HOPPER, _H100, _rates("H100", 3350), 132),
        _assumed("h200", 143771, (9, 0), _rates("H200", 4800), 132, _HOPPER),
        _assumed("b100", 183359, (10, 0), _rates("B100", 8000), 132, _HOPPER),
        _assumed("b200", 183359, (10, 0), _rates("B200", 8000), 148, _HOPPER),
        _assumed("mi300x", 196592, (9, 4), _rates("MI300X", 5300), 304, _HOPPER),
    )
}


def find(name: str) -> Device:
    """The device of that name, with what was measured on it here by `headway estimate --calibrate`, else the table's assumption.

    Args:
        name: of the table, of a calibrated card, or "this": the CUDA device of this machine. Also a product's name as nvidia-smi
            prints it ("NVIDIA A100-SXM4-80GB"), or the memory of any card ("48GiB").

    Raises:
        ConfigError: it is neither in the table nor calibrated.
        DeviceUnavailable: "this" where there is no CUDA device.
    """
    wanted = named() if name.lower() == "this" else name.lower()
    device = look_up(wanted) or look_up(_of_product(wanted)) or _of_memory(wanted)
    if device is None:
        known = sorted({*DEVICES, *_records()})
        hint = did_you_mean(name, [*known, "this"])
        calibrate = "; `headway estimate --calibrate` on its machine adds it" if name.lower() == "this" else ""
        raise ConfigError(f"device={wanted!r} is not in the table{hint or ''}; it has {', '.join(known)}{calibrate}")
    return device


def look_up(name: str) -> Device | None:
    """The device of that name, calibrated or in the table; None: it is neither."""
    known, record = DEVICES.get(name), _records().get(name)
    if record is None:
        return known
    # Kernels are loaded when they are first used: later ones come on top.
    overhead = (record.overhead, record.overhead, record.overhead + _LATE_KERNELS)
    workspace = record.kept // 2 if record.kept else (_HOPPER if record.capability >= (9, 0) else _AMPERE)
    rates = known.rates if known is not None else _UNKNOWN_RATES
    processors = known.processors if known is not None else 100
    return Device(name, record.memory, record.capability, overhead, workspace, record.source, rates, processors)


def _of_product(text: str) -> str:
    """The longest name of the table that is part of a product's; "" where none is."""
    words = set(re.findall(r"[a-z0-9]+", text))
    return max((name for name in DEVICES if set(name.split("-")) <= words), key=len, default="")


def _of_memory(text: str) -> Device | None:
    """Some card with that memory: of Ampere's kind, and nothing else is known of it."""
    if not re.fullmatch(r"[0-9.]+ *[kmgt]?i?b", text):
        return None
    return replace(_assumed(text, 0, (8, 0), _UNKNOWN_RATES, 100), memory=parse_bytes(text), source=_ANY)


def _records() -> dict[str, calibration.CalibrationRecord]:
    return calibration.read(calibration.file(env.snapshot()))


def named() -> str:
    """The name of this machine's CUDA device.

    Raises:
        DeviceUnavailable: there is none.
    """
    product, memory, _ = calibration.product()
    return name_of(product, memory)


def name_of(product: str, memory: int) -> str:
    """The name that a card goes by: that of the table with all its words in the product's name and its memory; else its own.

    Args:
        product: what the driver calls it, such as "NVIDIA A100-SXM4-80GB".
        memory: bytes on it.
    """
    words = re.findall(r"[a-z0-9]+", product.lower())
    sizes = {f"{size}gb" for size in (16, 32, 40, 80) if abs(memory - (size << 30)) <= _NEAR * (size << 30)}
    fitting = [
        name
        for name, device in DEVICES.items()
        if device.memory
        and set(name.split("-")) <= {*words, *sizes}
        and abs(memory - device.memory) <= _NEAR * device.memory
    ]
    return max(fitting, key=len, default="-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")))


def budget_of(device: Device, budget: int | str | None) -> int | None:
    """Bytes that a run may take from the card, its context included; None: no limit is known.

    Args:
        device: the target.
        budget: None: all of its memory. Decimal units are powers of 1000, binary ones of 1024.
    """
    return device.memory if budget is None else parse_bytes(budget)


def spread(device: Device, taken: int) -> tuple[int, int, int]:
    """Bytes in use on the device when the allocator has taken so many: least, likely, most."""
    if not device.is_cuda:
        return taken, taken, taken
    least, likely, most = device.overhead
    return taken + least, taken + likely, taken + most + max(int(taken * MARGIN), LEAST_MARGIN)


def room(device: Device, budget: int) -> int:
    """Bytes that the allocator may take so that even the most stays within the budget; may be negative."""
    if not device.is_cuda:
        return budget
    left = budget - device.overhead[2]
    return min(int(left / (1 + MARGIN)), left - LEAST_MARGIN)
