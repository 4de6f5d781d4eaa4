"""Checksums of tensors: the sum of their values' bits, which shows whether values differ or have changed."""

from collections.abc import Sequence

import torch

from headway.core.memory.oom import is_out_of_memory
from headway.core.training._torch import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes, as which the bits of floating-point values are read."""
_CHUNK_SIZE = 1 << 22
"""Elements of a parameter that are processed at once, to limit the memory of temporary results."""


def has_bits(parameter: torch.Tensor) -> bool:
    """Whether a parameter's own storage holds its values, so that they have a checksum.

    False for meta tensors, quantized and sparse tensors, and tensors that consist of other tensors.
    """
    is_plain = parameter.layout is torch.strided and not parameter.is_quantized and not parameter.is_meta
    return is_plain and not is_traceable_wrapper_subclass(parameter)


def try_checksums(parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """Return a checksum of each parameter, or None if memory runs out.

    No error is raised then, because a check should not end a run, and a rank that raised would make the others wait.
    """
    try:
        return compute_checksums(parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def compute_checksums(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the sum of each parameter's bits, read as integers. One value is read from each device."""
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        for chunk in split_values(parameter):
            integers = chunk.view(_INTEGERS[chunk.element_size()]) if chunk.is_floating_point() else chunk
            sums.setdefault(chunk.device, []).append((index, integers.sum(dtype=torch.int64)))
    checksums = [0] * len(parameters)
    for device_sums in sums.values():
        values = torch.stack([each for _, each in device_sums]).tolist()
        for (index, _), value in zip(device_sums, values):
            checksums[index] += value
    return checksums


def split_values(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a parameter's values as a list of flat chunks, to limit the memory of computations on them."""
    detached = parameter.detach()
    real = torch.view_as_real(detached) if detached.is_complex() else detached
    return torch.split(real.reshape(-1), _CHUNK_SIZE) if real.numel() else ()
