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


def assign_owners(shapes: Sequence[Sequence[int]], num_ranks: int, known: Sequence[int | None] = ()) -> list[int]:
    """Choose the owner of each parameter: the rank that updates it and keeps its optimizer state.

    The most expensive parameters are assigned first, each to the rank with the least work so far.

    Args:
        shapes: Shapes of the full parameters.
        num_ranks: Number of ranks.
        known: Owners that do not change, for the first parameters. None: the parameter has no owner yet. Default: ().
    """
    owners: list[int | None] = [*known, *(None for _ in shapes[len(known) :])]
    loads = [0] * num_ranks
    for shape, owner in zip(shapes, owners):
        if owner is not None:
            loads[owner] += estimate_cost(shape)
    free = [number for number, owner in enumerate(owners) if owner is None]
    for number in sorted(free, key=lambda each: -estimate_cost(shapes[each])):
        rank = loads.index(min(loads))
        owners[number] = rank
        loads[rank] += estimate_cost(shapes[number])
    return [owner for owner in owners if owner is not None]


def assign_buckets(parameters: Sequence[torch.Tensor], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, which are gathered together.

    No owner gathers more than `limit` bytes per bucket, except for a single parameter that is larger. The most
    expensive parameters of all owners are in the first buckets, so that ranks have similar work in each bucket.

    Args:
        parameters: Parameters with their full shapes.
        owners: Rank that owns each parameter.
        limit: Largest number of bytes that an owner gathers per bucket.
    """
    places: dict[int, tuple[int, int]] = {}
    buckets: list[list[int]] = []
    for number in sorted(range(len(parameters)), key=lambda each: -estimate_cost(parameters[each].shape)):
        size = parameters[number].numel() * parameters[number].dtype.itemsize
        place, taken = places.get(owners[number], (0, 0))
        if taken and taken + size > limit:
            place, taken = place + 1, 0
        places[owners[number]] = place, taken + size
        while len(buckets) <= place:
            buckets.append([])
        buckets[place].append(number)
    return [sorted(bucket) for bucket in buckets]
