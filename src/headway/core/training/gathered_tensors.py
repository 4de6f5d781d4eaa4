"""Sharded tensors that are gathered on rank 0, one at a time, for state dicts and weight files.

While rank 0 works, for example writes a file, it requests the tensors one after another, and the other ranks send their
shards of each. All ranks use one order, so that each rank sends what rank 0 expects.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.weights.export import list_write_order, save_weights, split_ties
from headway.core.weights.pieces import ShardPiece, is_dtensor, is_sharded, make_slices
from headway.core.weights.shard_splitter import ShardSplitter
from headway.core.weights.tensor_bytes import get_raw_bytes, view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_T = TypeVar("_T")
_MESSAGE_BYTES = 16 * 2**20
"""Bytes per message between ranks."""


def iterate_buckets(items: Iterable[tuple[_T, int]], bucket_size: int) -> Iterator[list[_T]]:
    """Yield items in order, in buckets of at most `bucket_size` bytes. A larger item gets a bucket for itself.

    Args:
        items: Pairs of (item, size in bytes).
        bucket_size: Largest size of a bucket in bytes.
    """
    bucket: list[_T] = []
    remaining = bucket_size
    for item, size in items:
        if bucket and size > remaining:
            yield bucket
            bucket, remaining = [], bucket_size
        bucket.append(item)
        remaining -= size
    if bucket:
        yield bucket


class GatheredTensor:
    """Sharded tensor that is gathered on rank 0 when it is needed. All ranks must request it, in the same order.

    Args:
        piece: This rank's shard of the tensor.
        collectives: Collectives over all ranks.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of the tensor.
        is_done: Whether the tensor was gathered, or this rank has taken part in its gather.
    """

    def __init__(self, piece: ShardPiece, collectives: Collectives) -> None:
        self.shape = torch.Size(piece.shape)
        self.dtype = piece.dtype
        self.is_done = False
        self._piece = piece
        self._collectives = collectives

    def assemble(self) -> torch.Tensor:
        """Gather the tensor, and return it on rank 0's CPU. Other ranks get a meta tensor without values.

        Rank 0 needs memory for the tensor and for one received part of it.
        """
        is_rank_0 = self._collectives.rank == 0
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu" if is_rank_0 else "meta")
        self._send_to_rank0(out if is_rank_0 else None)
        return out

    def discard(self) -> None:
        """Take part in the gather without keeping the values, so that the other ranks can continue.

        The other ranks send their shards. Rank 0 receives and drops them.
        """
        self._send_to_rank0(None)

    def _send_to_rank0(self, out: torch.Tensor | None) -> None:
        """Send this rank's boxes to rank 0. On rank 0, receive the boxes of all ranks.

        A box is a rectangular part of the full tensor. Every rank must call this method.

        Args:
            out: Full tensor that rank 0 fills. If None, rank 0 drops the values. Other ranks pass None.
        """
        self.is_done = True
        rank = self._collectives.rank
        own_boxes = {box.offsets: box.values for box in self._piece.boxes if box.is_written}
        for source, offsets, shape in self._iterate_boxes():
            if rank == 0 and source == 0:
                if out is not None:
                    view_as_bits(out[make_slices(offsets, shape)]).copy_(view_as_bits(own_boxes[offsets]))
            elif rank == 0:
                self._receive_box(out, offsets, shape, source)
            elif rank == source:
                self._send_box(get_raw_bytes(own_boxes[offsets]))

    def _iterate_boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield the rectangular parts that make up the full tensor, as tuples (sending rank, offsets, shape)."""
        split = self._piece.split
        if split is None:  # the split does not follow a rule, so ranks tell each other their boxes
            own = [(box.offsets, tuple(box.values.shape)) for box in self._piece.boxes if box.is_written]
            for rank, boxes in enumerate(self._collectives.gather_objects(own)):
                yield from ((rank, *box) for box in boxes)
            return
        yield from split.iterate_boxes()

    def _send_box(self, data: torch.Tensor) -> None:
        """Send the bytes of a box to rank 0, in several messages."""
        for start in range(0, len(data), _MESSAGE_BYTES):
            self._collectives.send(data[start : start + _MESSAGE_BYTES], 0)

    def _receive_box(
        self, out: torch.Tensor | None, offsets: tuple[int, ...], shape: tuple[int, ...], source: int
    ) -> None:
        """Receive a box from another rank, and copy it into the full tensor.

        Args:
            out: Full tensor. None: drop the values.
            offsets: Index of the box's first element in the full tensor, by dimension.
            shape: Shape of the box.
            source: Rank that sends it.
        """
        num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        if out is None:
            scratch = torch.empty(min(_MESSAGE_BYTES, num_bytes), dtype=torch.uint8)
            for start in range(0, num_bytes, _MESSAGE_BYTES):
                self._collectives.receive(scratch[: min(_MESSAGE_BYTES, num_bytes - start)], source)
            return
        target = out[make_slices(offsets, shape)]
        box = target if target.is_contiguous() else torch.empty(shape, dtype=self.dtype)
        data = get_raw_bytes(box)  # a view of `box`: it is contiguous and on the CPU
        for start in range(0, num_bytes, _MESSAGE_BYTES):
            self._collectives.receive(data[start : start + _MESSAGE_BYTES], source)
        if box is not target:
            view_as_bits(target).copy_(view_as_bits(box))


def discard_remaining(tensors: Iterable[Any]) -> None:
    """Take part in the gathers of all tensors that have not been gathered yet. Other objects are ignored."""
    for each in tensors:
        if isinstance(each, GatheredTensor) and not each.is_done:
            each.discard()


