"""Order in which a mixture's sources take turns. In every prefix, each source is within one sample of its share.

The share of source i after n samples is a curve A_i(n), and the curves add up to n. The number of samples x_i(n) must
satisfy |x_i(n) - A_i(n)| < 1 at every n. This is the chairman assignment problem (R. Tijdeman, Discrete Mathematics 32,
1980). It is solved with deadlines, as in fair scheduling (Baruah et al., Algorithmica 15, 1996). Sample j of source i
may be placed once A_i exceeds j - 1. Its deadline is the position at which A_i reaches j: by then, it must have been
placed. Among the samples that may be placed, the one with the earliest deadline is next.

With this rule alone, the order would have to be computed from the start. To compute any position directly, positions
are divided into blocks. The counts at the start of a block are computed in two steps. First, the counts one block
earlier are estimated without any history: the integer part of each curve, plus one for the sources with the earliest
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


def build_pieces(starts: Sequence[int], weights: Sequence[Sequence[Fraction]]) -> list[WeightRange]:
    """Build the ranges of positions with constant weights (`WeightRange`) for a schedule of weights.

    A position is the place of one sample in a mixture's order, counted from 0.

    Args:
        starts: First position of each range, ascending from 0.
        weights: Weights of the sources in each range. Each row adds up to 1.
    """
    curves = [Fraction(0)] * len(weights[0])
    pieces = []
    for number, (start, row) in enumerate(zip(starts, weights)):
        if number:
            curves = [at + rate * (start - starts[number - 1]) for at, rate in zip(curves, weights[number - 1])]
        pieces.append(_scale_piece(start, curves, row))
    return pieces


def limit_pieces(pieces: Sequence[WeightRange], limits: Sequence[int | None]) -> tuple[list[WeightRange], int | None]:
    """Limit the number of samples that each source contributes.

    After a source has reached its limit, the other sources share its weight, in proportion to their own weights. The
    order ends where all remaining sources have the weight 0. A position is the place of one sample in that order.

    Args:
        pieces: Ranges of positions with constant weights, without limits.
        limits: Maximum number of samples per source, or None for a source without a limit.

    Returns:
        Pair of (ranges of positions with the changed weights, position at which the order ends). The position is None
            if the order never ends.
    """
    curves = [Fraction(0)] * len(limits)
    limited: list[WeightRange] = []
    position = 0
    for piece, end in zip(pieces, [*(piece.start for piece in pieces[1:]), None]):
        row = [Fraction(rate, piece.scale) for rate in piece.rates]
        while end is None or position < end:
            rates = _share_rates(row, curves, limits)
            if rates is None:
                limited.append(_scale_piece(position, curves, [Fraction(0)] * len(limits)))
                return limited, position
            steps = _count_steps_to_limit(rates, curves, limits)
            if end is not None:
                steps = end - position if steps is None else min(steps, end - position)
            if steps is None:
                limited.append(_scale_piece(position, curves, rates))
                return limited, None
            if steps:
                following = [at + rate * steps for at, rate in zip(curves, rates)]
            else:
                steps, following = 1, _fill_position(row, curves, limits)
                rates = [later - at for later, at in zip(following, curves)]
            limited.append(_scale_piece(position, curves, rates))
            curves = following
            position += steps
    return limited, position


def share_rates(piece: WeightRange, dropped: Collection[int]) -> list[Fraction] | None:
    """Return the weight of each source without some dropped sources, scaled so that the weights add up to 1.

    Return None if the weights of all remaining sources are 0.

    Args:
        piece: Range of a mixture's order in which the weights are constant.
        dropped: Indices of the dropped sources. Their weights are 0 in the result.
    """
    rates = [0 if source in dropped else rate for source, rate in enumerate(piece.rates)]
    return [Fraction(rate, sum(rates)) for rate in rates] if any(rates) else None


def _scale_piece(start: int, curves: Sequence[Fraction], rates: Sequence[Fraction]) -> WeightRange:
    scale = lcm(*(each.denominator for each in (*curves, *rates)))
    return WeightRange(
        start, tuple(int(at * scale) for at in curves), tuple(int(rate * scale) for rate in rates), scale
    )


def _share_rates(
    row: Sequence[Fraction], curves: Sequence[Fraction], limits: Sequence[int | None]
) -> list[Fraction] | None:
    """Return the weights of the sources that have not reached their limits, scaled to add up to 1.

    Args:
        row: Weight of each source.
        curves: Number of samples, in general a fraction, that the weights have granted to each source so far.
        limits: Maximum number of samples per source, or None for a source without a limit.

    Returns:
        One weight per source, which is 0 for sources at their limits. None if all would be 0.
    """
    rates = [rate if limit is None or at < limit else Fraction(0) for rate, at, limit in zip(row, curves, limits)]
    total = sum(rates)
    return [rate / total for rate in rates] if total else None


def _count_steps_to_limit(
    rates: Sequence[Fraction], curves: Sequence[Fraction], limits: Sequence[int | None]
) -> int | None:
    """Return the largest number of further positions after which no source has been granted more than its limit.

    Return None if no source with a positive weight has a limit.

    Args:
        rates: Number of samples, as a fraction, that each source is granted per position.
        curves: Number of samples, in general a fraction, that each source has been granted so far.
        limits: Maximum number of samples per source, or None for a source without a limit.
    """
    steps = [int((limit - at) / rate) for rate, at, limit in zip(rates, curves, limits) if limit is not None and rate]
    return min(steps) if steps else None


def _fill_position(row: Sequence[Fraction], curves: Sequence[Fraction], limits: Sequence[int | None]) -> list[Fraction]:
    """Return the number of samples granted to each source after a position in which some sources reach their limits.

    A position is the place of one sample in a mixture's order, so one sample is divided among the sources. A source
    gets no more than its limit allows. The others share the rest in proportion to their weights.

    Args:
        row: Weight of each source.
        curves: Number of samples, in general a fraction, granted to each source before the position.
        limits: Maximum number of samples per source, or None for a source without a limit.
    """
    now = list(curves)
    rest = Fraction(1)
    while rest:
        rates = _share_rates(row, now, limits)
        if rates is None:
            break
        spans = [(limit - at) / rate for rate, at, limit in zip(rates, now, limits) if limit is not None and rate]
        span = min([rest, *spans])
        now = [at + rate * span for at, rate in zip(now, rates)]
        rest -= span
    # If a rest is left, no remaining source has a weight. It then completes samples of which a source has a fraction.
    for source, at in enumerate(now):
        added = min(rest, -at % 1)
        now[source] += added
        rest -= added
    return now


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
        pieces: Ranges of positions with constant weights. The first begins at position 0.
        end: Number of positions, or None if the order never ends.

    Attributes:
        num_sources: Number of sources.
        block_size: Number of positions in a block.
    """

    def __init__(self, pieces: Sequence[WeightRange], end: int | None = None) -> None:
        self._pieces = list(pieces)
        self._end = maxsize if end is None else end
        self._starts = [piece.start for piece in pieces]
        self.num_sources = len(pieces[0].rates)
        self.block_size, self._is_periodic = _choose_block_size(pieces)
        self._alike: dict[tuple[int, ...], list[int]] = {}
        self._followed: dict[int, tuple[int, ...]] = {}
        # The cache belongs to the object. A cache in the class would keep every object alive.
        self._compute_settled = lru_cache(maxsize=64)(self._compute_settled)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[object, ...]:
        return QuotaOrder, (self._pieces, None if self._end == maxsize else self._end)

    def read_block(self, number: int) -> QuotaBlock:
        """Return block `number` of the order: `block_size` consecutive positions, or fewer at the end of the order."""
        begin, end = number * self.block_size, min(self._end, (number + 1) * self.block_size)
        counts = self._find_boundary(number)
        key = self._describe_block(begin, end)
        sources = self._alike.get(key) if key else None
        if sources is None:
            last = self._find_boundary(number + 1) if end < self._end else None
            sources, _ = self._follow_deadlines(counts, begin, end, last)
            if key:
                self._alike[key] = sources
        return QuotaBlock(begin, counts, sources)

    def _describe_block(self, begin: int, end: int) -> tuple[int, ...] | None:
        """Return a key under which the sources of a block can be cached, or None if they cannot be cached.

        Blocks with equal keys have the same source at each position.

        Args:
            begin: First position of the block.
            end: Position after the block.
        """
        size = self.block_size
        if not self._is_periodic or end - begin < size:
            return None
        number = self._find_piece(begin)
        piece = self._pieces[number]
        parts = [(base + rate * (begin - piece.start)) % piece.scale for base, rate in zip(piece.base, piece.rates)]
        # The counts at a block's two ends depend on the curves from two blocks before it to one block after it, so the
        # weights must be constant there. If the curves are integers, they are the counts, and the block alone matters.
        # This does not hold if the counts were computed from the previous block, as they are near a change of weights.
        is_followed = not (self._is_settled(begin // size) and self._is_settled(end // size)) and number > 0
        first, last = (begin - 2 * size, end + size) if any(parts) or is_followed else (begin, end - 1)
        return (number, *parts) if number == self._find_piece(max(0, first)) == self._find_piece(last) else None

    def count(self, position: int) -> list[int]:
        """Return the number of samples that each source contributes to the order before `position`."""
        block = self.read_block(position // self.block_size)
        counts = list(block.counts)
        for source in block.sources[: position - block.start]:
            counts[source] += 1
        return counts

    def find_occurrence(self, source: int, number: int) -> int | None:
        """Return the position of a source's sample in the order, or None if the weights never grant it.

        Args:
            source: Index of the source.
            number: Number of the sample in its source, counted from 0.
        """
        release, _ = self._find_window(source, number + 1, 0)
        if release == maxsize:
            return None
        block_number = release // self.block_size
        # A fraction of a sample that is due when a source's weight becomes 0 is placed within the next block, or never.
        is_dropped = not self._pieces[-1].rates[source]
        last = self._starts[-1] // self.block_size + 2 if is_dropped else maxsize
        while block_number <= last and block_number * self.block_size < self._end:
            block = self.read_block(block_number)
            seen = block.counts[source]
            for offset, each in enumerate(block.sources):
                if each == source:
                    if seen == number:
                        return block.start + offset
                    seen += 1
            block_number += 1
        return None

    # ---------------------------------------------------------------- curves

    def _find_piece(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1

    def _read_curves(self, position: int) -> tuple[list[int], list[bool]]:
        """Return the integer part of each source's share before a position, and whether it has a fractional part.

        The share is the number of samples, in general a fraction, that the weights grant to the source.
        """
        piece = self._pieces[self._find_piece(position)]
        steps = position - piece.start
        parts = [divmod(base + rate * steps, piece.scale) for base, rate in zip(piece.base, piece.rates)]
        return [whole for whole, _ in parts], [rest > 0 for _, rest in parts]

    def _find_window(self, source: int, number: int, piece_number: int) -> tuple[int, int]:
        """Return the release and the deadline of a sample, which limit its position in the order.

        The release is the first position at which the sample may be placed. The deadline is the position before which
        it must have been placed. A sample that the weights never grant in full has the deadline `sys.maxsize`. If
        they grant no part of it, its release is `sys.maxsize`, too.

        Args:
            source: Index of the source.
            number: Number of the sample in its source, counted from 1.
            piece_number: Index of the range of constant weights (`WeightRange`) in which to begin the search. A position
                before the start of that range is not exact: the release is then its start, and the deadline is at most
                its start.
        """
        release = maxsize
        pieces = self._pieces
        for index in range(piece_number, len(pieces)):
            piece = pieces[index]
            rate = piece.rates[source]
            if not rate:
                continue
            end = pieces[index + 1].start if index + 1 < len(pieces) else maxsize
            missing = number * piece.scale - piece.base[source]
            if release == maxsize:
                # The curve exceeds number - 1 at the end of this position for the first time.
                first = piece.start + max(0, (missing - piece.scale) // rate)
                if first < end:
                    release = first
            deadline = piece.start + -(-missing // rate)
            if deadline <= end:
                return release, deadline
        return release, maxsize

    # ---------------------------------------------------------------- counts at block boundaries

    def _find_boundary(self, number: int) -> tuple[int, ...]:
        """Return the number of samples per source before a block of positions.

        If the weights are constant in the two preceding blocks, the numbers are computed without earlier blocks.
        Otherwise, they are computed from the numbers before the preceding block.

        Args:
            number: Index of the block.
        """
        first = number
        while first and first not in self._followed and not self._is_settled(first):
            first -= 1
        counts = self._compute_settled(first) if first not in self._followed else self._followed[first]
        for following in range(first + 1, number + 1):
            begin = (following - 1) * self.block_size
            counts = tuple(self._follow_deadlines(counts, begin, begin + self.block_size)[1])
            self._followed[following] = counts
        return counts

    def _is_settled(self, number: int) -> bool:
        """Whether the weights are constant in the two blocks of positions before block `number`."""
        end = number * self.block_size
        return number >= 2 and self._find_piece(end - 2 * self.block_size) == self._find_piece(end - 1)

    def _compute_settled(self, number: int) -> tuple[int, ...]:
        """Return how many samples of each source come before a block of positions, without computing earlier blocks.

        The weights of the sources must be constant in the two blocks before this block.

        Args:
            number: Index of the block.
        """
        if number == 0:
            return (0,) * self.num_sources
        end = number * self.block_size
        whole, is_broken = self._read_curves(end)
        if not any(is_broken):
            return tuple(whole)
        counts = self._estimate_counts(number - 1)
        return tuple(self._follow_deadlines(counts, end - self.block_size, end)[1])

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
        index = self._find_piece(begin)
        piece = self._pieces[index]
        whole, is_broken = self._read_curves(begin)
        counts = list(whole)
        candidates = []
        for source in range(self.num_sources):
            if is_broken[source] and piece.rates[source]:
                candidates.append((self._find_window(source, whole[source] + 1, index)[1], source))
            elif is_broken[source]:
                counts[source] = self._find_boundary(-(-piece.start // self.block_size) + 1)[source]
        for _, source in sorted(candidates)[: max(0, begin - sum(counts))]:
            counts[source] += 1
        return counts

    def _follow_deadlines(
        self, counts: Sequence[int], begin: int, end: int, last: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Choose the source at each position of a range: the one whose next sample has the earliest deadline.

        The deadline of a sample is the position before which it must be placed, so that its source gets the samples
        that the weights grant to it.

        Args:
            counts: Number of samples per source before `begin`.
            begin: First position.
            end: Position after the last.
            last: Maximum number of samples per source before `end`. None: no maximum.

        Returns:
            Pair of (index of the source at each position, number of samples per source before `end`).
        """
        now = list(counts)
        sources: list[int] = []
        while begin < end:
            index = self._find_piece(begin)
            following = self._pieces[index + 1].start if index + 1 < len(self._pieces) else maxsize
            sources += self._follow_piece(index, now, begin, min(end, following), last)
            begin = following
        return sources, now

    def _follow_piece(
        self, index: int, counts: list[int], begin: int, end: int, last: Sequence[int] | None
    ) -> list[int]:
        """Return the source at each position of a range with constant weights, and update `counts`.

        Args:
            index: Index of the `WeightRange` (range of constant weights) that contains the positions.
            counts: Number of samples per source before `begin`. Overwritten with the numbers before `end`.
            begin: First position.
            end: Position after the last.
            last: Maximum number of samples per source before `end`; None for no limit.
        """
        rates, num_sources = self._pieces[index].rates, self.num_sources
        arrivals: list[list[int]] = [[] for _ in range(begin, end)]
        for source, (whole, is_broken) in enumerate(zip(*self._read_curves(end))):
            number = whole + (is_broken and rates[source] > 0)
            if last is not None:
                number = min(number, last[source])
            for release, deadline in self._list_windows(index, source, counts[source] + 1, number):
                if release < end:
                    # One number sorts by deadline first, then by source.
                    arrivals[max(0, release - begin)].append(deadline * num_sources + source)
        arrivals[0] += [deadline * num_sources + source for deadline, source in self._list_owed(index, counts)]
        ready: list[int] = []
        sources: list[int] = []
        for offset, arrived in enumerate(arrivals):
            for each in arrived:
                heappush(ready, each)
            if not ready:
                following = next((later for later in arrivals[offset + 1 :] if later), None)
                if following is None:
                    break
                ready.append(following.pop())
            source = heappop(ready) % num_sources
            sources.append(source)
            counts[source] += 1
        return sources

    def _list_owed(self, index: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the samples that sources must still contribute although their weight has become 0.

        Such a source may be owed a fraction of a sample. Only whole samples, summed over these sources, are placed.

        Args:
            index: Index of the range of constant weights (`WeightRange`).
            counts: Number of samples per source, at the start of the range or later in it.

        Returns:
            Pairs of (deadline, source), one for each sample.
        """
        piece = self._pieces[index]
        paused = [
            source for source in range(self.num_sources) if not piece.rates[source] and piece.base[source] % piece.scale
        ]
        if not paused:
            return []
        owed = sum(piece.base[source] - counts[source] * piece.scale for source in paused) // piece.scale
        lacking = [source for source in paused if counts[source] * piece.scale < piece.base[source]]
        lacking.sort(key=lambda source: (-(piece.base[source] % piece.scale), source))
        return [(piece.start + self.block_size, source) for source in lacking[: max(0, owed)]]

    def _list_windows(self, index: int, source: int, first: int, last: int) -> list[tuple[int, int]]:
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
        piece = self._pieces[index]
        end = self._pieces[index + 1].start if index + 1 < len(self._pieces) else maxsize
        start, base, rate, scale = piece.start, piece.base[source], piece.rates[source], piece.scale
        if not rate or start - (base - last * scale) // rate > end:
            return [self._find_window(source, number, index) for number in range(first, last + 1)]
        return [
            (start + (number - scale) // rate, start - (-number // rate))
            for number in range(first * scale - base, last * scale - base + 1, scale)
        ]


def _choose_block_size(pieces: Sequence[WeightRange]) -> tuple[int, bool]:
    """Choose the number of positions in a block.

    Each source with a positive weight must have at least one sample in a block. If the order of sources repeats after a
    short period in each range of constant weights, the size is a multiple of all these periods. Ranges of one position
    are ignored.

    Returns:
        Pair of (size of a block, whether it is a multiple of the periods).
    """
    long = [
        piece
        for index, piece in enumerate(pieces)
        if index + 1 == len(pieces) or pieces[index + 1].start - piece.start > 1
    ]
    least = max((-(-piece.scale // rate) for piece in long for rate in piece.rates if rate), default=1)
    size = max(_SMALLEST_BLOCK, least)
    period = 1
    for piece in long:
        period = lcm(period, *(Fraction(rate, piece.scale).denominator for rate in piece.rates))
        if period > _LONGEST_PERIOD:
            return size, False
    return -(-size // period) * period, True
