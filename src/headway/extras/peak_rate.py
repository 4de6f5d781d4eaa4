"""Peak FLOP/s of a device: the manufacturer's value, or else the speed of matrix products that are measured.

The manufacturer's value is that for dense matrix products (`forecasting/device/data_sheets.py`). A device that is not in
that table, such as any CPU, is measured by products of square matrices. The fastest product gives a lower bound of the
peak. Fractions of a measured peak are comparable on one machine only. `PeakRate.source` distinguishes the two cases.
"""

import time

import torch

from headway.core.runtime.device import HARDWARE
from headway.core.training.interfaces import PeakRate
from headway.forecasting.device.data_sheets import DATA_SHEETS

# Columns of `DATA_SHEETS` by dtype. float32 products can run in TF32, which has its own column.
_COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}
_TF32_COLUMN = 2


def look_up_peak(name: str, dtype: torch.dtype, uses_tf32: bool = False) -> PeakRate | None:
    """Return the peak FLOP/s that the manufacturer states for a device.

    Return None if the device or the dtype is not in the table.

    Args:
        name: Device name as the driver reports it, for example "NVIDIA H100 80GB HBM3".
        dtype: dtype of the matrix products.
        uses_tf32: Whether float32 products run in TF32. Default: False.
    """
    words = f" {name} ".replace("-", " ")
    for device_name, teraflops in DATA_SHEETS.items():
        # Whole words: an "L4" is no "L40", and an "A30" no "A300".
        if f" {device_name.replace('-', ' ')} " not in words:
            continue
        column = _COLUMNS.get(dtype)
        if dtype == torch.float32 and uses_tf32 and teraflops[_TF32_COLUMN]:
            column = _TF32_COLUMN
        peak = None if column is None else teraflops[column]
        return None if peak is None else PeakRate(peak * 1e12, f"stated for {device_name}")
    return None


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> PeakRate:
    """Measure a device's peak FLOP/s: the highest speed that it reaches in several products of square matrices.

    Args:
        device: Device to measure.
        dtype: dtype of the matrices.
        seconds: Approximate duration of the measurement. At least three products are computed. Default: 0.3.
    """
    synchronize = HARDWARE[device.type].synchronize
    size = 1024 if device.type == "cpu" else 4096
    # A separate generator: draws from the global one would change the run's dropout masks and sample order.
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(size, size, generator=generator).to(device, dtype)
    right = torch.randn(size, size, generator=generator).to(device, dtype)
    shortest, begin_time = float("inf"), time.perf_counter()
    num_products = 0
    while num_products < 3 or time.perf_counter() - begin_time < seconds:
        synchronize()
        product_time = time.perf_counter()
        left @ right
        synchronize()
        shortest = min(shortest, time.perf_counter() - product_time)
        num_products += 1
    return PeakRate(2.0 * size**3 / shortest, "measured")


def get_peak(device: torch.device, dtype: torch.dtype) -> PeakRate:
    """Return the device's peak FLOP/s for products of this dtype.

    The result is the manufacturer's value if known, otherwise a measured value.
    """
    get_name = None if device.type == "cpu" else HARDWARE[device.type].find_function("get_device_name")
    if get_name is not None:
        uses_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
        stated_peak = look_up_peak(get_name(device), dtype, uses_tf32)
        if stated_peak is not None:
            return stated_peak
    return measure_peak(device, dtype)
