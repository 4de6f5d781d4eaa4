"""Order in which a mixture's sources take turns. In every prefix, each source is within one sample of its share.

The share of source i after n samples is a function A_i(n), and the shares add up to n. The number of samples x_i(n) must
satisfy |x_i(n) - A_i(n)| < 1 at every n. This is the chairman assignment problem (R. Tijdeman, Discrete Mathematics 32,
1980). It is solved with deadlines, as in fair scheduling (Baruah et al., Algorithmica 15, 1996). Sample j of source i
may be placed once A_i exceeds j - 1. Its deadline is the position at which A_i reaches j: by then, it must have been
placed. Among the samples that may be placed, the one with the earliest deadline is next.

With this rule alone, the order would have to be computed from the start. To compute any position directly, positions
are divided into blocks. The counts at the start of a block are computed in two steps. First, the counts one block
earlier are estimated without any history: the integer part of each share, plus one for the sources with the earliest
deadlines. Second, samples are placed by their deadlines from there to the start of the block. Within the block, samples
are then placed such that its end has the counts computed for the next block. This is always possible, because the
samples that must be placed in an interval of positions never outnumber the positions. So the cost of a block does not
depend on its index. All arithmetic is exact, on integers.

When the weight of a source becomes 0, a fraction of one of its samples can be due. If the fractions of all such sources
add up to one or more samples, this number of samples is placed within one block. The remaining fractions are kept until
the weights are positive again. Near a change of weights, the counts at the start of a block are computed from those
at the start of the previous block.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm
from sys import maxsize

_SMALLEST_BLOCK = 1024
LARGEST_BLOCK = 1 << 20
"""Number of consecutive samples of a mixture among which each source must have at least one.

