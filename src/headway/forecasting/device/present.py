"""The device that a script runs on, as a target of its forecasts, and the memory that it has left for the script."""

from dataclasses import replace

import torch

from headway.errors import UnsupportedError
from headway.forecasting.device.devices import DEVICES, Device, find, look_up, name_of
from headway.memory.use import free_address_space, free_bytes
from headway.runtime.device import Hardware

_USABLE = 0.75
"""Of an address space: the C library's heap breaks into pieces. 0.73 to 0.87 were measured (benchmarks/forecast/search.py)."""
_LIKE = {8: "a100-40gb", 9: "h100"}
"""By the capability's first number: whose assumed overhead and whose workspaces a card gets that is not in the table."""


def present_device(hardware: Hardware, device: torch.device) -> Device:
    """The target that this device is: its own memory and capability, with the overhead of the table's entry for it.

    Raises:
        UnsupportedError: it is neither a CPU nor a device of CUDA's.
    """
    if hardware.kind == "cpu":
        return find("cpu")
    if hardware.kind != "cuda":
        raise UnsupportedError(
            f"memory cannot be forecast for a device of kind {hardware.kind!r}: the model of the allocator is CUDA's. Give device=, "
            "with a device listed in docs/forecast.md"
        )
    properties = hardware.module.get_device_properties(device)
    capability = (int(properties.major), int(properties.minor))
    product, memory = str(hardware.module.get_device_name(device)), int(properties.total_memory)
    known = look_up(name_of(product, memory))
    if known is not None:
        return replace(known, memory=memory, capability=capability)
    like = DEVICES[_LIKE.get(capability[0], "h100" if capability[0] > 9 else "t4")]
    source = f"{like.source}; {product} is not in the table"
    return replace(like, name=product, memory=memory, capability=capability, source=source)


def memory_left(hardware: Hardware, device: torch.device, target: Device, held: int) -> int | None:
    """Bytes that a training may take here, its own overhead included, as a forecast's budget; None: no limit is known.

    Args:
        hardware: what kind of device.
        device: which one.
        target: the same, as a target.
        held: bytes of the model's tensors that are there already, and that the forecast counts.
    """
    if hardware.kind == "cpu":
        free = free_address_space()
        return None if free is None else int(free * _USABLE) + held
    module = hardware.module
    taken = int(module.memory_reserved(device)) - max(0, int(module.memory_allocated(device)) - held)
    # The context is there where anything is reserved, and was left room for where nothing is.
    return free_bytes(hardware, device) + taken + target.overhead[0]
