"""Batches on their way to a device: from pinned memory, on a stream of their own, so that neither host nor device stands still.

::

    host      fetch 1, queue copy 1 and step 1    fetch 2, queue copy 2 and step 2
    side                  [copy 1]                            [copy 2]
    compute                       [step 1 ..............................][step 2 ...

A copy waits for nothing that the device has still to compute, and what is computed with the batch waits for the copy, on the
device. Where a kind of device has no second stream or no pinned memory, copies wait as `tensor.to` does.
"""

from typing import Any

import torch

from headway.runtime.collectives.tree import Tree, map_leaves, move_object, moves_itself, to_device


class BlockingTransfer:
    """The host waits for each copy.

    Attributes:
        wants_pinned: batches that lie in pinned memory already are brought sooner.
    """

    wants_pinned = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batch: Tree) -> Tree:
        """The batch on the device."""
        return to_device(batch, self._device)


class SideStreamTransfer:
    """Copies from pinned memory on a side stream; the stream that is current when the batch comes waits for them.

    Objects that move themselves do so on the current stream, since nobody knows which tensors they hold. Batches that lie in
    pinned memory already are brought sooner.

    Args:
        device: where to.
        are_pinned_fresh: tensors that come pinned were made for this batch. False: they may be the dataset's own buffers, which the
            next batch overwrites, so their copies are waited for (not what the device has queued).

    """

    wants_pinned = True

    def __init__(self, device: torch.device, are_pinned_fresh: bool) -> None:
        self._device, self._are_pinned_fresh = device, are_pinned_fresh
        self._stream = torch.Stream(device=device)

    def __reduce__(self) -> tuple[type["SideStreamTransfer"], tuple[torch.device, bool]]:
        return SideStreamTransfer, (self._device, self._are_pinned_fresh)  # a stream is this process's alone

    def __call__(self, batch: Tree) -> Tree:
        """The batch, ready for whatever the current stream does next."""
        moved: list[torch.Tensor] = []
        has_foreign = has_rest = False

        def copy(leaf: Any) -> Any:
            nonlocal has_foreign, has_rest
            if not _is_plain(leaf):
                has_rest |= isinstance(leaf, torch.Tensor) or moves_itself(leaf)
                return leaf
            is_pinned = leaf.is_pinned()
            has_foreign |= is_pinned and not self._are_pinned_fresh
            moved.append((leaf if is_pinned else leaf.pin_memory()).to(self._device, non_blocking=True))
            return moved[-1]

        with self._stream:
            batch = map_leaves(copy, batch, moves_itself)
        if moved:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in moved:
                # It was allocated on the side stream: its memory may be used again only after the current one is done with it.
                tensor.record_stream(current)
        if has_foreign:
            self._wait_for_copies()
        return map_leaves(self._move_rest, batch, moves_itself) if has_rest else batch

    def _wait_for_copies(self) -> None:
        done = torch.Event(device=self._device)
        done.record(self._stream)
        if not done.query():
            done.synchronize()

    def _move_rest(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._device)  # sparse, nested or a subclass; most are there already
        if not moves_itself(leaf):
            return leaf
        pin = getattr(leaf, "pin_memory", None)
        return move_object(pin() if callable(pin) else leaf, self._device, non_blocking=callable(pin))


DeviceTransfer = BlockingTransfer | SideStreamTransfer
"""Brings batches to a device: called with a batch, it gives that on the device, or on its way there."""


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout is torch.strided


def transfer_to(
    device: torch.device | None, non_blocking: bool | None, are_pinned_fresh: bool = False
) -> DeviceTransfer | None:
    """How batches get to a device.

    Args:
        device: where to; None: they stay.
        non_blocking: None and True: without waiting, where the device can do that. False: the host waits for each copy.
        are_pinned_fresh: as for `SideStreamTransfer`.

    Returns:
        None where nothing is to be moved.
    """
    if device is None or device.type == "cpu":
        return None
    if non_blocking is not False:
        try:
            transfer = SideStreamTransfer(device, are_pinned_fresh)
            transfer(torch.ones(1))
            return transfer
        except (RuntimeError, AttributeError, TypeError):
            pass  # no second stream, no pinned memory, no record_stream: the plain way
    return BlockingTransfer(device)
