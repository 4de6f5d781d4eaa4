"""Moving a module to another device without replacing its parameter objects.

An optimizer that was created before the move therefore still refers to the module's parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.core.runtime._torch import has_compatible_shallow_copy_type


def move_module(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module without replacing its parameter objects. Tied parameters stay tied.

    `torch.nn.Module.to` replaces a parameter's data in place only on device types that torch's source lists (CPU, CUDA,
    XPU, MPS, HPU and similar). On a device type that a package registers, it creates new parameters, and an existing
    optimizer keeps the old ones. On such a device type, this function therefore swaps the contents of the old and new
    parameters (`torch.utils.swap_tensors`).

    Args:
        module: Module to move.
        device: Target device.

    Raises:
        RuntimeError: If a parameter cannot be swapped, because a weak reference or an autograd graph holds it.
    """
    here = next(iter(module.parameters()), None)
    with _swap_contents(here is not None and not _can_take_data_of(here.device, device)):
        module.to(device)


def _can_take_data_of(old: torch.device, new: torch.device) -> bool:
    """Whether the data of a tensor on device `old` can be replaced in place by data on device `new`."""
    made = (torch.empty(0, device=device) for device in (old, new))
    return old.type == new.type or has_compatible_shallow_copy_type(*made)


@contextmanager
def _swap_contents(is_on: bool) -> Iterator[None]:
    was_on = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(was_on or is_on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_on)
