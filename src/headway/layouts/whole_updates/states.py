"""Convert optimizer states: describe them for other ranks, make shards for checkpoints, and convert local shards."""

from collections.abc import Callable
from typing import Any

import torch

from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, is_dtensor, replace_local
from headway.core.weights.tensor_bytes import TensorSpec


def map_state(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return an optimizer state with each tensor replaced by `change(tensor)`.

    Plain dicts, lists and tuples are copied. Other objects are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_state(change, item) for key, item in value.items()}
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


def make_pieces(description: Any, state: Any, owner: int, rank: int) -> Any:
    """Return a state whose tensors are `ShardPiece` objects of a checkpoint, with values only on the owner.

    Tensors without elements are new empty tensors instead. Scalars are those of `state` on the owner, and those of
    `description` on other ranks.

    Args:
        description: Description of the state, as `describe_state` returns it on the owner.
        state: State on the owner. Other ranks may pass None.
        owner: Rank that has the state and writes it to the checkpoint.
        rank: Rank of this process.
    """
    is_owner = rank == owner
    if isinstance(description, TensorSpec):
        shape, dtype = description.shape, description.dtype
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        split = TensorSplit(tuple((size,) for size in shape), (owner,))
        if not is_owner:
            return ShardPiece(shape, dtype, (), None, split)
        box = TensorBox((0,) * len(shape), state.detach(), True)
        return ShardPiece(shape, dtype, (box,), state.detach(), split)
    if is_owner and not isinstance(description, dict | list | tuple):
        return state
    if type(description) is dict:
        return {
            key: make_pieces(item, state[key] if is_owner else None, owner, rank) for key, item in description.items()
        }
    if type(description) in (list, tuple):
        items = state if is_owner else [None] * len(description)
        return type(description)([make_pieces(part, item, owner, rank) for part, item in zip(description, items)])
    return description


def wrap_local_state(value: Any, parameter: torch.Tensor) -> Any:
    """Return a state in which tensors of the local shard's shape are DTensors that are sharded like the parameter.

    Tensors of other shapes, scalars and DTensors are kept.
    """
    shard_shape = dtensors.get_local_shard(parameter).shape

    def wrap_shard(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape == shard_shape and not is_dtensor(tensor):
            return replace_local(parameter, tensor, parameter.stride())  # type: ignore[arg-type]
        return tensor

    return map_state(wrap_shard, value)


def unwrap_local_state(value: Any) -> Any:
    """Return an optimizer state with each DTensor replaced by this rank's shard, a plain tensor.

    Other values are kept. As in `map_state`, dicts, lists and tuples are searched.
    """
    return map_state(dtensors.get_local_shard, value)


def list_dtensors(value: Any) -> list[torch.Tensor]:
    """Return the DTensors in an optimizer state and in its dicts, lists and tuples, in the order of the entries."""
    dtensors_in_state: list[torch.Tensor] = []

    def record_dtensor(tensor: torch.Tensor) -> torch.Tensor:
        if is_dtensor(tensor):
            dtensors_in_state.append(tensor)
        return tensor

    map_state(record_dtensor, value)
    return dtensors_in_state
