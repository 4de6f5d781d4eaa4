"""Convert optimizer states: describe them for other ranks, make shards for checkpoints, and convert local shards."""

from collections.abc import Callable
from typing import Any

import torch

from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, is_dtensor, replace_local
from headway.core.weights.shards import TensorSpec


def map_state(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return an optimizer state with each tensor replaced by `change(tensor)`.

    Plain dicts, lists and tuples are copied. Other objects are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return (
            type(value)({key: map_state(change, item) for key, item in value.items()}) if type(value) is dict else value
        )
    if type(value) in (list, tuple):
        return type(value)([map_state(change, item) for item in value])
    return value


def describe_state(value: Any) -> Any:
    """Return a description of a state that can be sent to other ranks.

    Tensors with dimensions become shapes and dtypes. Scalar tensors and numbers are kept.
    """
    return map_state(
        lambda tensor: TensorSpec(tuple(tensor.shape), tensor.dtype) if tensor.ndim else tensor.cpu(), value
    )


def make_pieces(told: Any, held: Any, owner: int, rank: int) -> Any:
    """Return a state whose tensors are `ShardPiece` objects of a checkpoint, with values only on the owner.

    Tensors without elements are new empty tensors instead. Scalars are those of `held` on the owner, and those of
    `told` on other ranks.

    Args:
        told: Description of the state, as `describe_state` returns it.
        held: State on the owner. Other ranks may pass None.
        owner: Rank that has the state and writes it to the checkpoint.
        rank: Rank of this process.
    """
    if isinstance(told, TensorSpec):
        split = TensorSplit(tuple((size,) for size in told.shape), (owner,))
        if 0 in told.shape:
            return torch.empty(told.shape, dtype=told.dtype)
        if rank != owner:
            return ShardPiece(told.shape, told.dtype, (), None, split)
        box = TensorBox((0,) * len(told.shape), held.detach(), True)
        return ShardPiece(told.shape, told.dtype, (box,), held.detach(), split)
    if rank == owner and not isinstance(told, dict | list | tuple):
        return held
    if type(told) is dict:
        return {key: make_pieces(item, held[key] if rank == owner else None, owner, rank) for key, item in told.items()}
    if type(told) in (list, tuple):
        items = zip(told, held) if rank == owner else ((item, None) for item in told)
        return type(told)([make_pieces(item, own, owner, rank) for item, own in items])
    return told


def wrap_local_state(value: Any, parameter: torch.Tensor) -> Any:
    """Return a state in which tensors of the local shard's shape are DTensors that are sharded like the parameter.

    Tensors of other shapes, scalars and DTensors are kept.
    """
    shape = dtensors.get_local_shard(parameter).shape
    return map_state(
        lambda tensor: (
            replace_local(parameter, tensor, parameter.stride())  # type: ignore[arg-type]
            if tensor.ndim and tensor.shape == shape and not is_dtensor(tensor)
            else tensor
        ),
        value,
    )


def unwrap_local_state(value: Any) -> Any:
    """Return an optimizer state with each DTensor replaced by this rank's shard, a plain tensor.

    Other values are kept. As in `map_state`, dicts, lists and tuples are searched.
    """
    return map_state(dtensors.get_local_shard, value)


def list_spread(value: Any) -> list[torch.Tensor]:
    """Return the DTensors in an optimizer state and in its dicts, lists and tuples, in the order of the entries."""
    found: list[torch.Tensor] = []

    def record_spread(tensor: torch.Tensor) -> torch.Tensor:
        if is_dtensor(tensor):
            found.append(tensor)
        return tensor

    map_state(record_spread, value)
    return found
