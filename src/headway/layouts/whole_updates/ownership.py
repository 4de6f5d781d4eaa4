"""Choose the rank that owns (updates) each parameter, and the bucket in which the parameter is gathered.

All ranks make equal choices without communication, because they have the same parameters in the same order.
"""

from collections.abc import Sequence
from math import prod

import torch

BUCKET_BYTES = 64 << 20
"""Bytes of parameters that each owner gathers at a time. Their gradients need about as much additional memory."""


def estimate_cost(shape: Sequence[int]) -> int:
    """Return the relative cost of updating a parameter.

    An m x n matrix costs m * n * min(m, n), like an orthogonalization or a decomposition. All dimensions after the
    first count as columns. A vector costs its number of elements.
    """
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    return rows * columns * max(1, min(rows, columns))


def assign_owners(
    shapes: Sequence[Sequence[int]], num_ranks: int, known_owners: Sequence[int | None] = ()
) -> list[int]:
    """Choose the owner of each parameter: the rank that updates it and keeps its optimizer state.

    The most expensive parameters are assigned first, each to the rank with the least work so far.

    Args:
        shapes: Shapes of the full parameters.
        num_ranks: Number of ranks.
        known_owners: Owners that do not change, for the first parameters. None: the parameter has no owner yet.
            Default: ().
    """
    owners: list[int | None] = [*known_owners, *(None for _ in shapes[len(known_owners) :])]
    costs = [0] * num_ranks
    for shape, owner in zip(shapes, owners):
        if owner is not None:
            costs[owner] += estimate_cost(shape)
    unowned = [index for index, owner in enumerate(owners) if owner is None]
    for index in sorted(unowned, key=lambda index: -estimate_cost(shapes[index])):
        rank = costs.index(min(costs))
        owners[index] = rank
        costs[rank] += estimate_cost(shapes[index])
    return [owner for owner in owners if owner is not None]


def assign_buckets(parameters: Sequence[torch.Tensor], owners: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, which are gathered together.

    No owner gathers more than `max_bytes` per bucket, except for a single parameter that is larger. The most
    expensive parameters of all owners are in the first buckets, so that ranks have similar work in each bucket.

    Args:
        parameters: Parameters with their full shapes.
        owners: Rank that owns each parameter.
        max_bytes: Largest number of bytes of parameters that an owner gathers per bucket.
    """
    last_buckets: dict[int, tuple[int, int]] = {}  # by owner: index of its last bucket, and its bytes in this bucket
    buckets: list[list[int]] = []
    for index in sorted(range(len(parameters)), key=lambda index: -estimate_cost(parameters[index].shape)):
        num_bytes = parameters[index].numel() * parameters[index].dtype.itemsize
        bucket, bytes_in_bucket = last_buckets.get(owners[index], (0, 0))
        if bytes_in_bucket and bytes_in_bucket + num_bytes > max_bytes:
            bucket, bytes_in_bucket = bucket + 1, 0
        last_buckets[owners[index]] = bucket, bytes_in_bucket + num_bytes
        while len(buckets) <= bucket:
            buckets.append([])
        buckets[bucket].append(index)
    return [sorted(bucket) for bucket in buckets]
