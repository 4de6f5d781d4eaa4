"""Shuffled order of a dataset's samples. Any part of the order can be computed without the rest."""

from functools import lru_cache
from typing import Any

import numpy

from headway.core.data.sampling.order import draw_permutation
from headway.core.runtime.seed import mix_seed

_LARGEST_DRAWN = 1 << 16
"""Maximum number of samples for which a complete permutation is generated and cached."""
_NUM_ROUNDS = 6

Indices = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


def shuffle_offsets(offsets: Indices, length: int, seed: int) -> Indices:
    """Return the indices of the samples at some positions of a shuffled order.

    Args:
        offsets: Positions in the shuffled order, each from 0 to `length - 1`.
        length: Number of samples.
        seed: Seed of the order, 0 or more.
    """
    if length <= _LARGEST_DRAWN:
        return _draw_order(length, seed)[offsets]
    return _permute_offsets(offsets, length, seed)


@lru_cache(maxsize=64)
def _draw_order(length: int, seed: int) -> Indices:
    return draw_permutation(length, seed)


def _permute_offsets(offsets: Indices, length: int, seed: int) -> Indices:
    """Map `offsets` by a pseudo-random permutation of the numbers below `length`.

    The permutation is a Feistel network over a power of two with an even exponent. Results that are not below `length`
    are mapped again (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). No table of the
    permutation is stored.
    """
    half = ((length - 1).bit_length() + 1) // 2
    keys = [mix_seed(seed, number) for number in range(_NUM_ROUNDS)]
    values = _encrypt_values(offsets.astype(numpy.uint64), half, keys)
    while (is_beyond := values >= length).any():
        values[is_beyond] = _encrypt_values(values[is_beyond], half, keys)
    permuted: Indices = values.astype(numpy.int64)
    return permuted


def _encrypt_values(values: Any, half: int, keys: list[int]) -> Any:
    """Return a permutation of the values below 2^(2 * half), applied to some of them (a Feistel network).

    Args:
        values: Values of dtype uint64.
        half: Number of bits in each half of a value.
        keys: Key of each round.
    """
    shift, mask = numpy.uint64(half), numpy.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right + numpy.uint64(key)) & mask)
    return (left << shift) | right


def _mix_bits(values: Any) -> Any:
    """Hash each value to a well-distributed 64-bit number, with the finalizer of MurmurHash3."""
    values = (values ^ (values >> numpy.uint64(33))) * numpy.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> numpy.uint64(33))) * numpy.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> numpy.uint64(33))
