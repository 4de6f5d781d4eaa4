"""Move batches to a device from pinned memory on a side stream, so that neither host nor device has to wait::

    host      fetch 1, queue copy 1 and step 1    fetch 2, queue copy 2 and step 2
    side                  [copy 1]                            [copy 2]
    compute                       [step 1 ..............................][step 2 ...

A copy does not wait for computation that is queued on the device. Computation on the batch waits for the copy, without
blocking the host. If a type of device has no second stream or no pinned memory, copies block the host as `tensor.to`
does.
"""

from typing import Any

import torch

from headway.core.runtime.collectives.tree import Tree, can_move_itself, map_leaves, move_object, to_device


class BlockingTransfer:
    """Callable that moves a batch to a device and blocks the host during each copy.

    Args:
        device: Target device.

    Attributes:
        is_faster_when_pinned: Whether batches in pinned memory are moved faster. Always False.
    """

    is_faster_when_pinned = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batch: Tree) -> Tree:
        """Return the batch with all tensors on the device. The input batch is not changed."""
        return to_device(batch, self._device)


class SideStreamTransfer:
    """Callable that copies a batch from pinned memory on a side stream. The current stream waits for the copies.

    Objects with their own `to` method are moved on the current stream, because the tensors in them are unknown.

    Args:
        device: Target device.
        are_pinned_tensors_copies: Whether tensors that arrive in pinned memory were created for this batch. Otherwise
            they may be buffers of the dataset that the next batch overwrites, so the host waits for their copies (but
            not for the queued computation).

    Attributes:
        is_faster_when_pinned: Whether batches in pinned memory are moved faster. Always True.
    """

    is_faster_when_pinned = True

    def __init__(self, device: torch.device, are_pinned_tensors_copies: bool) -> None:
        self._device = device
        self._are_pinned_tensors_copies = are_pinned_tensors_copies
        self._stream = torch.Stream(device=device)

    def __reduce__(self) -> tuple[type["SideStreamTransfer"], tuple[torch.device, bool]]:
        # A stream cannot be pickled to another process.
        return SideStreamTransfer, (self._device, self._are_pinned_tensors_copies)

    def __call__(self, batch: Tree) -> Tree:
        """Return the batch on the device, ready for the next operation on the current stream."""
        copies: list[torch.Tensor] = []
        may_reuse_source = has_other_movable = False

        def copy_leaf(leaf: Any) -> Any:
            nonlocal may_reuse_source, has_other_movable
            if not _is_plain_cpu_tensor(leaf):
                has_other_movable |= isinstance(leaf, torch.Tensor) or can_move_itself(leaf)
                return leaf
            is_pinned = leaf.is_pinned()
            may_reuse_source |= is_pinned and not self._are_pinned_tensors_copies
            pinned = leaf if is_pinned else leaf.pin_memory()
            copies.append(pinned.to(self._device, non_blocking=True))
            return copies[-1]

        with self._stream:
            batch = map_leaves(copy_leaf, batch, can_move_itself)
        if copies:
            current_stream = torch.accelerator.current_stream(self._device)
            current_stream.wait_stream(self._stream)
            for tensor in copies:
                # The memory was allocated on the side stream, which may reuse it only after the current stream has
                # finished with it.
                tensor.record_stream(current_stream)
        if may_reuse_source:
            self._wait_for_copies()
        return map_leaves(self._move_other_leaf, batch, can_move_itself) if has_other_movable else batch

    def _wait_for_copies(self) -> None:
        """Block the host until the copies on the side stream are complete."""
        copies_done = torch.Event(device=self._device)
        copies_done.record(self._stream)
        if not copies_done.query():
            copies_done.synchronize()

    def _move_other_leaf(self, leaf: Any) -> Any:
        """Move a leaf that is not a plain CPU tensor to the device, on the current stream."""
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._device)  # sparse, nested or a subclass; most are on the device already
        if not can_move_itself(leaf):
            return leaf
        pin_memory = getattr(leaf, "pin_memory", None)
        if not callable(pin_memory):
            return move_object(leaf, self._device, non_blocking=False)
        return move_object(pin_memory(), self._device, non_blocking=True)


DeviceTransfer = BlockingTransfer | SideStreamTransfer
"""Callable that moves a batch to a device. It may return the batch while the copy is still running."""


def _is_plain_cpu_tensor(leaf: Any) -> bool:
    """Whether a leaf is a dense CPU tensor and of no subclass, so that it can be copied through pinned memory."""
    return type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout is torch.strided


def make_transfer(
    device: torch.device | None, non_blocking: bool | None, are_pinned_tensors_copies: bool = False
) -> DeviceTransfer | None:
    """Return the callable that moves batches to a device, or None if nothing has to be moved.

    To find out what the device supports, this function copies one small tensor to it.

    Args:
        device: Target device; None or the CPU to leave batches where they are.
        non_blocking: None or True to copy without blocking the host, if the device supports it. False to block for each
            copy.
        are_pinned_tensors_copies: Whether tensors that arrive in pinned memory were created for this batch, so that the
            host need not wait for their copies. Default: False.
    """
    if device is None or device.type == "cpu":
        return None
    if non_blocking is not False:
        try:
            transfer = SideStreamTransfer(device, are_pinned_tensors_copies)
            transfer(torch.ones(1))
            return transfer
        except (RuntimeError, AttributeError, TypeError):
            pass  # no second stream, pinned memory or record_stream: use the blocking transfer
    return BlockingTransfer(device)
