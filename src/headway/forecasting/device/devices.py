"""Table of devices: memory, peak rates, and the memory used before the first tensor, with the source of each number."""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from headway.common import env
from headway.common.text import parse_bytes
from headway.core.config.values import suggest_word
from headway.errors import ConfigError
from headway.forecasting.device import calibration
from headway.forecasting.device.data_sheets import DATA_SHEETS

MIB = 1 << 20
"""Number of bytes in a mebibyte."""
GIB = 1 << 30
"""Number of bytes in a gibibyte."""

MARGIN = 0.02
"""Fraction of the reserved memory that is added as a margin for unknown workspaces. Assumed, not measured."""
MIN_MARGIN_BYTES = 192 * MIB
"""Minimum margin in bytes, for a block that is larger than every free gap in the reserved memory.

The largest error in 164 measurements with torch's own allocator was 152 MiB. docs/forecast_measured.md shows such
measurements.
"""
_LATE_KERNEL_BYTES = 128 * MIB
"""Bytes that are added to a calibrated overhead, for kernels that CUDA loads later in a run. Assumed, not measured."""
_MEMORY_TOLERANCE = 0.05
"""Relative tolerance when memory sizes are compared.

It is needed because the size that a driver reports differs slightly from the size in the product's name.
"""
_ASSUMED_PROCESSORS = 100
"""Number of streaming multiprocessors of a GPU that is not in the table. It affects only the scratch memory of sums."""
_CUBLAS_BYTES_AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""Bytes of cuBLAS's default workspace for compute capabilities below 9.0 (`:4096:2:16:8`).

cuBLAS uses this size unless the variable CUBLAS_WORKSPACE_CONFIG is set.
"""
_CUBLAS_BYTES_HOPPER = 32 * MIB
"""Bytes of cuBLAS's default workspace for compute capability 9.0 and later."""
_HIPBLAS_BYTES_GFX94 = 128 * MIB
"""Bytes of hipBLAS's default workspace for AMD's gfx94x and gfx95x, as torch sets it."""
# Published memory in use with only BERT-large's weights, minus the memory that torch allocates for these weights.
# docs/forecast_measured.md compares forecasts with the other published figures, none of which was used for this number.
_CONTEXT_BYTES_3090 = (2564 - 1294) * MIB
# Uncompressed code for compute capability 8.6 in nvidia-cublas-cu11 11.10.3.66 (May 2022): 61 MiB in libcublas, 377 MiB in
# libcublasLt. Before CUDA 11.7, the first matrix product loads all of this code. The published value above does not
# include it, because that value was read before the first product.
_CUBLAS_CODE_BYTES_3090 = (61 + 377) * MIB
# Sources of the overheads of devices, as phrases that forecasts print.
_SOURCE_3090 = (
    "RTX 3090, CUDA 11 of 2022, with a desktop: 1270 MiB published for a process that holds weights alone, and 438 MiB of cuBLAS's "
    "code, counted in its package; CUDA 11.7 and later load less"
)
_SOURCE_ASSUMED = (
    "assumed, because this GPU was not measured; `headway estimate --calibrate` measures the one in this machine"
)
_SOURCE_UNKNOWN_GPU = (
    "only its memory was given: kernels are taken to be those of compute capability 8.0, and the rest is assumed"
)
_SOURCE_V100 = (
    "V100, CUDA 11: 1343 MiB published for a process with kernels loaded and no model; CUDA 11.7 and later load less"
)
_SOURCE_H100 = (
    "measured on an H100 80GB HBM3, driver 580, torch 2.11 for CUDA 13: 527 MiB for a context, 767 to 771 with a training step's "
    "kernels; of its 81,559 MiB the driver keeps 480"
)


