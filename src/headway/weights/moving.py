"""A module moved to a device as the same parameters, so that an optimizer made before goes on holding them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the same objects, and tied ones stay tied.

    torch's `module.to` gives a parameter new data in place only on kinds of device that it lists in its own source (CPU, CUDA,
    XPU, MPS, HPU and their like). On one that a package registers it makes new parameters: an optimizer made before keeps
    the old ones. There the contents are exchanged instead (`torch.utils.swap_tensors`).

    Raises:
        RuntimeError: a parameter cannot be exchanged, because a weak reference or a graph that was not run back holds it.
    """
    here = next(iter(module.parameters()), None)
    with _exchanged(here is not None and not _takes_data_of(here.device, device)):
        module.to(device)


def _takes_data_of(old: torch.device, new: torch.device) -> bool:
    """Can a tensor of the one device be given data on the other in place?"""
    made = (torch.empty(0, device=device) for device in (old, new))
    return old.type == new.type or torch._has_compatible_shallow_copy_type(*made)


@contextmanager
def _exchanged(is_on: bool) -> Iterator[None]:
    was_on = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(was_on or is_on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_on)
