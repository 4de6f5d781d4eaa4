"""Peak FLOP/s of a device: what its maker states for dense matrix products, or what a product on it reaches.

What makers state is in `forecasting/device/rates.py`. A kind that is not in the table, such as any CPU, is measured: the fastest of
several products of square matrices, which is a lower bound of its peak. Shares of it are comparable on one machine only, and
`Peak.source` says so.
"""

import time
from dataclasses import dataclass

import torch

from headway.forecasting.device.rates import DATA_SHEETS
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
    for known, figures in DATA_SHEETS.items():
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