def wrap_sharded_tensors(tensors: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return the tensors by name, with a `GatheredTensor` in place of each sharded tensor.

    Every rank must call this function with the same names.

    Args:
        tensors: Tensors by name.
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: If ranks hold different tensors, shard them differently, or together miss part of one, or if
            partial sums were not reduced over ranks.
    """
    splitter = ShardSplitter()
    pieces = {name: splitter.split_tensor(each) if is_dtensor(each) else each for name, each in tensors.items()}
    sharded = {name: each for name, each in pieces.items() if isinstance(each, ShardPiece)}
    _check_complete(sharded, collectives)
    return pieces | {name: GatheredTensor(each, collectives) for name, each in sharded.items()}


def _check_complete(sharded: Mapping[str, ShardPiece], collectives: Collectives) -> None:
    """Check that all ranks hold the same sharded tensors, and that their parts together are complete tensors.

    Every rank must call this function.

    Args:
        sharded: This rank's parts of the sharded tensors, by name.
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: If ranks hold different tensors, shard them differently, or together miss part of one.
    """
    descriptions = [
        (name, each.shape, str(each.dtype), each.split and (each.split.size_runs, each.split.writer_progressions))
        for name, each in sharded.items()
    ]
    own_digest = hashlib.sha256(repr(descriptions).encode()).hexdigest()
    # Without a rule for the split, count the values that this rank contributes, because a missing part would be
    # uninitialized memory.
    irregular = {name: each for name, each in sharded.items() if each.split is None}
    own_counts = [sum(box.values.numel() for box in each.boxes if box.is_written) for each in irregular.values()]
    all_ranks: list[tuple[str, list[int]]] = collectives.gather_objects((own_digest, own_counts))
    if len({digest for digest, _ in all_ranks}) > 1:
        raise CheckpointError("the ranks have different sharded tensors; pass the same model on every rank")
    for index, (name, piece) in enumerate(irregular.items()):
        num_values = prod(piece.shape)
        num_contributed = sum(counts[index] for _, counts in all_ranks)
        if num_contributed != num_values:
            raise CheckpointError(
                f"{name} has {num_values:,} values, but the ranks' parts of it have {num_contributed:,} in total"
            )


def gather_state_dict(tensors: Iterable[tuple[str, Any]], collectives: Collectives) -> dict[str, torch.Tensor]:
    """Return a state dict of full tensors. Every rank calls it.

    If any tensor is sharded, only rank 0 gets the tensors, with the gathered ones on the CPU. The other ranks get an
    empty dict. If no tensor is sharded, every rank gets its own tensors unchanged.

    Args:
        tensors: Pairs of (name, tensor).
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors, or part of one is missing. If rank 0 fails to
            gather, it raises its own error, and the other ranks raise CheckpointError.
    """
    by_name = dict(tensors)
    if not any(map(is_sharded, by_name.values())):
        return by_name
    values = {name: each for name, each in by_name.items() if isinstance(each, torch.Tensor) or is_sharded(each)}
    # Of tied tensors only the first is gathered. `tied` maps the names of the others to its name.
    untied, tied = split_ties(values.items())
    wrapped = wrap_sharded_tensors(untied, collectives)

    def assemble_all() -> dict[str, torch.Tensor]:
        gathered = {
            name: each.assemble() if isinstance(each, GatheredTensor) else each for name, each in wrapped.items()
        }
        result = by_name | gathered
        return {name: result[tied.get(name, name)] for name in by_name}

    return run_on_rank_0(assemble_all, collectives, wrapped, list(wrapped)) or {}


def gather_and_save(
    tensors: Iterable[tuple[str, Any]], folder: str | Path, max_shard_size: int | str, collectives: Collectives
) -> None:
    """Gather sharded tensors and write all tensors from rank 0, as `save_weights` does. Every rank calls it.

    Rank 0 needs memory for one full tensor at a time. The other ranks need none beyond their own shards.

    Args:
        tensors: Pairs of (name, tensor).
        folder: Directory to write to.
        max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors, or part of one is missing. If rank 0 fails to
            write, it raises its own error, and the other ranks raise CheckpointError.
    """
    items = list(tensors)
    # Of tied tensors only the first is gathered. `tied` maps the names of the others to its name.
    untied, tied = split_ties(items)
    wrapped = wrap_sharded_tensors(untied, collectives)
    all_wrapped = [(name, wrapped[tied.get(name, name)]) for name, _ in items]
    run_on_rank_0(
        lambda: save_weights(all_wrapped, folder, max_shard_size),
        collectives,
        wrapped,
        list_write_order(wrapped, max_shard_size),
    )


def run_on_rank_0(
    function: Callable[[], _T],
    collectives: Collectives,
    tensors: Mapping[str, Any] | None = None,
    order: Iterable[str] = (),
) -> _T | None:
    """Run a function on rank 0 while the other ranks send it the tensors in the given order, and then wait for its end.

    If the function fails, rank 0 still receives the remaining tensors, so that all ranks continue together.

    Args:
        function: Function that rank 0 calls, such as one that writes a file. It may assemble tensors of `tensors`.
        collectives: Collectives over all ranks.
        tensors: Tensors by name, sharded ones as `GatheredTensor`. None: the function needs none.
        order: Names in the order in which the function requests them.

    Returns:
        The result of the function on rank 0, and None on the other ranks.

    Raises:
        CheckpointError: On the other ranks, if the function fails. Rank 0 raises the function's own error.
    """
    result: _T | None = None
    failure: Exception | None = None
    try:
        if collectives.rank == 0:
            result = function()
    except Exception as error:
        failure = error
    # Other ranks send what rank 0 requests. After a failure rank 0 receives the rest, so that no sender waits.
    if tensors is not None:
        discard_remaining(tensors[name] for name in order)
    reason = collectives.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if reason is not None:
        raise CheckpointError(f"rank 0 could not put the weights together, or write them: {reason}")
    return result
