"""Describe the device of the running script as the target of its forecasts, and measure its available memory."""

from dataclasses import replace

import torch

from headway.core.memory.use import read_free_address_space, read_free_bytes
from headway.core.runtime.device import Hardware
from headway.errors import UnsupportedError
from headway.forecasting.device.devices import DEVICES, Device, find_device, look_up_device, name_card

_USABLE = 0.75
"""Usable fraction of a limited address space (`ulimit -v`). It is below 1 because the C library's heap fragments.

In measurements, the fraction was 0.73 to 0.87 (benchmarks/forecast/search.py).
"""
_SIMILAR_DEVICES = {8: "a100-40gb", 9: "h100"}
"""Name of a device in the table, by major compute capability.

A forecast for a GPU that is not in the table uses this device's overhead and workspaces.
"""


def describe_local_device(hardware: Hardware, device: torch.device) -> Device:
    """Return the description of a device of this machine, as the device that a forecast is for.

    Memory and compute capability are those of the device itself. The overhead is that of its entry in the table of
    devices. For a GPU without an entry, a similar GPU's overhead is used.

    Args:
        hardware: Functions of the device type.
        device: Device to describe.

    Raises:
        UnsupportedError: If the device is neither a CPU nor a CUDA device.
    """
    if hardware.kind == "cpu":
        return find_device("cpu")
    if hardware.kind != "cuda":
        raise UnsupportedError(
            f"memory cannot be forecast for a device of kind {hardware.kind!r}: only CUDA's allocator is modeled. Give device=, with "
            "a device listed in docs/forecast.md"
        )
    properties = hardware.module.get_device_properties(device)
    capability = (int(properties.major), int(properties.minor))
    product, memory = str(hardware.module.get_device_name(device)), int(properties.total_memory)
    table_entry = look_up_device(name_card(product, memory))
    if table_entry is not None:
        return replace(table_entry, memory=memory, capability=capability)
    major, _ = capability
    default_name = "h100" if major > 9 else "t4"
    similar = DEVICES[_SIMILAR_DEVICES.get(major, default_name)]
    source = f"{similar.source}; {product} is not in the table"
    return replace(similar, name=product, memory=memory, capability=capability, source=source)


def measure_budget(hardware: Hardware, device: torch.device, target: Device, tensor_bytes: int) -> int | None:
    """Return the bytes that training can use on a device, or None if no limit is known.

    The bytes include the process's overhead, such as its CUDA context.

    Args:
        hardware: Functions of the device type.
        device: Device to measure.
        target: Description of `device` as the device that a forecast is for.
        tensor_bytes: Bytes of the training's tensors that are already allocated. They count as usable, because the forecast
            includes these tensors.
    """
    if hardware.kind == "cpu":
        free = read_free_address_space()
        return None if free is None else int(free * _USABLE) + tensor_bytes
    module = hardware.module
    allocated_by_others = max(0, int(module.memory_allocated(device)) - tensor_bytes)
    reusable = int(module.memory_reserved(device)) - allocated_by_others
    # The overhead is added because the free bytes do not contain it. If anything is reserved, the context exists and
    # already takes its memory. If not, `read_free_bytes` has left room for the context.
    return read_free_bytes(hardware, device) + reusable + target.overhead.least
