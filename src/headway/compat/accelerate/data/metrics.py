"""What `gather_for_metrics` takes under Accelerate's name besides entries per sample: one value for the batch, say.

TRL counts tokens and sums entropies by it. Headway's own refuses such values, since nothing says what they would be joined to.
"""

import torch

from headway.compat.accelerate.data.batches import recursively_apply
from headway.data.loader import PreparedLoader
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, tensors


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
