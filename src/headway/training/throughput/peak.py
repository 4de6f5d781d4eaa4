"""Peak FLOP/s of a device: what its maker states for dense matrix products, or what a product on it reaches.

Stated figures (dense: without structured sparsity; half-precision products add up in float32), in TFLOP/s:

- NVIDIA data sheets of T4 (2019), V100 (2020), A100, A30, A40 (2021), L4, L40, L40S, H100 (2023), H200 (2024); for B200 the
  HGX data sheet (2025). Where a sheet states only the figure "with sparsity", the half of it stands here.
- NVIDIA's white papers of the GA102 (2021) and Ada (2023) GPUs for GeForce RTX 3090 and 4090.
- AMD data sheets of Instinct MI210 and MI250X (2022), MI300X (2023), MI325X (2024). AMD has no TF32 before MI300.

A kind that is not in the table, such as any CPU, is measured: the fastest of several products of square matrices, which is a
lower bound of its peak. Shares of it are comparable on one machine only, and `Peak.source` says so.
"""

import time
from dataclasses import dataclass

import torch

from headway.runtime.device import HARDWARE


@dataclass(frozen=True)
class Peak:
    """The most a device computes.

    Attributes:
        flops_per_second: of one device.
        source: "stated" with the table's name of the device, "measured", or "given".
    """

    flops_per_second: float
    source: str


# name in the device's own name: (bf16, fp16, tf32, fp32); the first entry that fits counts. None: it has no such units.
_STATED: dict[str, tuple[float | None, float | None, float | None, float]] = {
    "B200": (2250.0, 2250.0, 1125.0, 75.0),
    "H200 NVL": (835.5, 835.5, 417.5, 60.0),
    "H200": (989.5, 989.5, 494.5, 67.0),
    "H100 NVL": (835.5, 835.5, 417.5, 60.0),
    "H100 PCIe": (756.5, 756.5, 378.0, 51.0),
    "H100": (989.5, 989.5, 494.5, 67.0),
    "A100": (312.0, 312.0, 156.0, 19.5),
    "A30": (165.0, 165.0, 82.0, 10.3),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "L40S": (362.1, 362.1, 183.0, 91.6),
    "L40": (181.0, 181.0, 90.5, 90.5),
    "L4": (121.0, 121.0, 60.0, 30.3),
    "T4": (None, 65.0, None, 8.1),
    "V100-PCIE": (None, 112.0, None, 14.0),
    "V100": (None, 125.0, None, 15.7),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 71.0, 35.6, 35.6),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
    "MI250X": (383.0, 383.0, None, 95.7),
    "MI210": (181.0, 181.0, None, 45.3),
}
_COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}
_TF32 = 2


def stated(name: str, dtype: torch.dtype, uses_tf32: bool = False) -> Peak | None:
    """What the table says of a device with this name; None where it is not in it, or has no units for the type.

    Args:
        name: as the driver gives it, "NVIDIA H100 80GB HBM3" say.
        dtype: of the matrix products.
        uses_tf32: float32 products run in TF32.
    """
    words = f" {name} ".replace("-", " ")
    for known, figures in _STATED.items():
        # Whole words: an "L4" is no "L40", and an "A30" no "A300".
        if f" {known.replace('-', ' ')} " in words:
            column = _TF32 if dtype == torch.float32 and uses_tf32 and figures[_TF32] else _COLUMNS.get(dtype)
            found = None if column is None else figures[column]
            return None if found is None else Peak(found * 1e12, f"stated for {known}")
    return None


def measured(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> Peak:
    """The fastest of several products of square matrices on the device, within about `seconds`."""
    synchronize = HARDWARE[device.type].synchronize
    size = 1024 if device.type == "cpu" else 4096
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, begun = float("inf"), time.perf_counter()
    num_done = 0
    while num_done < 3 or time.perf_counter() - begun < seconds:
        synchronize()
        start = time.perf_counter()
        left @ right
        synchronize()
        best = min(best, time.perf_counter() - start)
        num_done += 1
    return Peak(2.0 * size**3 / best, "measured")


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The device's peak for products of this type: stated where it is in the table, else measured."""
    tell = None if device.type == "cpu" else HARDWARE[device.type].ability("get_device_name")
    if tell is not None:
        uses_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
        found = stated(tell(device), dtype, uses_tf32)
        if found is not None:
            return found
    return measured(device, dtype)
