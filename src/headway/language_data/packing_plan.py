"""Plan that packs samples into sequences of equal length. It is a pure function of lengths, strategy and seed.

Best-fit decreasing places samples in order of decreasing length, each into the fullest sequence that still has room for
it. "Fewer Truncations Improve Language Modeling" (Ding et al., ICML 2024, arXiv 2404.10830) shows its use for language
models. Samples of equal length are placed together, and a bit field is used to find the fullest sequence. The cost
therefore depends on the number of different lengths, not on the number of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

from headway.core.config.values import check_count
from headway.core.data.sampling.order import draw_permutation
from headway.errors import ConfigError, DataError

STRATEGIES = ("best_fit", "in_order", "split")
LONG_SAMPLES = ("error", "split", "truncate")
DEFAULT_WINDOW = 16384
"""Default number of samples that are packed together. Larger windows save less than 0.2% more padding."""

_Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
"""One-dimensional int64 array."""


class SamplePiece(NamedTuple):
    """Part of a sample that becomes one document of a packed sequence.

    Attributes:
        sample: Index of the sample in its dataset.
        start: Index, within the sample, of the part's first token.
        stop: Index, within the sample, of the token after the part's last one.
    """

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Assignment of samples, or pieces of long samples, to sequences.

    Attributes:
        sequence_length: Number of tokens per sequence, including padding.
        samples: Index of each piece's sample. Pieces are ordered by sequence.
        starts: Index of each piece's first token in its sample.
        stops: Index, in its sample, of the token after each piece's last one.
        offsets: Index of the first piece of each sequence, followed by the total number of pieces.
        num_cut_tokens: Number of tokens that are left out because samples are truncated.
    """

    sequence_length: int
    samples: _Integers
    starts: _Integers
    stops: _Integers
    offsets: _Integers
    num_cut_tokens: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def list_pieces(self, sequence: int) -> list[SamplePiece]:
        """Return the samples and parts of samples that form a sequence, in the order in which they are concatenated.

        Args:
            sequence: Index of the sequence.
        """
        chosen = slice(self.offsets[sequence], self.offsets[sequence + 1])
        columns = (self.samples[chosen].tolist(), self.starts[chosen].tolist(), self.stops[chosen].tolist())
        return [SamplePiece(*each) for each in zip(*columns)]

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in all sequences, without padding."""
        return int((self.stops - self.starts).sum())

    @property
    def padding_share(self) -> float:
        """Fraction of all token positions that is filled with padding."""
        return 1 - self.num_tokens / max(1, len(self) * self.sequence_length)


def make_packing_plan(
    lengths: Sequence[int] | _Integers,
    sequence_length: int,
    *,
    strategy: str = "best_fit",
    long_samples: str = "error",
    seed: int | None = None,
    window: int = DEFAULT_WINDOW,
) -> PackingPlan:
    """Assign samples to sequences. Equal arguments give equal plans on all machines.

    Args:
        lengths: Number of tokens in each sample. Empty samples are left out.
        sequence_length: Tokens per sequence.
        strategy: "best_fit": best-fit decreasing within windows of samples. "in_order": a sequence ends at the first
            sample that does not fit. "split": samples are joined and cut every `sequence_length` tokens.
            Default: "best_fit".
        long_samples: Treatment of samples longer than a sequence, unless the strategy is "split": "error", "split"
            (into pieces) or "truncate" (drop the tokens beyond the sequence). Default: "error".
        seed: Seed of the order in which samples are packed. None: samples are packed in the order of `lengths`.
        window: Number of consecutive samples that "best_fit" packs together. Default: `DEFAULT_WINDOW`.

    Raises:
        ConfigError: If `strategy` or `long_samples` is unknown, or `sequence_length` or `window` is not a positive
            integer.
        DataError: If `lengths` is not a one-dimensional sequence of integers, a length is negative, all lengths are 0,
            or a sample is too long and `long_samples="error"`.
    """
    check_count(sequence_length=sequence_length, window=window)
    for name, value, allowed in (("strategy", strategy, STRATEGIES), ("long_samples", long_samples, LONG_SAMPLES)):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}; allowed: {', '.join(allowed)}")
    sizes = _check_lengths(lengths)
    order = numpy.arange(len(sizes)) if seed is None else draw_permutation(len(sizes), seed)
    order = order[sizes[order] > 0]
    if not len(order):
        raise DataError(f"none of the {len(sizes)} samples has a token, so there is nothing to pack")
    if strategy == "split":
        return _plan_split(order, sizes[order], sequence_length)
    num_long = int((sizes > sequence_length).sum())
    if num_long and long_samples == "error":
        longest = int(sizes.argmax())
        raise DataError(
            f"{num_long} of {len(sizes)} samples are longer than a sequence of {sequence_length} tokens; the longest is sample "
            f"{longest} with {sizes[longest]}. Pass long_samples='split' (split them into parts) or 'truncate' (drop the rest), or a "
            "larger sequence length"
        )
    num_cut_tokens = 0
    if long_samples == "truncate":
        num_cut_tokens = int(numpy.maximum(sizes - sequence_length, 0).sum())
        sizes = numpy.minimum(sizes, sequence_length)
    samples, starts, stops = _split_long_samples(order, sizes[order], sequence_length)
    if strategy == "in_order":
        piece_order, num_pieces = _pack_in_order(stops - starts, sequence_length)
    else:
        piece_order, num_pieces = _pack_best_fit(stops - starts, sequence_length, window)
    return PackingPlan(
        sequence_length=sequence_length,
        samples=samples[piece_order],
        starts=starts[piece_order],
        stops=stops[piece_order],
        offsets=numpy.concatenate([[0], numpy.cumsum(num_pieces)]),
        num_cut_tokens=num_cut_tokens,
    )


def _check_lengths(lengths: Sequence[int] | _Integers) -> _Integers:
    """Return the lengths as an int64 array.

    Raises:
        DataError: If `lengths` is not a one-dimensional sequence of integers, or if a length is negative.
    """
    sizes = numpy.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and not numpy.issubdtype(sizes.dtype, numpy.integer)):
        raise DataError(
            f"lengths has the shape {sizes.shape} and the type {sizes.dtype}; give one whole number for each sample"
        )
    if sizes.size and sizes.min() < 0:
        raise DataError(f"lengths[{int(sizes.argmin())}] is {sizes.min()}; give the number of tokens, 0 or more")
    return sizes.astype(numpy.int64)


def _plan_split(order: _Integers, sizes: _Integers, capacity: int) -> PackingPlan:
    """Return the plan that concatenates all samples and cuts them every `capacity` tokens.

    Args:
        order: Index of each sample, in the order in which samples are packed.
        sizes: Number of tokens in each sample of `order`, 1 or more.
        capacity: Number of tokens per sequence.
    """
    # All positions are counted in the concatenated samples. A piece ends where a sample or a sequence ends.
    sample_ends = numpy.cumsum(sizes)
    num_tokens = int(sample_ends[-1])
    piece_ends = numpy.union1d(sample_ends, numpy.arange(capacity, num_tokens, capacity))
    piece_starts = numpy.concatenate([[0], piece_ends[:-1]])
    sample_of_piece = numpy.searchsorted(sample_ends, piece_starts, side="right")
    sample_starts = (sample_ends - sizes)[sample_of_piece]
    num_sequences = -(-num_tokens // capacity)
    offsets = numpy.searchsorted(piece_starts, numpy.arange(num_sequences) * capacity)
    return PackingPlan(
        sequence_length=capacity,
        samples=order[sample_of_piece],
        starts=piece_starts - sample_starts,
        stops=piece_ends - sample_starts,
        offsets=numpy.concatenate([offsets, [len(piece_starts)]]),
    )


def _split_long_samples(order: _Integers, sizes: _Integers, capacity: int) -> tuple[_Integers, _Integers, _Integers]:
    """Cut samples into pieces of at most `capacity` tokens.

    Args:
        order: Index of each sample, in the order in which samples are packed.
        sizes: Number of tokens in each sample of `order`, 1 or more.
        capacity: Number of tokens per sequence.

    Returns:
        Three arrays with one entry per piece: index of its sample, and start and stop of its tokens in the sample.
    """
    num_pieces = -(-sizes // capacity)
    first_pieces = numpy.cumsum(num_pieces) - num_pieces  # index of each sample's first piece among all pieces
    number_in_sample = numpy.arange(int(num_pieces.sum())) - numpy.repeat(first_pieces, num_pieces)
    starts = number_in_sample * capacity
    stops = numpy.minimum(starts + capacity, numpy.repeat(sizes, num_pieces))
    return numpy.repeat(order, num_pieces), starts, stops


def _pack_in_order(sizes: _Integers, capacity: int) -> tuple[_Integers, list[int]]:
    """Fill sequences with pieces in their order, without moving any piece.

    Args:
        sizes: Number of tokens in each piece, at most `capacity`.
        capacity: Number of tokens per sequence.

    Returns:
        Indices of the pieces in order, and the number of pieces in each sequence.
    """
    ends = numpy.cumsum(sizes)
    starts = ends - sizes
    # For each piece, the index of the first piece that does not fit into a sequence which begins with it.
    next_first: list[int] = numpy.searchsorted(ends, starts + capacity, side="right").tolist()
    num_pieces, first = [], 0
    while first < len(sizes):
        num_pieces.append(next_first[first] - first)
        first = next_first[first]
    return numpy.arange(len(sizes)), num_pieces


def _pack_best_fit(sizes: _Integers, capacity: int, window: int) -> tuple[_Integers, list[int]]:
    """Fill sequences with pieces by best-fit decreasing, separately for each window of `window` pieces.

    Args:
        sizes: Number of tokens in each piece, at most `capacity`.
        capacity: Number of tokens per sequence.
        window: Number of consecutive pieces that are packed together.

    Returns:
        Indices of the pieces in the order of the sequences, and the number of pieces in each sequence.
    """
    piece_orders, num_pieces = [], []
    for begin in range(0, len(sizes), window):
        window_sizes = sizes[begin : begin + window]
        decreasing = numpy.argsort(-window_sizes, kind="stable")
        bins = assign_bins(window_sizes[decreasing], capacity)
        # Bins are numbered by decreasing longest piece. Give them the order in which these pieces come in the data, so
        # that neither long nor short samples come first.
        _, first_of_bin = numpy.unique(bins, return_index=True)
        new_number = numpy.empty(len(first_of_bin), dtype=numpy.int64)
        new_number[numpy.argsort(decreasing[first_of_bin])] = numpy.arange(len(first_of_bin))
        bin_of_piece = numpy.empty(len(window_sizes), dtype=numpy.int64)
        bin_of_piece[decreasing] = new_number[bins]
        piece_orders.append(begin + numpy.argsort(bin_of_piece, kind="stable"))
        num_pieces += numpy.bincount(bin_of_piece).tolist()
    return numpy.concatenate(piece_orders), num_pieces


def assign_bins(sizes: _Integers, capacity: int) -> _Integers:
    """Assign sizes to bins by best-fit decreasing, and return the index of each size's bin.

    Each size goes into the fullest bin into which it fits.

    Args:
        sizes: Sizes in decreasing order, from 1 to `capacity`.
        capacity: Capacity of a bin.
    """
    bin_of_size: list[int] = []
    open_bins = _BinsByFreeCapacity()
    num_bins = 0
    # Equal sizes are placed together. Each run of equal sizes begins at one bound and ends before the next.
    bounds = numpy.flatnonzero(numpy.diff(sizes, prepend=0, append=0)).tolist()
    for begin, end in pairwise(bounds):
        size, num_left = int(sizes[begin]), end - begin
        while num_left:
            free, bins = open_bins.pop_fullest(size)
            if not bins:
                free = capacity
                bins = range(num_bins, num_bins - (-num_left // (capacity // size)))
                num_bins = bins.stop
            # Best fit fills one bin before it starts the next, because it prefers the bin with less free capacity.
            per_bin = free // size
            num_full = min(len(bins), num_left // per_bin)
            if num_full:
                bin_of_size += [number for number in bins[:num_full] for _ in range(per_bin)]
                open_bins.add_bins(free - per_bin * size, bins[:num_full])
                num_left -= num_full * per_bin
                bins = bins[num_full:]
            if bins and num_left:  # the last sizes of the run do not fill a bin
                bin_of_size += [bins[0]] * num_left
                open_bins.add_bins(free - num_left * size, bins[:1])
                num_left, bins = 0, bins[1:]
            if bins:
                open_bins.add_bins(free, bins)
    return numpy.array(bin_of_size)


class _BinsByFreeCapacity:
    """Bins that are not full, grouped by their free capacity, for best-fit packing."""

    def __init__(self) -> None:
        self._bins: dict[int, list[range]] = {}  # by free capacity
        self._bit_field = 0  # bit n is set if there is a bin with the free capacity n

    def add_bins(self, free: int, bins: range) -> None:
        """Add bins that all have the same free capacity.

        Args:
            free: Free capacity of each bin. 0: the bins are full and are not added.
            bins: Indices of the bins.
        """
        if free:
            self._bins.setdefault(free, []).append(bins)
            self._bit_field |= 1 << free

    def pop_fullest(self, size: int) -> tuple[int, range]:
        """Remove and return some of the bins with the smallest free capacity that is at least `size`.

        Returns:
            Pair of (free capacity of the bins, range of their indices); (0, empty range) if `size` fits into no bin.
        """
        fitting = self._bit_field >> size
        if not fitting:
            return 0, range(0)
        lowest_bit = fitting & -fitting
        free = size + lowest_bit.bit_length() - 1
        stack = self._bins[free]
        bins = stack.pop()
        if not stack:
            self._bit_field ^= 1 << free
        return free, bins
