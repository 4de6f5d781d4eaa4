"""Copy loaded values to devices from several threads.

A single copy from pageable memory or from a mapped file is only as fast as one CPU core can move the bytes to memory
that the device can read. In this module, each thread moves blocks of 4 MiB into a pinned buffer, from which the device
copies them.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from headway.common.task_threads import TaskThreads
from headway.core.runtime.copy_stream import allocate_pinned
from headway.core.weights.tensor_bytes import is_in_order, view_bytes

_BLOCK = 4 * 2**20
"""Size of each thread's pinned buffer in bytes."""
_LARGE = 2**20
"""Smallest size in bytes of a tensor that is copied in blocks."""
_NUM_THREADS = 4

Pair = tuple[torch.Tensor, torch.Tensor]
"""Pair of (target tensor, saved values) with equal shapes."""


def copy_pairs(pairs: Iterable[Pair], copy_one: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Copy saved values into tensors. Large copies to devices are made by several threads.

    Args:
        pairs: Pairs of (target, saved values).
        copy_one: Function that makes a single copy in the calling thread. It is called for all pairs that are not large
            copies to a device.

    Raises:
        RuntimeError: If a copy fails. Other pairs might have been copied.
    """
    copier: BlockCopier | None = None
    try:
        for target, values in pairs:
            if values.nbytes < _LARGE or not can_copy_in_blocks(target, values):
                copy_one(target, values)
                continue
            if copier is None:
                copier = BlockCopier()
                copier.__enter__()
            copier.copy(target, values)
    except BaseException as error:
        if copier is not None:
            copier.__exit__(type(error), error, None)
        raise
    if copier is not None:
        copier.__exit__(None, None, None)


def move_state(state: dict[Any, Any], devices: dict[Any, torch.device]) -> None:
    """Replace large tensors of an optimizer's state dict by copies on the devices of their parameters.

    Only contiguous CPU tensors of at least 1 MiB are replaced. Nothing is copied to a device that shares the host's
    memory (CPU or MPS), or to the meta device.

    Args:
        state: The entry "state" of the state dict, keyed by the parameter's number. It is changed in place.
        devices: Device of each parameter, keyed by its number.
    """
    pairs: list[Pair] = []
    for number, values in state.items():
        device = devices.get(number)
        if device is None or not isinstance(values, dict):
            continue
        for key, value in values.items():
            if type(value) is torch.Tensor and _is_large(value) and _has_own_memory(device):
                copy = torch.empty(value.shape, dtype=value.dtype, device=device)
                pairs.append((copy, value))
                values[key] = copy
    copy_pairs(pairs, _copy_values)


def _copy_values(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)


def can_copy_in_blocks(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `BlockCopier` can copy `values` to `target`, and is faster than a single copy."""
    return (
        target.dtype == values.dtype
        and target.shape == values.shape
        and _has_own_memory(target.device)
        and is_in_order(target)
        and _is_large(values)
    )


def _is_large(values: torch.Tensor) -> bool:
    """Whether copying values from host memory in blocks, on several threads, is worth it and possible."""
    return values.device.type == "cpu" and values.nbytes >= _LARGE and is_in_order(values)


def _has_own_memory(device: torch.device) -> bool:
    """Whether a device has its own memory, to which it can copy from pinned host memory.

    MPS devices share the host's memory, and can be used by one thread only.
    """
    return device.type not in ("cpu", "mps", "meta")


class BlockCopier:
    """Context manager with threads that copy values to devices. All copies are complete on exit."""

    def __init__(self) -> None:
        self._threads = TaskThreads(_NUM_THREADS, "headway-copy", 4 * _NUM_THREADS)
        self._local = threading.local()
        self._synchronized_devices: set[torch.device] = set()

    def __enter__(self) -> "BlockCopier":
        self._threads.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        self._threads.__exit__(kind, error, at)

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Start to copy values for which `can_copy_in_blocks` is True. The copy is complete when the context exits.

        Args:
            target: Tensor to fill.
            values: Values in host memory.
        """
        if target.device.type != "cpu" and target.device not in self._synchronized_devices:
            # Earlier work on the device might still read or write the target. The threads copy on another stream.
            torch.accelerator.current_stream(target.device).synchronize()
            self._synchronized_devices.add(target.device)
        target_bytes, source_bytes = view_bytes(target), view_bytes(values)
        for start in range(0, source_bytes.numel(), _BLOCK):
            end = min(source_bytes.numel(), start + _BLOCK)
            self._threads.submit(partial(self._copy_block, target_bytes[start:end], source_bytes[start:end]))

    def _copy_block(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a block of bytes from host memory to a device, through this thread's pinned memory.

        Args:
            target: Bytes on the device.
            source: Bytes in host memory, at most `_BLOCK` of them.
        """
        if target.device.index is not None:
            torch.accelerator.set_device_index(target.device.index)  # a new thread would create a context on device 0
        staging: torch.Tensor | None = getattr(self._local, "staging", None)
        if staging is None:
            try:
                staging = allocate_pinned(_BLOCK)
            except RuntimeError:  # no memory can be pinned
                staging = torch.empty(_BLOCK, dtype=torch.uint8)
            self._local.staging = staging
        part = staging[: source.numel()]
        part.copy_(source)
        target.copy_(part)
