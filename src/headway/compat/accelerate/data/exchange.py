"""Exchange between processes as functions: gather, reduce, broadcast and the like, each checked before it moves data.

`gather_for_metrics` takes, besides entries per sample, one value for the batch, say: TRL counts tokens and sums entropies
by it. Headway's own refuses such values, since nothing says what they would be joined to.
"""

from typing import Any

import torch

from headway.compat.accelerate.data.batches import recursively_apply
from headway.compat.accelerate.state import GradientState, collectives
from headway.data.loader import PreparedLoader
from headway.errors import CollectiveError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import synchronize_rng_states
from headway.runtime.collectives.tree import Tree, leaves, map_tensors, tensors


def gather(tensor: Tree) -> Tree:
    """Every rank's tensors, concatenated along dim 0 in rank order; on one process what was given.

    First dimensions may differ between ranks. Nested structures keep their shape.
    """
    return tensor if collectives().world_size == 1 else collectives().gather(tensor)


def gather_object(object: Any) -> Any:  # noqa: A002 - its name in Accelerate
    """The items of every rank's list in one list, by rank; on one process what was given.

    Args:
        object: a list, tuple or set of what pickle can carry; anything else counts as one item.
    """
    if collectives().world_size == 1:
        return object
    found = collectives().gather_objects(object)
    return [item for part in found for item in (part if isinstance(part, list | tuple | set | frozenset) else (part,))]


def gather_and_cut(values: Any, is_objects: bool) -> Any:
    """What every rank has, joined; of a loader's last round only as many entries as samples were left for it.

    That is wrong where a rank's entries are not its samples, but scripts count on it: a loss of each rank, for their mean.

    Args:
        values: tensors in nested containers, or objects.
        is_objects: gather them as objects whatever they are.
    """
    is_objects = is_objects or not all(isinstance(each, torch.Tensor) for each in leaves(values))
    joined = gather_object(values) if is_objects else gather(values)
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return joined
    if is_objects:
        return joined[: state.remainder] if isinstance(joined, list | tuple | str) else joined
    return map_tensors(lambda each: each[: state.remainder] if each.ndim else each, joined)


def broadcast(tensor: Tree, from_process: int = 0) -> Tree:
    """Rank `from_process`'s values into every rank's tensors, in place; the same objects come back.

    Args:
        tensor: tensors of the same shapes and dtypes on all ranks, in nested containers.
        from_process: whose values.
    """
    for own, sent in zip(tensors(tensor), tensors(collectives().broadcast(tensor, from_process))):
        if own is not sent:
            own.detach().copy_(sent)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Rank `from_process`'s objects into every rank's list, in place; the same list comes back.

    Args:
        object_list: on every rank as long as there; what it holds elsewhere does not matter.
        from_process: whose objects.
    """
    object_list[:] = collectives().broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Tree, reduction: str = "mean", scale: float = 1.0) -> Tree:
    """Combine tensors of equal shapes over ranks: "mean" (the default here), "sum", "max" or "min", times `scale`."""
    return collectives().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
    """Pad tensors along `dim` to the longest of all ranks, so that they can be gathered."""
    return collectives().pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that one rank has, on every rank's device; the others give None.

    Raises:
        CollectiveError: not exactly one rank gave a tensor.
    """
    way = collectives()
    given = [rank for rank, (has,) in enumerate(way.gather_numbers([float(tensor is not None)])) if has]
    if len(given) != 1:
        raise CollectiveError(
            f"copy_tensor_to_devices got a tensor on ranks {given}; give it on one, and None on the others"
        )
    shape, dtype = way.broadcast_object(None if tensor is None else (tensor.shape, tensor.dtype), given[0])
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    moved: torch.Tensor = way.broadcast(tensor.to(way.runtime.device), given[0])
    return moved


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give all ranks rank 0's state of one random stream (see `synchronize_rng_states`)."""
    synchronize_rng_states([rng_type or "torch"], generator)


def is_per_sample(tree: Tree, loader: PreparedLoader | None, collectives: Collectives) -> bool:
    """Do the tensors have a row for each sample of the batch, on all ranks? Called on all.

    Args:
        tree: True where it holds anything but tensors.
        loader: whose batch it is; None: nothing is known, and any tensor with a dimension will do.
        collectives: among the ranks.
    """
    try:
        recursively_apply(lambda tensor: tensor, tree, error_on_other_type=True)
    except TypeError:
        return True
    fits = all(_fits(tensor, loader) for tensor in tensors(tree))
    return fits if collectives.world_size == 1 else all(row[0] for row in collectives.gather_numbers([float(fits)]))


def _fits(tensor: torch.Tensor, loader: PreparedLoader | None) -> bool:
    if tensor.ndim == 0:
        return False
    if loader is None or loader.num_rows is None or tensor.shape[0] == loader.num_rows:
        return True
    # Values repeated to the batch size in a short last batch: Headway's own cuts them and says so.
    total, counts = loader.total_batch_size, loader.valid_counts
    if not total or not counts:
        return False
    return tensor.shape[0] == total // len(counts) > loader.num_rows