class MemoryRange(NamedTuple):
    """Range of an uncertain number of bytes.

    Attributes:
        least: Lower bound.
        likely: Likely value.
        most: Upper bound.
    """

    least: int
    likely: int
    most: int


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a device as published by its manufacturer.

    Attributes:
        full: Floating point operations per second in float32 without TF32, which is torch's default.
        half: Floating point operations per second in half precision on dense tensor cores, with accumulation in
            float32. For bfloat16, it applies only from compute capability 8.0 on.
        bandwidth: Memory bandwidth in bytes per second.
    """

    full: float
    half: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """Device that a forecast can be made for, with the numbers that the forecast needs.

    Attributes:
        name: Name by which the user selects the device.
        memory: Bytes of device memory, or None if unknown, as on a CPU.
        capability: Compute capability, or (0, 0) on a CPU.
        overhead: Bytes of the driver's context and loaded libraries.
        cublas: Bytes of cuBLAS's workspace for each thread that multiplies matrices.
        source: Source of the overhead, as a phrase.
        rates: Peak rates.
        processors: Number of streaming multiprocessors.
    """

    name: str
    memory: int | None
    capability: tuple[int, int]
    overhead: MemoryRange
    cublas: int
    source: str
    rates: PeakRates
    processors: int = _ASSUMED_PROCESSORS

    @property
    def threads(self) -> int:
        """Maximum number of resident threads per streaming multiprocessor."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability, 2048)

    @property
    def is_cuda(self) -> bool:
        """Whether the device is modeled with CUDA's allocator and kernels."""
        return self.capability > (0, 0)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences on the assumptions of a forecast for this device, such as the source of the memory overhead."""
        what = f"memory of {self.name} besides tensors (CUDA context, driver, libraries)"
        return (f"{what}: {self.source}",) if self.is_cuda else ()


def _make_rates(card: str, bandwidth: float) -> PeakRates:
    """Return the peak rates of a GPU: the FLOP/s from its data sheet, and the given memory bandwidth.

    Args:
        card: Key of the GPU in `DATA_SHEETS`.
        bandwidth: Memory bandwidth in GB/s.
    """
    peak = DATA_SHEETS[card]
    assert peak.fp16 is not None
    return PeakRates(peak.fp32 * 1e12, peak.fp16 * 1e12, bandwidth * 1e9)


def _make_assumed(
    name: str,
    memory: int,
    capability: tuple[int, int],
    rates: PeakRates,
    processors: int,
    cublas: int = _CUBLAS_BYTES_AMPERE,
) -> Device:
    """Return a device whose overhead was not measured, but is assumed.

    Args:
        name: Name of the device, such as "h100-80gb".
        memory: Memory in MiB.
        capability: Compute capability.
        rates: Peak rates.
        processors: Number of streaming multiprocessors.
        cublas: Bytes of cuBLAS's workspace. Default: torch's default before compute capability 9.0.
    """
    return Device(name, memory * MIB, capability, _ASSUMED_OVERHEAD, cublas, _SOURCE_ASSUMED, rates, processors)


def _make_v100(name: str, memory: int) -> Device:
    """Return a V100 with the given name and memory in MiB.

    The likely value of its overhead was published (`_SOURCE_V100`). The bounds are assumed.
    """
    overhead = MemoryRange(400 * MIB, 1343 * MIB, 1500 * MIB)
    return Device(
        name, memory * MIB, (7, 0), overhead, _CUBLAS_BYTES_AMPERE, _SOURCE_V100, _make_rates("V100", 900), 80
    )


_ASSUMED_OVERHEAD = MemoryRange(400 * MIB, 750 * MIB, 1400 * MIB)
"""Bytes of the context and libraries of a GPU that was not measured."""
_H100_OVERHEAD = MemoryRange(527 * MIB, 770 * MIB, 1000 * MIB)
"""Bytes of an H100's context and libraries. `_SOURCE_H100` has the source of the first two; the upper bound is assumed."""
_CPU_RATES = PeakRates(100e9, 100e9, 20e9)
"""Assumed rates of a CPU. Processors differ too much for a table."""
_UNKNOWN_RATES = PeakRates(20e12, 150e12, 1000e9)
"""Assumed rates of a GPU that is not in the table. They affect only the relative costs of operations."""

