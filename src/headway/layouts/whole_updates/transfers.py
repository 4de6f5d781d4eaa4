"""Gather sharded tensors to the ranks that own them and scatter them back, each in one all-to-all of bytes.

A shard consists of boxes, which are rectangular parts of a tensor. If several ranks have a box, one of them sends it,
and all of them receive it back. Plans are computed from the boxes that ranks report, so they work with every layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.dtensor_boxes import iterate_boxes
from headway.core.weights.pieces import is_dtensor, make_slices

_ALIGNMENT = 16
"""Alignment of boxes in a message, in bytes.

Boxes are padded to multiples of it, so that views of any dtype are aligned.
"""


class Box(NamedTuple):
    """Rectangular part of a tensor.

    Attributes:
        offsets: First index along each dim of the full tensor.
        shape: Length along each dim.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def list_local_views(tensor: torch.Tensor) -> dict[Box, torch.Tensor]:
    """Return this rank's boxes (rectangular parts) of a tensor as views of its memory. A plain tensor is one box."""
    local = get_local_shard(tensor).detach()
    if not is_dtensor(tensor):
        return {Box((0,) * local.ndim, tuple(local.shape)): local}
    views = ((offsets, local[where]) for offsets, where in iterate_boxes(tensor))
    return {Box(offsets, tuple(view.shape)): view for offsets, view in views if view.numel()}


@dataclass(frozen=True)
class TensorPlan:
    """Boxes (rectangular parts) of one tensor on all ranks, for its transfer to one rank and back.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of the tensor.
        owner: Rank to which the tensor is gathered.
        boxes: Boxes of each rank, by rank.
        senders: Rank that sends each box to the owner, by box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    boxes: tuple[tuple[Box, ...], ...]
    senders: dict[Box, int]


def make_plan(tensor: torch.Tensor, owner: int, boxes: Sequence[Sequence[Box]]) -> TensorPlan:
    """Return the plan for transferring a tensor to its owner and back.

    Args:
        tensor: This rank's tensor or DTensor.
        owner: Rank to which the tensor is gathered.
        boxes: Boxes of each rank, by rank.
    """
    ranks_by_box: dict[Box, list[int]] = {}
    for rank, boxes_of_rank in enumerate(boxes):
        for box in boxes_of_rank:
            ranks_by_box.setdefault(box, []).append(rank)
    # If replicas are on several machines, the rank that is nearest to the owner is often on its machine.
    senders = {box: min(ranks, key=lambda rank: (abs(rank - owner), rank)) for box, ranks in ranks_by_box.items()}
    return TensorPlan(tuple(tensor.shape), tensor.dtype, owner, tuple(map(tuple, boxes)), senders)


class PendingTransfer:
    """All-to-all collective that has been started.

    Args:
        work: Handle that torch returned for the collective, or None if nothing is pending.
        received: Buffer that receives the bytes.
        sent: Buffer that is sent. It is kept alive until the collective has ended.
    """

    def __init__(self, work: Any, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._work = work
        self._received = received
        self._sent: torch.Tensor | None = sent

    def wait(self) -> torch.Tensor:
        """Wait until the transfer has ended, and return the received bytes."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None
        return self._received