This limits the size of the blocks in which the order is computed. The weight of a source must therefore be 0, or at
least 1 / `LARGEST_BLOCK` of the sum of all weights.
"""
_LONGEST_PERIOD = 1 << 16


@dataclass(frozen=True)
class WeightRange:
    """Range of positions in which the weights of the sources are constant.

    A position is the place of one sample in a mixture's order, counted from 0. The share of source i before position n
    is the number of samples, in general a fraction, that the weights grant to the source up to there. It is
    `(base[i] + rates[i] * (n - start)) / scale`.

    Attributes:
        start: First position.
        base: Share of each source before `start`, in samples, times `scale`.
        rates: Increase of each source's share per position, times `scale`.
        scale: Common denominator of the fractions.
    """

    start: int
    base: tuple[int, ...]
    rates: tuple[int, ...]
    scale: int


def build_weight_ranges(starts: Sequence[int], weights: Sequence[Sequence[Fraction]]) -> list[WeightRange]:
    """Build the ranges of positions with constant weights (`WeightRange`) for a schedule of weights.

    A position is the place of one sample in a mixture's order, counted from 0.

    Args:
        starts: First position of each range, ascending from 0.
        weights: Weights of the sources in each range. Each row adds up to 1.
    """
    shares = [Fraction(0)] * len(weights[0])
    weight_ranges = []
    for index, (start, range_weights) in enumerate(zip(starts, weights)):
        if index > 0:
            num_positions = start - starts[index - 1]
            shares = [share + rate * num_positions for share, rate in zip(shares, weights[index - 1])]
        weight_ranges.append(_make_weight_range(start, shares, range_weights))
    return weight_ranges


def limit_weight_ranges(
    weight_ranges: Sequence[WeightRange], limits: Sequence[int | None]
) -> tuple[list[WeightRange], int | None]:
    """Limit the number of samples that each source contributes.

    After a source has reached its limit, the other sources share its weight, in proportion to their own weights. The
    order ends where all remaining sources have the weight 0. A position is the place of one sample in that order.

    Args:
        weight_ranges: Ranges of positions with constant weights, without limits.
        limits: Maximum number of samples per source, or None for a source without a limit.

    Returns:
        Pair of (ranges of positions with the changed weights, position at which the order ends). The position is None
            if the order never ends.
    """
    shares = [Fraction(0)] * len(limits)
    limited: list[WeightRange] = []
    position = 0
    ends = [*(weight_range.start for weight_range in weight_ranges[1:]), None]
    for weight_range, end in zip(weight_ranges, ends):
        weights = [Fraction(rate, weight_range.scale) for rate in weight_range.rates]
        while end is None or position < end:
            rates = _drop_limited_weights(weights, shares, limits)
            if rates is None:
                limited.append(_make_weight_range(position, shares, [Fraction(0)] * len(limits)))
                return limited, position
            num_positions = _count_positions_to_limit(rates, shares, limits)
            if end is not None:
                num_positions = end - position if num_positions is None else min(num_positions, end - position)
            if num_positions is None:
                limited.append(_make_weight_range(position, shares, rates))
                return limited, None
            if num_positions:
                shares_after = [share + rate * num_positions for share, rate in zip(shares, rates)]
            else:  # some source reaches its limit within this position, which becomes a range of its own
                num_positions = 1
                shares_after = _grant_one_position(weights, shares, limits)
                rates = [share_after - share for share_after, share in zip(shares_after, shares)]
            limited.append(_make_weight_range(position, shares, rates))
            shares = shares_after
            position += num_positions
    return limited, position


def drop_weights(weight_range: WeightRange, dropped_sources: Collection[int]) -> list[Fraction] | None:
    """Return the weight of each source without some dropped sources, scaled so that the weights add up to 1.

    Return None if the weights of all remaining sources are 0.

    Args:
        weight_range: Range of a mixture's order in which the weights are constant.
        dropped_sources: Indices of the dropped sources. Their weights are 0 in the result.
    """
    rates = [0 if source in dropped_sources else rate for source, rate in enumerate(weight_range.rates)]
    return [Fraction(rate, sum(rates)) for rate in rates] if any(rates) else None


def _make_weight_range(start: int, shares: Sequence[Fraction], rates: Sequence[Fraction]) -> WeightRange:
    scale = lcm(*(fraction.denominator for fraction in (*shares, *rates)))
    base = tuple(int(share * scale) for share in shares)
    return WeightRange(start, base, tuple(int(rate * scale) for rate in rates), scale)


def _drop_limited_weights(
    weights: Sequence[Fraction], shares: Sequence[Fraction], limits: Sequence[int | None]
) -> list[Fraction] | None:
    """Return the weights of the sources that have not reached their limits, scaled to add up to 1.

    Args:
        weights: Weight of each source.
        shares: Number of samples, in general a fraction, that the weights grant to each source so far.
        limits: Maximum number of samples per source, or None for a source without a limit.

    Returns:
        One weight per source, which is 0 for sources at their limits. None if all would be 0.
    """
    rates = [
        weight if limit is None or share < limit else Fraction(0)
        for weight, share, limit in zip(weights, shares, limits)
    ]
    total = sum(rates)
    return [rate / total for rate in rates] if total else None


def _count_positions_to_limit(
    rates: Sequence[Fraction], shares: Sequence[Fraction], limits: Sequence[int | None]
) -> int | None:
    """Return the largest number of further positions after which no source's share exceeds its limit.

    Return None if no source with a positive weight has a limit.

    Args:
        rates: Increase of each source's share per position.
        shares: Number of samples, in general a fraction, that the weights grant to each source so far.
        limits: Maximum number of samples per source, or None for a source without a limit.
    """
    num_positions = [
        int((limit - share) / rate) for rate, share, limit in zip(rates, shares, limits) if limit is not None and rate
    ]
    return min(num_positions) if num_positions else None


def _grant_one_position(
    weights: Sequence[Fraction], shares: Sequence[Fraction], limits: Sequence[int | None]
) -> list[Fraction]:
    """Return the share of each source after a position in which some sources reach their limits.

    A position is the place of one sample in a mixture's order, so one sample is divided among the sources. A source
    gets no more than its limit allows. The others get the rest in proportion to their weights.

    Args:
        weights: Weight of each source.
        shares: Number of samples, in general a fraction, that the weights grant to each source before the position.
        limits: Maximum number of samples per source, or None for a source without a limit.
    """
    shares_after = list(shares)
    rest = Fraction(1)  # part of the sample that is not divided yet
    while rest:
        rates = _drop_limited_weights(weights, shares_after, limits)
        if rates is None:
            break
        parts_to_limit = [
            (limit - share) / rate
            for rate, share, limit in zip(rates, shares_after, limits)
            if limit is not None and rate
        ]
        part = min([rest, *parts_to_limit])
        shares_after = [share + rate * part for share, rate in zip(shares_after, rates)]
        rest -= part
    # If a rest is left, no remaining source has a weight. It then completes samples of which a source has a fraction.
    for source, share in enumerate(shares_after):
        part = min(rest, -share % 1)
        shares_after[source] += part
        rest -= part
    return shares_after


@dataclass(frozen=True)
class QuotaBlock:
    """Block of consecutive positions in the order of a mixture, with the source at each position.

    A position is the place of one sample in the order, counted from 0.

    Attributes:
        start: First position.
        counts: Number of samples per source before `start`.
        sources: Index of the source at each position.
    """

    start: int
    counts: tuple[int, ...]
    sources: list[int]


class QuotaOrder:
    """Order in which a mixture takes samples from its sources, computed as a function of the position.

    A position is the place of one sample in the order, counted from 0. Positions are divided into blocks of
    `block_size`. A block is computed without those before it, except near a change of weights.

    Args:
        weight_ranges: Ranges of positions with constant weights. The first begins at position 0.
        end: Number of positions, or None if the order never ends.

    Attributes:
        num_sources: Number of sources.
        block_size: Number of positions in a block.
    """

    def __init__(self, weight_ranges: Sequence[WeightRange], end: int | None = None) -> None:
        self._weight_ranges = list(weight_ranges)
        self._end = maxsize if end is None else end
        self._starts = [weight_range.start for weight_range in weight_ranges]
        self.num_sources = len(weight_ranges[0].rates)
        self.block_size, self._is_periodic = _choose_block_size(weight_ranges)
        self._sources_by_key: dict[tuple[int, ...], list[int]] = {}
        self._counts_by_block: dict[int, tuple[int, ...]] = {}
        # The cache belongs to the object. A cache in the class would keep every object alive.
        self._compute_count_before_block = lru_cache(maxsize=64)(self._compute_count_before_block)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[object, ...]:
        return QuotaOrder, (self._weight_ranges, None if self._end == maxsize else self._end)

    def compute_block(self, number: int) -> QuotaBlock:
        """Return block `number` of the order: `block_size` consecutive positions, or fewer at the end of the order."""
        begin, end = number * self.block_size, min(self._end, (number + 1) * self.block_size)
        counts = self._count_before_block(number)
        key = self._make_block_key(begin, end)
        sources = self._sources_by_key.get(key) if key else None
        if sources is None:
            max_counts = self._count_before_block(number + 1) if end < self._end else None
            sources, _ = self._place_samples(counts, begin, end, max_counts)
            if key:
                self._sources_by_key[key] = sources
        return QuotaBlock(begin, counts, sources)

    def _make_block_key(self, begin: int, end: int) -> tuple[int, ...] | None:
        """Return a key under which the sources of a block can be cached, or None if they cannot be cached.

        Blocks with equal keys have the same source at each position.

        Args:
            begin: First position of the block.
            end: Position after the block.
        """
        size = self.block_size
        if not self._is_periodic or end - begin < size:
            return None
        range_index = self._find_range_index(begin)
        weight_range = self._weight_ranges[range_index]
        fractions = [
            (base + rate * (begin - weight_range.start)) % weight_range.scale
            for base, rate in zip(weight_range.base, weight_range.rates)
        ]
        # The counts at a block's two ends depend on the shares from two blocks before it to one block after it, so the
        # weights must be constant there. If the shares are integers, they are the counts, and the block alone matters.
        # This does not hold if the counts were computed from the previous block, as they are near a change of weights.
        is_near_change = range_index > 0 and not (
            self._has_constant_weights_before(begin // size) and self._has_constant_weights_before(end // size)
        )
        first, last = begin, end - 1
        if any(fractions) or is_near_change:
            first, last = begin - 2 * size, end + size
        is_constant = range_index == self._find_range_index(max(0, first)) == self._find_range_index(last)
        return (range_index, *fractions) if is_constant else None

    def count_samples(self, position: int) -> list[int]:
        """Return the number of samples that each source contributes to the order before `position`."""
        block = self.compute_block(position // self.block_size)
        counts = list(block.counts)
        for source in block.sources[: position - block.start]:
            counts[source] += 1
        return counts

    def find_sample_position(self, source: int, number: int) -> int | None:
        """Return the position of a source's sample in the order, or None if the weights never grant it.

        Args:
            source: Index of the source.
            number: Number of the sample among those of its source, counted from 0.
        """
        release, _ = self._find_release_and_deadline(source, number + 1, 0)
        if release == maxsize:
            return None
        block_number = release // self.block_size
        # A fraction of a sample that is due when a source's weight becomes 0 is placed within the next block, or never.
        ends_with_weight_0 = not self._weight_ranges[-1].rates[source]
        last_block = self._starts[-1] // self.block_size + 2 if ends_with_weight_0 else maxsize
        while block_number <= last_block and block_number * self.block_size < self._end:
            block = self.compute_block(block_number)
            num_placed = block.counts[source]
            for offset, placed_source in enumerate(block.sources):
                if placed_source == source:
                    if num_placed == number:
                        return block.start + offset
                    num_placed += 1
            block_number += 1
        return None

    # ---------------------------------------------------------------- shares

    def _find_range_index(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1

    def _split_shares(self, position: int) -> tuple[list[int], list[bool]]:
        """Return the integer part of each source's share before a position, and whether it has a fractional part.

        The share is the number of samples, in general a fraction, that the weights grant to the source.
        """
        weight_range = self._weight_ranges[self._find_range_index(position)]
        num_positions = position - weight_range.start
        parts = [
            divmod(base + rate * num_positions, weight_range.scale)
            for base, rate in zip(weight_range.base, weight_range.rates)
        ]
        return [integer_part for integer_part, _ in parts], [fraction > 0 for _, fraction in parts]

    def _find_release_and_deadline(self, source: int, number: int, range_index: int) -> tuple[int, int]:
        """Return the release and the deadline of a sample, which limit its position in the order.

        The release is the first position at which the sample may be placed. The deadline is the position before which
        it must have been placed. A sample that the weights never grant in full has the deadline `sys.maxsize`. If
        they grant no part of it, its release is `sys.maxsize`, too.

        Args:
            source: Index of the source.
            number: Number of the sample in its source, counted from 1.
            range_index: Index of the range of constant weights (`WeightRange`) in which to begin the search. A position
                before the start of that range is not exact: the release is then its start, and the deadline is at most
                its start.
        """
        release = maxsize
        weight_ranges = self._weight_ranges
        for index in range(range_index, len(weight_ranges)):
            weight_range = weight_ranges[index]
            rate = weight_range.rates[source]
            if not rate:
                continue
            end = weight_ranges[index + 1].start if index + 1 < len(weight_ranges) else maxsize
            # Growth of the share, times `scale`, from the start of the range until the share reaches `number`.
            growth = number * weight_range.scale - weight_range.base[source]
            if release == maxsize:
                # The share exceeds number - 1 at the end of this position for the first time.
                first_position = weight_range.start + max(0, (growth - weight_range.scale) // rate)
                if first_position < end:
                    release = first_position
            deadline = weight_range.start + -(-growth // rate)
            if deadline <= end:
                return release, deadline
        return release, maxsize

    # ---------------------------------------------------------------- counts at block boundaries

    def _count_before_block(self, number: int) -> tuple[int, ...]:
        """Return the number of samples per source before a block of positions.

        If the weights are constant in the two preceding blocks, the numbers are computed without earlier blocks.
        Otherwise, they are computed from the numbers before the preceding block.

        Args:
            number: Index of the block.
        """
        first = number
        while first and first not in self._counts_by_block and not self._has_constant_weights_before(first):
            first -= 1
        if first in self._counts_by_block:
            counts = self._counts_by_block[first]
        else:
            counts = self._compute_count_before_block(first)
        for block_number in range(first, number):
            begin = block_number * self.block_size
            counts = tuple(self._place_samples(counts, begin, begin + self.block_size)[1])
            self._counts_by_block[block_number + 1] = counts
        return counts

    def _has_constant_weights_before(self, number: int) -> bool:
        """Whether the weights are constant in the two blocks of positions before block `number`."""
        end = number * self.block_size
        return number >= 2 and self._find_range_index(end - 2 * self.block_size) == self._find_range_index(end - 1)

    def _compute_count_before_block(self, number: int) -> tuple[int, ...]:
        """Return how many samples of each source come before a block of positions, without computing earlier blocks.

        The weights of the sources must be constant in the two blocks before this block.

        Args:
            number: Index of the block.
        """
        if number == 0:
            return (0,) * self.num_sources
        end = number * self.block_size
        integer_parts, have_fractions = self._split_shares(end)
        if not any(have_fractions):
            return tuple(integer_parts)
        counts = self._estimate_counts(number - 1)
        return tuple(self._place_samples(counts, end - self.block_size, end)[1])

    def _estimate_counts(self, number: int) -> list[int]:
        """Estimate the number of samples per source before a block of positions.

        The estimate is the integer part of each source's share, which is the number of samples that the weights grant
        to it. If these add up to less than the number of positions before the block, the estimates of the sources with
        the earliest deadlines are increased by one. If the weight of a source has become 0, the source's number
        at the end of the first full block after this change is used instead.

        Args:
            number: Index of the block.
        """
        begin = number * self.block_size
        index = self._find_range_index(begin)
        weight_range = self._weight_ranges[index]
        integer_parts, have_fractions = self._split_shares(begin)
        counts = list(integer_parts)
        candidates = []  # pairs of (deadline of the next sample, source)
        for source in range(self.num_sources):
            if not have_fractions[source]:
                continue
            if weight_range.rates[source]:
                _, deadline = self._find_release_and_deadline(source, integer_parts[source] + 1, index)
                candidates.append((deadline, source))
            else:
                first_full_block = -(-weight_range.start // self.block_size)
                counts[source] = self._count_before_block(first_full_block + 1)[source]
        num_missing = max(0, begin - sum(counts))
        for _, source in sorted(candidates)[:num_missing]:
            counts[source] += 1
        return counts

    def _place_samples(
        self, counts: Sequence[int], begin: int, end: int, max_counts: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Choose the source at each position of a range: the one whose next sample has the earliest deadline.

        The deadline of a sample is the position before which it must be placed, so that its source gets the samples
        that the weights grant to it.

        Args:
            counts: Number of samples per source before `begin`.
            begin: First position.
            end: Position after the last.
            max_counts: Maximum number of samples per source before `end`. Default: None, no maximum.

        Returns:
            Pair of (index of the source at each position, number of samples per source before `end`).
        """
        counts_after = list(counts)
        sources: list[int] = []
        position = begin
        while position < end:
            index = self._find_range_index(position)
            range_end = self._weight_ranges[index + 1].start if index + 1 < len(self._weight_ranges) else maxsize
            sources += self._place_samples_in_range(index, counts_after, position, min(end, range_end), max_counts)
            position = range_end
        return sources, counts_after

    def _place_samples_in_range(
        self, index: int, counts: list[int], begin: int, end: int, max_counts: Sequence[int] | None
    ) -> list[int]:
        """Return the source at each position of a range with constant weights, and update `counts`.

        Args:
            index: Index of the `WeightRange` (range of constant weights) that contains the positions.
            counts: Number of samples per source before `begin`. Overwritten with the numbers before `end`.
            begin: First position.
            end: Position after the last.
            max_counts: Maximum number of samples per source before `end`; None for no limit.
        """
        rates, num_sources = self._weight_ranges[index].rates, self.num_sources
        # Samples that may be placed from each position on. A sample is the number `deadline * num_sources + source`,
        # which sorts by deadline first, then by source.
        released: list[list[int]] = [[] for _ in range(begin, end)]
        for source, (integer_part, has_fraction) in enumerate(zip(*self._split_shares(end))):
            last_sample = integer_part + (has_fraction and rates[source] > 0)
            if max_counts is not None:
                last_sample = min(last_sample, max_counts[source])
            first_sample = counts[source] + 1
            for release, deadline in self._list_releases_and_deadlines(index, source, first_sample, last_sample):
                if release < end:
                    released[max(0, release - begin)].append(deadline * num_sources + source)
        released[0] += [deadline * num_sources + source for deadline, source in self._list_owed_samples(index, counts)]
        heap: list[int] = []
        sources: list[int] = []
        for offset, new_samples in enumerate(released):
            for sample in new_samples:
                heappush(heap, sample)
            if not heap:  # no sample may be placed here yet, so take one that is released next
                next_samples = next((later for later in released[offset + 1 :] if later), None)
                if next_samples is None:
                    break
                heap.append(next_samples.pop())
            source = heappop(heap) % num_sources
            sources.append(source)
            counts[source] += 1
        return sources

    def _list_owed_samples(self, index: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the samples that sources must still contribute although their weight has become 0.

        Such a source may be owed a fraction of a sample. Only whole samples, summed over these sources, are placed.

        Args:
            index: Index of the range of constant weights (`WeightRange`).
            counts: Number of samples per source, at the start of the range or later in it.

        Returns:
            Pairs of (deadline, source), one for each sample.
        """
        weight_range = self._weight_ranges[index]
        base, scale = weight_range.base, weight_range.scale
        paused_sources = [
            source for source in range(self.num_sources) if not weight_range.rates[source] and base[source] % scale
        ]
        if not paused_sources:
            return []
        num_owed = sum(base[source] - counts[source] * scale for source in paused_sources) // scale
        # The sources with the largest fractions contribute the owed samples.
        sources = [source for source in paused_sources if counts[source] * scale < base[source]]
        sources.sort(key=lambda source: (-(base[source] % scale), source))
        return [(weight_range.start + self.block_size, source) for source in sources[: max(0, num_owed)]]

    def _list_releases_and_deadlines(self, index: int, source: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the (release, deadline) pairs of several samples of a source.

        The release is the first position at which a sample may be placed. The deadline is the position before which
        it must have been placed.

        Args:
            index: Index of the range of constant weights (`WeightRange`) in which to begin the search. A position before
                the start of that range is not exact.
            source: Index of the source.
            first: Number of the first sample, counted from 1.
            last: Number of the last sample.
        """
        weight_range = self._weight_ranges[index]
        end = self._weight_ranges[index + 1].start if index + 1 < len(self._weight_ranges) else maxsize
        start, scale = weight_range.start, weight_range.scale
        base, rate = weight_range.base[source], weight_range.rates[source]
        is_inside_range = rate and start - (base - last * scale) // rate <= end
        if not is_inside_range:
            return [self._find_release_and_deadline(source, number, index) for number in range(first, last + 1)]
        # The same formulas as in `_find_release_and_deadline`, without a call for each sample.
        return [
            (start + (growth - scale) // rate, start - (-growth // rate))
            for growth in range(first * scale - base, last * scale - base + 1, scale)
        ]


def _choose_block_size(weight_ranges: Sequence[WeightRange]) -> tuple[int, bool]:
    """Choose the number of positions in a block.

    Each source with a positive weight must have at least one sample in a block. If the order of sources repeats after a
    short period in each range of constant weights, the size is a multiple of all these periods. Ranges of one position
    are ignored.

    Returns:
        Pair of (size of a block, whether it is a multiple of the periods).
    """
    long_ranges = [
        weight_range
        for index, weight_range in enumerate(weight_ranges)
        if index + 1 == len(weight_ranges) or weight_ranges[index + 1].start - weight_range.start > 1
    ]
    positions_per_sample = [
        -(-weight_range.scale // rate) for weight_range in long_ranges for rate in weight_range.rates if rate
    ]
    size = max([_SMALLEST_BLOCK, *positions_per_sample])
    period = 1
    for weight_range in long_ranges:
        period = lcm(period, *(Fraction(rate, weight_range.scale).denominator for rate in weight_range.rates))
        if period > _LONGEST_PERIOD:
            return size, False
    return -(-size // period) * period, True
