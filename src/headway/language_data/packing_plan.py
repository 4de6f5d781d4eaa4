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
WINDOW = 16384
"""Default number of samples that are packed together. Larger windows save less than 0.2% more padding."""

_Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


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
    window: int = WINDOW,
) -> PackingPlan:
    """Assign samples to sequences. Equal arguments give equal plans on all machines.

    Args:
        lengths: Number of tokens in each sample. Empty samples are left out.
        sequence_length: Tokens per sequence.
        strategy: "best_fit": best-fit decreasing within windows of samples. "in_order": a sequence ends at the first
            sample that does not fit. "split": samples are joined and cut every `sequence_length` tokens.
        long_samples: Treatment of samples longer than a sequence, unless the strategy is "split": "error", "split"
            (into pieces) or "truncate" (drop the tokens beyond the sequence).
        seed: Seed of the order in which samples are packed. None: samples are packed in the order of `lengths`.
        window: Number of consecutive samples that "best_fit" packs together.

    Raises:
        ConfigError: If an argument is not allowed.
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
        return _join_and_cut(order, sizes[order], sequence_length)
    num_long = int((sizes > sequence_length).sum())
    if num_long and long_samples == "error":
        longest = int(sizes.argmax())
        raise DataError(
            f"{num_long} of {len(sizes)} samples are longer than a sequence of {sequence_length} tokens; the longest is sample "
            f"{longest} with {sizes[longest]}. Pass long_samples='split' (cut them into pieces) or 'truncate' (drop the rest), or a "
            "larger sequence length"
        )
    num_cut = 0
    if long_samples == "truncate":
        num_cut = int(numpy.maximum(sizes - sequence_length, 0).sum())
        sizes = numpy.minimum(sizes, sequence_length)
    samples, starts, stops = _cut_long(order, sizes[order], sequence_length)
    pack = _fill_in_order if strategy == "in_order" else _fill_best
    arrangement, counts = pack(stops - starts, sequence_length, window)
    return PackingPlan(
        sequence_length,
        samples[arrangement],
        starts[arrangement],
        stops[arrangement],
        numpy.concatenate([[0], numpy.cumsum(counts)]),
        num_cut,
    )


def _check_lengths(lengths: Sequence[int] | _Integers) -> _Integers:
    given = numpy.asarray(lengths)
    if given.ndim != 1 or (given.size and not numpy.issubdtype(given.dtype, numpy.integer)):
        raise DataError(
            f"lengths has the shape {given.shape} and the type {given.dtype}; give one whole number for each sample"
        )
    if given.size and given.min() < 0:
        raise DataError(f"lengths[{int(given.argmin())}] is {given.min()}; give the number of tokens, 0 or more")
    return given.astype(numpy.int64)


def _join_and_cut(order: _Integers, sizes: _Integers, capacity: int) -> PackingPlan:
    """Return the plan that concatenates all samples and cuts them every `capacity` tokens.

    Args:
        order: Index of each sample, in the order in which samples are packed.
        sizes: Number of tokens in each sample of `order`, 1 or more.
        capacity: Number of tokens per sequence.
    """
    ends = numpy.cumsum(sizes)
    total = int(ends[-1])
    cuts = numpy.union1d(ends, numpy.arange(capacity, total, capacity))  # where pieces end in the concatenated samples
    begins = numpy.concatenate([[0], cuts[:-1]])
    number = numpy.searchsorted(ends, begins, side="right")
    before = (ends - sizes)[number]
    num_sequences = -(-total // capacity)
    offsets = numpy.searchsorted(begins, numpy.arange(num_sequences) * capacity)
    return PackingPlan(
        capacity, order[number], begins - before, cuts - before, numpy.concatenate([offsets, [len(begins)]])
    )


def _cut_long(order: _Integers, sizes: _Integers, capacity: int) -> tuple[_Integers, _Integers, _Integers]:
    """Cut samples into pieces of at most `capacity` tokens.

    Args:
        order: Index of each sample, in the order in which samples are packed.
        sizes: Number of tokens in each sample of `order`, 1 or more.
        capacity: Number of tokens per sequence.

    Returns:
        Three arrays with one entry per piece: index of its sample, and start and stop of its tokens in the sample.
    """
    num_pieces = -(-sizes // capacity)
    first = numpy.cumsum(num_pieces) - num_pieces
    starts = (numpy.arange(int(num_pieces.sum())) - numpy.repeat(first, num_pieces)) * capacity
    stops = numpy.minimum(starts + capacity, numpy.repeat(sizes, num_pieces))
    return numpy.repeat(order, num_pieces), starts, stops


def _fill_in_order(sizes: _Integers, capacity: int, window: int) -> tuple[_Integers, list[int]]:
    """Fill sequences with pieces in the given order, without moving any piece.

    Args:
        sizes: Number of tokens in each piece, at most `capacity`.
        capacity: Number of tokens per sequence.
        window: Not used. `_fill_best` has the same arguments.

    Returns:
        Indices of the pieces in order, and the number of pieces in each sequence.
    """
    ends = numpy.cumsum(sizes)
    following: list[int] = numpy.searchsorted(ends, ends - sizes + capacity, side="right").tolist()
    counts, first = [], 0
    while first < len(sizes):
        counts.append(following[first] - first)
        first = following[first]
    return numpy.arange(len(sizes)), counts


def _fill_best(sizes: _Integers, capacity: int, window: int) -> tuple[_Integers, list[int]]:
    """Fill sequences with pieces by best-fit decreasing, separately for each window of `window` pieces.

    Args:
        sizes: Number of tokens in each piece, at most `capacity`.
        capacity: Number of tokens per sequence.
        window: Number of consecutive pieces that are packed together.

    Returns:
        Indices of the pieces in the order of the sequences, and the number of pieces in each sequence.
    """
    arrangements, counts = [], []
    for begin in range(0, len(sizes), window):
        part = sizes[begin : begin + window]
        decreasing = numpy.argsort(-part, kind="stable")
        bins = place_decreasing(part[decreasing], capacity)
        # Bins are numbered by decreasing longest piece. Give them the order in which these pieces come in the data, so
        # that neither long nor short samples come first.
        _, first_of_bin = numpy.unique(bins, return_index=True)
        rank = numpy.empty(len(first_of_bin), dtype=numpy.int64)
        rank[numpy.argsort(decreasing[first_of_bin])] = numpy.arange(len(first_of_bin))
        bin_of_piece = numpy.empty(len(part), dtype=numpy.int64)
        bin_of_piece[decreasing] = rank[bins]
        arrangements.append(begin + numpy.argsort(bin_of_piece, kind="stable"))
        counts += numpy.bincount(bin_of_piece).tolist()
    return numpy.concatenate(arrangements), counts


def place_decreasing(sizes: _Integers, capacity: int) -> _Integers:
    """Assign sizes to bins by best fit, and return the index of each size's bin.

    Each size goes into the fullest bin that has room for it.

    Args:
        sizes: Sizes in decreasing order, from 1 to `capacity`.
        capacity: Capacity of a bin.
    """
    placed: list[int] = []
    bins = _OpenBins()
    num_bins = 0
    bounds = numpy.flatnonzero(numpy.diff(sizes, prepend=0, append=0)).tolist()
    for place, end in pairwise(bounds):
        size, left = int(sizes[place]), end - place
        while left:
            room, chosen = bins.take_fullest(size)
            if not chosen:
                room = capacity
                chosen = range(num_bins, num_bins - (-left // (capacity // size)))
                num_bins = chosen.stop
            # Best fit fills one bin before it starts the next, because it prefers the bin with less room.
            per_bin = room // size
            num_full = min(len(chosen), left // per_bin)
            if num_full:
                placed += [number for number in chosen[:num_full] for _ in range(per_bin)]
                bins.add(room - per_bin * size, chosen[:num_full])
                left -= num_full * per_bin
                chosen = chosen[num_full:]
            if chosen and left:
                placed += [chosen[0]] * left
                bins.add(room - left * size, chosen[:1])
                left, chosen = 0, chosen[1:]
            if chosen:
                bins.add(room, chosen)
    return numpy.array(placed)


class _OpenBins:
    """Bins that are not full, grouped by their free capacity, for best-fit packing."""

    def __init__(self) -> None:
        self._by_room: dict[int, list[range]] = {}
        self._field = 0  # bit r is set if a bin has room for r

    def add(self, room: int, bins: range) -> None:
        """Add bins that all have the given free capacity.

        Args:
            room: Free capacity of each bin. 0: the bins are full and are not added.
            bins: Indices of the bins.
        """
        if room:
            self._by_room.setdefault(room, []).append(bins)
            self._field |= 1 << room

    def take_fullest(self, size: int) -> tuple[int, range]:
        """Remove and return some of the bins with the smallest free capacity that is at least `size`.

        Returns:
            Pair of (free capacity of the bins, range of their indices); (0, empty range) if no bin has room.
        """
        fitting = self._field >> size
        if not fitting:
            return 0, range(0)
        room = size + (fitting & -fitting).bit_length() - 1
        stack = self._by_room[room]
        bins = stack.pop()
        if not stack:
            self._field ^= 1 << room
        return room, bins
