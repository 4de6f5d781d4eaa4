"""Moving modules and parameters to another device without replacing the parameter objects.

An optimizer that was created before the move therefore still refers to the parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.core.runtime._torch import has_compatible_shallow_copy_type, is_traceable_wrapper_subclass


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
    parameter = next(iter(module.parameters()), None)
    must_swap = parameter is not None and not _can_replace_data(parameter.device, device)
    with _swap_contents(must_swap):
        module.to(device)


def move_parameter(parameter: torch.nn.Parameter, device: torch.device) -> None:
    """Move one parameter without replacing its object.

    Parameters of other packages' classes, such as bitsandbytes' quantized weights, are not moved, because their own
    `to` may do more than a move.

    Args:
        parameter: Plain parameter, or one whose class wraps several tensors, such as torchao's quantized weights.
        device: Target device.

    Raises:
        RuntimeError: If the parameter must be swapped (see `move_module`), but a weak reference or an autograd graph
            holds it.
    """
    is_wrapper = is_traceable_wrapper_subclass(parameter)
    if parameter.device == device or not (is_wrapper or type(parameter) is torch.nn.Parameter):
        return
    moved = parameter.detach().to(device)
    if is_wrapper or not _can_replace_data(parameter.device, device):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(moved, parameter.requires_grad))  # type: ignore[no-untyped-call]
    else:
        parameter.data = moved


def _can_replace_data(old: torch.device, new: torch.device) -> bool:
    """Whether the data of a tensor on device `old` can be replaced in place by data on device `new`."""
    if old.type == new.type:
        return True
    return has_compatible_shallow_copy_type(torch.empty(0, device=old), torch.empty(0, device=new))


@contextmanager
def _swap_contents(must_swap: bool) -> Iterator[None]:
    """Return a context in which `Module.to` swaps the contents of old and new parameters.

    Args:
        must_swap: Whether to swap. If False, the setting of the program applies.
    """
    previous = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(previous or must_swap)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(previous)
