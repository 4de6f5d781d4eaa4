"""Describe the device of the running script as the target of its forecasts, and measure its available memory."""

from dataclasses import replace

import torch

from headway.core.memory.use import read_free_address_space, read_free_bytes
from headway.core.runtime.device import Hardware
from headway.errors import UnsupportedError
from headway.forecasting.device.devices import DEVICES, Device, find_device, look_up_device, name_card

_USABLE = 0.75
"""Usable fraction of a limited address space (`ulimit -v`), because the C library's heap fragments.

0.73 to 0.87 were measured (benchmarks/forecast/search.py).
"""
_LIKE = {8: "a100-40gb", 9: "h100"}
"""Name of a device in the table, by major compute capability.

A GPU outside of the table uses the overhead and the workspaces of this device.
"""


def describe_present_device(hardware: Hardware, device: torch.device) -> Device:
    """Return the description of a device of this machine as a forecast's target.

    Memory and compute capability are the device's own. The overhead is that of its entry in the table of devices.

    Raises:
        UnsupportedError: If the device is neither a CPU nor a CUDA device.
    """
    if hardware.kind == "cpu":
        return find_device("cpu")
    if hardware.kind != "cuda":
        raise UnsupportedError(
            f"memory cannot be forecast for a device of kind {hardware.kind!r}: the model of the allocator is CUDA's. Give device=, "
            "with a device listed in docs/forecast.md"
        )
    properties = hardware.module.get_device_properties(device)
    capability = (int(properties.major), int(properties.minor))
    product, memory = str(hardware.module.get_device_name(device)), int(properties.total_memory)
    known = look_up_device(name_card(product, memory))
    if known is not None:
        return replace(known, memory=memory, capability=capability)
    like = DEVICES[_LIKE.get(capability[0], "h100" if capability[0] > 9 else "t4")]
    source = f"{like.source}; {product} is not in the table"
    return replace(like, name=product, memory=memory, capability=capability, source=source)


def measure_budget(hardware: Hardware, device: torch.device, target: Device, held: int) -> int | None:
    """Return the bytes that training may use on a device, or None if no limit is known.

    The overhead of the process, such as its CUDA context, is included.

    Args:
        hardware: Functions of the device type.
        device: Device to measure.
        target: Description of `device` as a forecast's target.
        held: Bytes of the model's tensors that are already allocated and that the forecast counts as well.
    """
    if hardware.kind == "cpu":
        free = read_free_address_space()
        return None if free is None else int(free * _USABLE) + held
    module = hardware.module
    taken = int(module.memory_reserved(device)) - max(0, int(module.memory_allocated(device)) - held)
    # The overhead is added back: the context exists if anything is reserved, and `read_free_bytes` leaves room for it if not.
    return read_free_bytes(hardware, device) + taken + target.overhead[0]