DEVICES = {
    device.name: device
    for device in (
        Device("cpu", None, (0, 0), MemoryRange(0, 0, 0), 0, "memory of tensors only", _CPU_RATES),
        Device(
            "rtx-3090",
            24 * GIB,
            (8, 6),
            MemoryRange(
                _CONTEXT_BYTES_3090,
                _CONTEXT_BYTES_3090 + _CUBLAS_CODE_BYTES_3090,
                _CONTEXT_BYTES_3090 + _CUBLAS_CODE_BYTES_3090,
            ),
            _CUBLAS_BYTES_AMPERE,
            _SOURCE_3090,
            _make_rates("RTX 3090", 936),
            82,
        ),
        _make_assumed("rtx-4090", 24564, (8, 9), _make_rates("RTX 4090", 1008), 128),
        _make_assumed("rtx-5090", 32607, (12, 0), _make_rates("RTX 5090", 1792), 170, _CUBLAS_BYTES_HOPPER),
        _make_assumed("a6000", 49140, (8, 6), _make_rates("RTX A6000", 768), 84),
        _make_assumed("a40", 46068, (8, 6), _make_rates("A40", 696), 84),
        _make_assumed("l40", 46068, (8, 9), _make_rates("L40", 864), 142),
        _make_assumed("t4", 15360, (7, 5), _make_rates("T4", 320), 40),
        _make_v100("v100-16gb", 16384),
        _make_v100("v100-32gb", 32768),
        _make_assumed("a10g", 23028, (8, 6), _make_rates("A10G", 600), 80),
        _make_assumed("l4", 23034, (8, 9), _make_rates("L4", 300), 58),
        _make_assumed("l40s", 46068, (8, 9), _make_rates("L40S", 864), 142),
        _make_assumed("a100-40gb", 40960, (8, 0), _make_rates("A100", 1555), 108),
        _make_assumed("a100-80gb", 81920, (8, 0), _make_rates("A100", 2039), 108),
        Device(
            "h100",
            81079 * MIB,
            (9, 0),
            _H100_OVERHEAD,
            _CUBLAS_BYTES_HOPPER,
            _SOURCE_H100,
            _make_rates("H100", 3350),
            132,
        ),
        _make_assumed("h200", 143771, (9, 0), _make_rates("H200", 4800), 132, _CUBLAS_BYTES_HOPPER),
        _make_assumed("b100", 183359, (10, 0), _make_rates("B100", 8000), 132, _CUBLAS_BYTES_HOPPER),
        _make_assumed("b200", 183359, (10, 0), _make_rates("B200", 8000), 148, _CUBLAS_BYTES_HOPPER),
        _make_assumed("mi300x", 196592, (9, 4), _make_rates("MI300X", 5300), 304, _HIPBLAS_BYTES_GFX94),
    )
}
"""Known devices, by name."""


def find_device(name: str) -> Device:
    """Return the device with a given name.

    The overhead is the calibrated one if `headway estimate --calibrate` was run on this machine.

    Args:
        name: Name of a device in the table or of a calibrated GPU, or "this" for the CUDA device of this machine. Also
            a product name as nvidia-smi prints it ("NVIDIA A100-SXM4-80GB"), or the memory size of any GPU ("48GiB").

    Raises:
        ConfigError: If the name is no text, no device matches it, or the file of calibration records is damaged.
        DeviceUnavailable: If `name` is "this" and there is no CUDA device.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"device={name!r}; give the name of a device, such as 'h100', or 'this' for the GPU of this machine"
        )
    wanted = name_this_device() if name.lower() == "this" else name.lower()
    device = look_up_device(wanted) or look_up_device(_match_product(wanted)) or _make_unknown_card(wanted)
    if device is None:
        known = sorted({*DEVICES, *_read_records()})
        hint = suggest_word(name, [*known, "this"])
        calibrate = "; `headway estimate --calibrate` on its machine adds it" if name.lower() == "this" else ""
        raise ConfigError(f"device={wanted!r} is not in the table{hint or ''}; it has {', '.join(known)}{calibrate}")
    return device


def look_up_device(name: str) -> Device | None:
    """Return the device with this name, or None if the name is unknown.

    If the device has been calibrated, the calibrated overhead takes precedence over the table.

    Raises:
        ConfigError: If the file of calibration records is damaged.
    """
    known, record = DEVICES.get(name), _read_records().get(name)
    if record is None:
        return known
    # CUDA loads a kernel at its first use, so the kernels that load after the calibration are added to the upper bound.
    overhead = MemoryRange(record.overhead, record.overhead, record.overhead + _LATE_KERNEL_BYTES)
    cublas = _CUBLAS_BYTES_HOPPER if record.capability >= (9, 0) else _CUBLAS_BYTES_AMPERE
    if record.kept:
        cublas = record.kept // 2  # the calibration used cuBLAS in two threads: one for forward, one for backward
    rates = known.rates if known is not None else _UNKNOWN_RATES
    processors = known.processors if known is not None else _ASSUMED_PROCESSORS
    return Device(name, record.memory, record.capability, overhead, cublas, record.source, rates, processors)


def _match_product(text: str) -> str:
    """Return the longest device name in the table whose words all occur in a product name, or "" if there is none.

    Args:
        text: Product name in lower case, such as "nvidia a100-sxm4-80gb".
    """
    words = set(re.findall(r"[a-z0-9]+", text))
    return max((name for name in DEVICES if set(name.split("-")) <= words), key=len, default="")


def _make_unknown_card(text: str) -> Device | None:
    """Return a generic GPU of the Ampere generation with the memory size in a text such as "48gib".

    Return None if the text is not a memory size.
    """
    if not re.fullmatch(r"[0-9.]+ *[kmgt]?i?b", text):
        return None
    generic = _make_assumed(text, 0, (8, 0), _UNKNOWN_RATES, _ASSUMED_PROCESSORS)
    return replace(generic, memory=parse_bytes(text), source=_SOURCE_UNKNOWN_GPU)


def _read_records() -> dict[str, calibration.CalibrationRecord]:
    """Return the user's calibration records, by name of the device."""
    return calibration.read_records(calibration.locate_records(env.copy_variables()))


