"""`MixtureReader`: reading of one epoch of a mixture in which some sources can only be iterated."""

import copy
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy

from headway.core.runtime.seed import mix_seed
from headway.errors import DataError
from headway.language_data.quotas import QuotaOrder, WeightRange, build_weight_ranges, drop_weights
from headway.language_data.source_index import attach_source

State = dict[str, Any]
"""State of a `StreamMixture`, as `StreamMixture.state_dict` returns it."""


class ReadableMixture(Protocol):
    """The part of `StreamMixture` that a `MixtureReader` uses. It includes private members, since both are one mechanism.

    Attributes:
        names: Name of each source.
        sources: Dataset of each source.
        end_actions: What happens at the end of each source: "repeat", "stop" or "drop".
        weight_ranges: Ranges of positions in the mixture within which the weights of the sources are constant.
        adds_source: Whether the source's index is added to each sample. None: only to samples that are mappings.
        _lengths: Number of samples of each source. None for a source without a length.
    """

    names: tuple[str, ...]
    sources: tuple[Any, ...]
    end_actions: tuple[str, ...]
    weight_ranges: list[WeightRange]
    adds_source: bool | None
    _lengths: list[int | None]

    def _find_indices(self, source: int, first: int, count: int, epoch: int) -> Any:
        """Return the dataset indices of consecutive samples of a source with a length, in its shuffled order.

        Args:
            source: Index of the source.
            first: Position of the first sample, counted over all passes of the epoch.
            count: Number of samples.
            epoch: Index of the mixture's epoch, with which the order is drawn.
        """

    def describe_order(self) -> str:
        """Return a text that identifies the order of the samples."""


