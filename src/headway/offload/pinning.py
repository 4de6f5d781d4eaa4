"""Homes in pinned memory: weights that a device copies from by itself, where the ring would copy them once more on the way."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from headway import env
from headway.log import get_logger
from headway.placement.budget import available_memory
from headway.units import format_bytes
from headway.weights.names import is_mapped

logger = get_logger(__name__)

ARENA = 1 << 30
"""The most bytes of one piece of pinned memory. torch rounds each up to a power of two, so pieces are powers of two."""
_ALIGNED = 256
_SHARE = 0.5


def pinnable(homes: Sequence[torch.Tensor]) -> int:
    """The most bytes to pin: half of what these homes and this process's part of the free memory are.

    Nobody else can have pinned memory, nor can it be swapped out. Homes in mapped files are free memory's to begin with.
    """
    own = sum(home.nbytes for home in homes if not is_mapped(home))
    return int((own + available_memory() // max(1, env.local_world_size())) * _SHARE)


def pin(homes: Sequence[torch.Tensor], limit: int, allocate: Callable[[int], torch.Tensor]) -> int:
    """Move tensors in host memory into pinned memory, the first ones where not all fit; returns the bytes that moved.

    They remain the same objects. Left where they are: what is not a plain contiguous tensor, or shares its memory with another.

    Args:
        homes: in the order of use.
        limit: bytes to pin at most.
        allocate: gives so many bytes of pinned memory, as uint8; where it raises RuntimeError, a warning says so, and the
            rest stays where it is.
    """
    unique = {id(home): home for home in homes}
    shared = _overlapping(unique.values())
    fit = [home for key, home in unique.items() if key not in shared and _fits(home)]
    moved = 0
    for num_bytes, part in arenas([home.nbytes for home in fit], limit):
        try:
            arena = allocate(num_bytes)
        except RuntimeError as error:
            logger.warning_once(
                "only %s of %s of offloaded weights could be pinned (%s); the others go through pinned buffers, "
                "which is slower",
                format_bytes(moved),
                format_bytes(sum(home.nbytes for home in fit)),
                error,
            )
            break
        offset = 0
        for index in part:
            home = fit[index]
            piece = arena[offset : offset + home.nbytes]
            piece.copy_(home.detach().view(-1).view(torch.uint8))
            home.data = piece.view(home.dtype).view(home.shape)
            offset += _aligned(home.nbytes)
            moved += home.nbytes
    return moved


def arenas(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, list[int]]]:
    """Pieces of memory for tensors of these sizes, as (bytes, which tensors), in order and `limit` bytes together.

    Each is the largest power of two that the rest fills, up to `ARENA`; a tensor that is larger gets one of its own.
    """
    needed = [_aligned(size) for size in sizes]
    index, rest = 0, sum(needed)
    while index < len(needed):
        num_bytes = max(min(_floor(rest), ARENA), _ceil(needed[index]))
        num_bytes = min(num_bytes, _floor(limit))
        part, room = [], num_bytes
        while index < len(needed) and needed[index] <= room:
            part.append(index)
            room -= needed[index]
            index += 1
        if not part:
            return
        rest -= num_bytes - room
        limit -= num_bytes
        yield num_bytes, part


def _overlapping(homes: Iterable[torch.Tensor]) -> set[int]:
    """The ids of tensors that share memory with another one."""
    found: set[int] = set()
    end, last = 0, None
    for home in sorted(homes, key=lambda home: home.data_ptr()):
        if last is not None and home.data_ptr() < end:
            found |= {id(home), id(last)}
        if home.data_ptr() + home.nbytes > end:
            end, last = home.data_ptr() + home.nbytes, home
    return found


def _fits(home: torch.Tensor) -> bool:
    is_plain = type(home) in (torch.Tensor, torch.nn.Parameter) and home.layout is torch.strided
    return is_plain and home.is_contiguous() and home.nbytes > 0 and not home.is_inference() and not home.is_quantized


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _floor(number: int) -> int:
    """The largest power of two that is not larger; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _ceil(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
