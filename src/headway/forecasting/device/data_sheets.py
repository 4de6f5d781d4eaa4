"""Table of the peak rates of GPUs in matrix products, as their manufacturers publish them.

The memory of each GPU is in `headway.forecasting.device.devices`.

Rates are for dense products, without structured sparsity. Products in half precision accumulate in float32. The sources
of the TFLOP/s are:

- NVIDIA data sheets of T4 (2019), V100 (2020), A10G, A100, A30, A40 (2021), L4, L40, L40S, H100 (2023), H200, B100
  (2024) and the HGX data sheet for B200 (2025). If a sheet has only the rate "with sparsity", the table has half of
  that rate.
- NVIDIA white papers on the GA102 (2021), Ada (2023) and RTX Blackwell (2025) GPUs, for GeForce RTX 3090, 4090 and
  5090, and RTX A6000.
- AMD data sheets of Instinct MI210 and MI250X (2022), MI300X (2023) and MI325X (2024). AMD GPUs before MI300 have no
  TF32.
"""

from typing import NamedTuple


class PeakTeraflops(NamedTuple):
    """Peak TFLOP/s of a GPU in matrix products, by number format. None if the GPU has no hardware for the format.

    Attributes:
        bf16: In bfloat16, accumulated in float32.
        fp16: In float16, accumulated in float32.
        tf32: In float32 with TF32 enabled.
        fp32: In float32 without TF32.
    """

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float


_TABLE: dict[str, tuple[float | None, float | None, float | None, float]] = {
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
    "MI250X": (191.5, 191.5, None, 47.85),  # one of its two dies, which torch lists as two devices
    "MI210": (181.0, 181.0, None, 45.3),
}
"""Rows of `DATA_SHEETS`, as TFLOP/s in bf16, fp16, tf32 and fp32."""

DATA_SHEETS = {name: PeakTeraflops(*row) for name, row in _TABLE.items()}
"""Peak TFLOP/s of each GPU, by a part of the device's name.

The first key that the device's name contains is used, so longer names precede their prefixes.
"""
