"""Move weights into pinned memory, from which an accelerator can copy directly."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from headway.common import env
from headway.common.task_threads import TaskThreads
from headway.common.text import format_bytes
from headway.core.runtime.pinned_memory import MAX_ARENA_BYTES, choose_num_threads
from headway.core.runtime.pinned_sizes import plan_arenas
from headway.core.weights.locations import is_mapped
from headway.log import get_logger
from headway.offload.placement.budget import measure_available_memory

logger = get_logger(__name__)

_SHARE = 0.5
"""Maximum fraction of the memory that is pinned."""


def compute_pin_limit(tensors: Sequence[torch.Tensor]) -> int:
    """Return the maximum number of bytes to pin.

    The limit is half of the memory that would be available without the tensors: their current memory plus an equal
    share of the machine's free memory for each process. A limit is needed because pinned memory is not available to
    other processes and cannot be swapped out. Tensors in mapped files are not added, because their memory already
    counts as free.

    Args:
        tensors: Tensors to be pinned.
    """
    own = sum(tensor.nbytes for tensor in tensors if not is_mapped(tensor))
    return int((own + measure_available_memory() // max(1, env.get_local_world_size())) * _SHARE)


def pin_tensors(tensors: Sequence[torch.Tensor], limit: int, allocate: Callable[[int], torch.Tensor]) -> int:
    """Move tensors from host memory into pinned memory, and return the number of bytes moved.

    Several threads pin arenas (blocks of 256 MiB) at the same time. A tensor's former memory is freed as soon as the
    tensor has been moved, so each thread needs only the memory of one more arena.

    If not all tensors fit, the first ones are moved. Tensor objects stay the same. Tensors that are not plain and
    contiguous, or that share memory with others, are not moved.

    Args:
        tensors: Tensors in the order of use.
        limit: Maximum number of bytes to pin.
        allocate: Function that allocates a given number of bytes of pinned memory, as a uint8 tensor. It is called by
            several threads. If it raises RuntimeError, a warning is logged and the remaining tensors are not moved.
    """
    unique = {id(tensor): tensor for tensor in tensors}
    shared = _find_overlapping(unique.values())
    fit = [tensor for key, tensor in unique.items() if key not in shared and _can_pin(tensor)]
    plan = list(plan_arenas([tensor.nbytes for tensor in fit], limit, MAX_ARENA_BYTES))
    if not plan:
        return 0
    progress = _PinProgress()
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    num_threads = min(len(plan), choose_num_threads())
    with TaskThreads(num_threads, "headway-pin", num_threads) as threads:
        for num_bytes, part in plan:
            here = [(fit[number], start) for number, start in part]
            threads.submit(partial(_pin_arena, num_bytes, here, allocate, index, progress))
        threads.wait()
    if progress.error is not None:
        logger.warning_once(
            "only %s of %s of offloaded weights could be pinned (%s); the rest is copied more slowly",
            format_bytes(progress.num_bytes),
            format_bytes(sum(tensor.nbytes for tensor in fit)),
            progress.error,
        )
    return progress.num_bytes


@dataclass
class _PinProgress:
    """Progress of the threads that pin memory.

    Attributes:
        num_bytes: Bytes moved so far.
        error: First error of an allocation, or None. After an error, no further memory is allocated.
        lock: Lock for changes to the two other attributes.
    """

    num_bytes: int = 0
    error: RuntimeError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _pin_arena(
    num_bytes: int,
    tensors: Sequence[tuple[torch.Tensor, int]],
    allocate: Callable[[int], torch.Tensor],
    device_index: int | None,
    progress: _PinProgress,
) -> None:
    """Allocate one pinned arena (a large block of memory), and move tensors into it. Runs in a thread.

    Args:
        num_bytes: Size of the arena in bytes.
        tensors: Pairs of a tensor and its offset in the arena in bytes.
        allocate: Function that allocates pinned memory.
        device_index: Index of the calling process's device, or None without an accelerator.
        progress: Progress of all threads, which is updated.
    """
    if progress.error is not None:
        return
    if device_index is not None:
        torch.accelerator.set_device_index(device_index)  # without this, a new thread creates a context on device 0
    try:
        arena = allocate(num_bytes)
    except RuntimeError as error:
        with progress.lock:
            progress.error = progress.error or error
        return
    for tensor, start in tensors:
        piece = arena[start : start + tensor.nbytes]
        piece.copy_(tensor.detach().view(-1).view(torch.uint8))
        tensor.data = piece.view(tensor.dtype).view(tensor.shape)
        with progress.lock:
            progress.num_bytes += tensor.nbytes


def _find_overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the `id` of each of the given tensors that shares memory with another one."""
    overlapping_ids: set[int] = set()
    end = 0  # largest end address of the tensors so far, and the tensor that ends there
    last: torch.Tensor | None = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.data_ptr()):
        if last is not None and tensor.data_ptr() < end:
            overlapping_ids |= {id(tensor), id(last)}
        if tensor.data_ptr() + tensor.nbytes > end:
            end, last = tensor.data_ptr() + tensor.nbytes, tensor
    return overlapping_ids


def _can_pin(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be moved into pinned memory by replacing its data. Subclasses of Tensor cannot."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return (
        is_plain
        and tensor.is_contiguous()
        and tensor.nbytes > 0
        and not tensor.is_inference()
        and not tensor.is_quantized
    )
