"""Checks for tensors that processes cannot synchronize: expanded buffers and parameters, lazy parameters.

Several elements of an expanded tensor share memory, so that it cannot be written in a collective. Expanded buffers are
copied. Expanded and lazy parameters raise an error.
"""

import torch
from torch.nn.parameter import is_lazy

from headway.errors import PrepareError


def check_odd_tensors(model: torch.nn.Module) -> None:
    """Copy expanded buffers into contiguous memory, and raise an error for lazy tensors and expanded parameters.

    Raises:
        PrepareError: If a parameter or buffer of a lazy module has no shape yet, or if elements of a parameter share
            memory.
    """
    name = type(model).__name__
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [key for key, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise PrepareError(
            f"{', '.join(lazy[:3])} of {name} belong to lazy modules and have no shape yet, so that several processes "
            "cannot share them: run one forward before prepare(), with the same seed on all ranks"
        )
    expanded = [key for key, parameter in model.named_parameters() if _is_expanded(parameter)]
    if expanded:
        raise PrepareError(
            f"elements of {', '.join(expanded[:3])} of {name} share memory (expand() makes such tensors), so that no optimizer "
            "can change them; before prepare(): parameter.data = parameter.data.contiguous()"
        )
    for module in model.modules():
        for key, buffer in module._buffers.items():  # assigned there, a buffer keeps its persistence
            if buffer is not None and _is_expanded(buffer):
                module._buffers[key] = buffer.contiguous()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor share memory, as in the result of `expand()`."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))