class Transfers:
    """Transfers of tensors between their shards and the ranks that own them, and back.

    A message between two ranks contains the boxes in the order of the plans, without headers. Both ranks compute the
    same order from the plans.

    Args:
        everyone: Collectives over all ranks that have shards of the tensors.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._rank = everyone.rank
        self._num_ranks = everyone.world_size
        self._everyone = everyone

    def start_gather(self, plans: Sequence[TensorPlan], tensors: Sequence[torch.Tensor]) -> PendingTransfer:
        """Start sending this rank's boxes (rectangular parts of tensors) to the ranks that own the tensors.

        Every rank must call it with the same plans.

        Args:
            plans: Plans of the tensors, equal on all ranks.
            tensors: This rank's tensors or shards.
        """
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self._num_ranks)]
        incoming_bytes = [0] * self._num_ranks
        for plan, tensor in zip(plans, tensors):
            views = list_local_views(tensor)
            for box, sender in plan.senders.items():
                if sender == self._rank:
                    outgoing[plan.owner].append(views[box])
                if plan.owner == self._rank:
                    incoming_bytes[sender] += _count_bytes(box, plan.dtype)
        return self._start_exchange(outgoing, incoming_bytes, get_local_shard(tensors[0]).device)

    def finish_gather(self, plans: Sequence[TensorPlan], pending: PendingTransfer) -> list[torch.Tensor | None]:
        """Wait for a gather, and return the full tensors that this rank owns, with None in place of all others.

        Args:
            plans: Plans of the tensors.
            pending: Return value of `start_gather`.
        """
        received = pending.wait()
        full_tensors: list[torch.Tensor | None] = [
            torch.empty(plan.shape, dtype=plan.dtype, device=received.device) if plan.owner == self._rank else None
            for plan in plans
        ]
        position = 0
        for rank in range(self._num_ranks):  # the buffer contains the messages in the order of their senders
            for plan, full_tensor in zip(plans, full_tensors):
                if full_tensor is None:
                    continue
                for box, sender in plan.senders.items():
                    if sender == rank:
                        full_tensor[make_slices(box.offsets, box.shape)].copy_(
                            _read_box(received, position, box, plan.dtype)
                        )
                        position += _count_bytes(box, plan.dtype)
        return full_tensors

    def start_scatter(
        self, plans: Sequence[TensorPlan], full_tensors: Sequence[torch.Tensor | None], device: torch.device
    ) -> PendingTransfer:
        """Start sending boxes (rectangular parts) of full tensors to the ranks whose shards contain these boxes.

        Every rank must call it with the same plans.

        Args:
            plans: Plans of the tensors, equal on all ranks.
            full_tensors: Full tensors that this rank owns, and None for the others.
            device: Device of the tensors.
        """
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self._num_ranks)]
        incoming_bytes = [0] * self._num_ranks
        for plan, full_tensor in zip(plans, full_tensors):
            if full_tensor is not None:
                for rank, boxes in enumerate(plan.boxes):
                    outgoing[rank] += [full_tensor[make_slices(box.offsets, box.shape)] for box in boxes]
            incoming_bytes[plan.owner] += sum(_count_bytes(box, plan.dtype) for box in plan.boxes[self._rank])
        return self._start_exchange(outgoing, incoming_bytes, device)

    def finish_scatter(
        self, plans: Sequence[TensorPlan], pending: PendingTransfer, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Copy the received values into this rank's tensors or shards.

        Args:
            plans: Plans of the tensors.
            pending: Return value of `start_scatter`.
            tensors: This rank's tensors or shards.
        """
        received, position = pending.wait(), 0
        for owner in range(self._num_ranks):
            for plan, tensor in zip(plans, tensors):
                if plan.owner == owner:
                    views = list_local_views(tensor)
                    for box in plan.boxes[self._rank]:
                        views[box].copy_(_read_box(received, position, box, plan.dtype))
                        position += _count_bytes(box, plan.dtype)

    def _start_exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming_bytes: list[int], device: torch.device
    ) -> PendingTransfer:
        """Start an all-to-all of bytes.

        Args:
            outgoing: Tensors to send to each rank, by rank.
            incoming_bytes: Number of bytes to receive from each rank, by rank.
            device: Device of the buffers.
        """
        flat = [part for tensors in outgoing for tensor in tensors for part in _to_bytes(tensor)]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        outgoing_bytes = [sum(_round_up(tensor.nbytes) for tensor in tensors) for tensors in outgoing]
        received = torch.empty(sum(incoming_bytes), dtype=torch.uint8, device=device)
        group = self._everyone.get_group(message)
        work = dist.all_to_all_single(received, message, incoming_bytes, outgoing_bytes, group=group, async_op=True)
        return PendingTransfer(work, received, message)


def _round_up(num_bytes: int) -> int:
    """Return the smallest multiple of `_ALIGNMENT` that is not smaller than a number of bytes."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _count_bytes(box: Box, dtype: torch.dtype) -> int:
    """Return the number of bytes of a box in a message, with padding."""
    return _round_up(prod(box.shape) * dtype.itemsize)


def _to_bytes(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of a box as bytes, and then padding bytes if they are needed."""
    flat = view.contiguous().reshape(-1).view(torch.uint8)
    yield flat
    if num_padding_bytes := _round_up(flat.numel()) - flat.numel():
        yield flat.new_zeros(num_padding_bytes)


def _read_box(received: torch.Tensor, position: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a box as a view of the received bytes, from index `position` on."""
    flat = received[position : position + prod(box.shape) * dtype.itemsize]
    return flat.view(dtype).view(box.shape)