def name_this_device() -> str:
    """Return the name of this machine's CUDA device.

    Raises:
        DeviceUnavailable: If there is no CUDA device.
    """
    properties = calibration.read_device_properties()
    return name_card(properties.product, properties.memory)


def name_card(product: str, memory: int) -> str:
    """Return the device name of a GPU: the matching name in the table, or else one derived from its product name.

    A name in the table matches if its words occur in the product name and its memory size is about `memory`.

    Args:
        product: Product name as reported by the driver, such as "NVIDIA A100-SXM4-80GB".
        memory: Bytes of the GPU's memory.
    """
    words = re.findall(r"[a-z0-9]+", product.lower())
    # Names in the table can end in a memory size, such as "a100-40gb". Product names do not always contain it.
    size_words = {f"{size}gb" for size in (16, 32, 40, 80) if _has_about(memory, size * GIB)}
    fitting = [
        name
        for name, device in DEVICES.items()
        if device.memory and set(name.split("-")) <= {*words, *size_words} and _has_about(memory, device.memory)
    ]
    if fitting:
        return max(fitting, key=len)
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


def _has_about(memory: int, expected: int) -> bool:
    """Whether a memory size differs from the expected one by at most `_MEMORY_TOLERANCE` of the expected one. Both are in bytes."""
    return abs(memory - expected) <= _MEMORY_TOLERANCE * expected


def resolve_budget(device: Device, budget: int | str | None) -> int | None:
    """Return the bytes that a run, including its CUDA context, can use on the device, or None if no limit is known.

    Args:
        device: Device to forecast for.
        budget: Limit in bytes, or text such as "24GiB". Decimal units are powers of 1000, binary ones of 1024. None:
            all of the device's memory, if it is known.

    Raises:
        ConfigError: If the budget is not a size, or is negative.
    """
    return device.memory if budget is None else parse_bytes(budget)


def estimate_use(device: Device, reserved: int) -> MemoryRange:
    """Return the bytes that a process uses on a device if its allocator has reserved `reserved` bytes.

    On a GPU, the result includes the CUDA context and libraries. Only the upper bound also includes a margin.

    Args:
        device: Device to forecast for.
        reserved: Bytes that the allocator has reserved.
    """
    if not device.is_cuda:
        return MemoryRange(reserved, reserved, reserved)
    overhead, margin = device.overhead, max(int(reserved * MARGIN), MIN_MARGIN_BYTES)
    return MemoryRange(reserved + overhead.least, reserved + overhead.likely, reserved + overhead.most + margin)


def compute_allocator_limit(device: Device, budget: int) -> int:
    """Return the bytes that the allocator can reserve before the process might exceed its budget.

    At this limit, the upper bound of the process's memory equals the budget. The result is negative if the budget is
    too small for the overhead.

    Args:
        device: Device to forecast for.
        budget: Bytes that the whole process may use.
    """
    if not device.is_cuda:
        return budget
    available = budget - device.overhead.most
    return min(int(available / (1 + MARGIN)), available - MIN_MARGIN_BYTES)
