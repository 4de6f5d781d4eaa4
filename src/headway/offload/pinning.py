"""Homes in pinned memory: weights that a device copies from by itself, where the ring would copy them once more on the way."""

from collections.abc import Callable, Iterable, Sequence

import torch

from headway.common import env
from headway.common.text import format_bytes
from headway.log import get_logger
from headway.offload.placement.budget import available_memory
from headway.runtime.arenas import arenas
from headway.weights.names import is_mapped

logger = get_logger(__name__)

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
                "only %s of %s of offloaded weights could be pinned (%s); the rest goes through pinned buffers, "
                "which is slower",
                format_bytes(moved),
                format_bytes(sum(home.nbytes for home in fit)),
                error,
            )
            break
        for index, start in part:
            home = fit[index]
            piece = arena[start : start + home.nbytes]
            piece.copy_(home.detach().view(-1).view(torch.uint8))
            home.data = piece.view(home.dtype).view(home.shape)
            moved += home.nbytes
    return moved


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