class MixtureReader:
    """Reading of one epoch of a `StreamMixture`. It records its position, from which a resumed run continues.

    Args:
        mixture: Mixture to read.
        epoch: Index of the epoch, which an epoch in `loaded_state` replaces.
        loaded_state: State to continue from, or None for the start.
    """

    def __init__(self, mixture: ReadableMixture, epoch: int, loaded_state: State | None) -> None:
        state: Mapping[str, Any] = loaded_state or {}
        num_sources = len(mixture.names)
        self._mixture = mixture
        self._epoch = state.get("epoch", epoch)
        self._position: int = state.get("position", 0)
        # One entry per source: completed passes, samples taken in the current pass, state of a source with `state_dict`.
        self._passes: list[int] = list(state.get("passes", [0] * num_sources))
        self._num_taken: list[int] = list(state.get("taken", [0] * num_sources))
        self._source_states: list[Any] = list(state.get("sources", [None] * num_sources))
        self._iterators: list[Iterator[Any] | None] = [None] * num_sources
        # Pairs of (position at which a source was dropped, source).
        self._dropped_sources: list[tuple[int, int]] = [(start, source) for start, source in state.get("ended", ())]
        self._order_start = self._dropped_sources[-1][0] if self._dropped_sources else 0
        self._order = self._build_order()

    def _build_order(self) -> QuotaOrder | None:
        """Return the order of the remaining sources, or None if no remaining source has a weight.

        Positions in the order are counted from the position at which a source was last dropped.
        """
        dropped_sources = {source for _, source in self._dropped_sources}
        weight_ranges, end = _drop_from_ranges(self._mixture.weight_ranges, self._order_start, dropped_sources)
        return QuotaOrder(weight_ranges, end) if weight_ranges else None

    def read(self, limit: int | None) -> Iterator[Any]:
        """Yield samples until position `limit` is reached or the mixture ends.

        Args:
            limit: Position of the first sample that is not read. None: read until the mixture ends.
        """
        mixture = self._mixture
        while self._order is not None and (limit is None or self._position < limit):
            block_number, offset = divmod(self._position - self._order_start, self._order.block_size)
            sources = self._order.compute_block(block_number).sources[offset:]
            if not sources:  # from here on, no remaining source has a weight
                return
            for source in sources:
                taken = self._take_sample(source)
                if not taken:
                    if mixture.end_actions[source] == "stop":
                        return
                    self._dropped_sources.append((self._position, source))
                    self._order_start = self._position
                    self._order = self._build_order()
                    break
                (sample,) = taken
                self._position += 1
                yield attach_source(sample, source, mixture.adds_source)
                if self._position == limit:
                    return

    def _take_sample(self, source: int) -> list[Any]:
        """Return a list with the next sample of a source, or an empty list if the source has ended.

        Any object can be a sample, so no value could mark the end. A source that repeats never ends. Its next pass begins instead.

        Raises:
            DataError: If a complete pass over the source yields no sample.
        """
        mixture = self._mixture
        while True:
            if self._iterators[source] is None:
                self._iterators[source] = self._open_source(source)
            iterator = self._iterators[source]
            assert iterator is not None
            for sample in iterator:
                self._num_taken[source] += 1
                return [sample]
            if not self._num_taken[source]:
                raise DataError(f"source {mixture.names[source]!r} gave no sample; leave it out of the mixture")
            if mixture.end_actions[source] != "repeat":
                return []
            self._passes[source] += 1
            self._num_taken[source] = 0
            self._source_states[source] = None
            self._iterators[source] = None

    def _open_source(self, source: int) -> Iterator[Any]:
        """Return an iterator over the remaining samples of a source's current pass."""
        mixture, dataset = self._mixture, self._mixture.sources[source]
        pass_number, num_taken = self._passes[source], self._num_taken[source]
        length = mixture._lengths[source]
        if length is not None:
            first = pass_number * length + num_taken
            indices = mixture._find_indices(source, first, length - num_taken, self._epoch)
            return (dataset[index] for index in numpy.asarray(indices).tolist())
        if callable(getattr(dataset, "set_epoch", None)):
            # Later passes of an epoch need another order, so they get a number that stands for (epoch, pass).
            dataset.set_epoch(mix_seed(self._epoch, pass_number) % (1 << 31) if pass_number else self._epoch)
        state = self._source_states[source]
        num_skipped = num_taken
        if state is not None:
            dataset.load_state_dict(copy.deepcopy(state))
            num_skipped = 0
        iterator: Iterator[Any] = iter(dataset)
        for _ in range(num_skipped):
            next(iterator, None)
        return iterator

    def state_dict(self) -> State:
        """Return the state from which reading continues after the most recently yielded sample.

        The keys are "mixture" (description of the order), "epoch", "position", "ended" (pairs of the position at which a
        source was dropped, and the source), and one list with an entry per source for each of "passes" (completed
        passes), "taken" (samples taken in the current pass) and "sources" (states of sources with `state_dict`).
        """
        return {
            "mixture": self._mixture.describe_order(),
            "epoch": self._epoch,
            "position": self._position,
            "passes": list(self._passes),
            "taken": list(self._num_taken),
            "ended": list(self._dropped_sources),
            "sources": [self._read_source_state(source) for source in range(len(self._passes))],
        }

    def _read_source_state(self, source: int) -> Any:
        """Return the current state of a source that can only be iterated; None if it has no `state_dict`."""
        dataset = self._mixture.sources[source]
        if self._mixture._lengths[source] is not None or not callable(getattr(dataset, "state_dict", None)):
            return None
        if self._iterators[source] is None:
            return self._source_states[source]
        return copy.deepcopy(dataset.state_dict())


def _drop_from_ranges(
    weight_ranges: list[WeightRange], start: int, dropped_sources: set[int]
) -> tuple[list[WeightRange], int | None]:
    """Return the ranges of constant weights from a position on, with the weight 0 for dropped sources, and their end.

    A position is the place of one sample in a mixture's order. Positions in the result are counted from `start`. In
    each range, the weights of the remaining sources are scaled to add up to 1. The order ends before the first range in
    which all of them have the weight 0, so the result can contain no range. The end is None if there is no such range.
    If `start` is 0 and nothing is dropped, `weight_ranges` is returned unchanged.

    Args:
        weight_ranges: Ranges of positions with constant weights, for all sources.
        start: Position from which the ranges are needed.
        dropped_sources: Indices of the dropped sources.
    """
    if not start and not dropped_sources:
        return weight_ranges, None
    starts: list[int] = []
    weights: list[list[Fraction]] = []
    end: int | None = None
    for index, weight_range in enumerate(weight_ranges):
        is_before_start = index + 1 < len(weight_ranges) and weight_ranges[index + 1].start <= start
        if is_before_start:
            continue
        range_weights = drop_weights(weight_range, dropped_sources)
        if range_weights is None:
            end = max(0, weight_range.start - start)
            break
        starts.append(max(0, weight_range.start - start))
        weights.append(range_weights)
    return (build_weight_ranges(starts, weights) if weights else []), end
