"""Weighted mixture of several datasets. Its order is a function of the seed and the position."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import index as to_index
from typing import Any
from zlib import crc32

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headway.core.runtime.seed import mix_seed
from headway.errors import ConfigError, DataError, StateError
from headway.language_data.joined_tables import JoinedTables
from headway.language_data.mixture_reader import MixtureReader, State
from headway.language_data.mixture_weights import Weights, read_weights
from headway.language_data.quotas import QuotaOrder, limit_weight_ranges
from headway.language_data.shuffling import shuffle_offsets
from headway.language_data.source_index import attach_source

_END_ACTIONS = ("repeat", "stop", "drop")
_NUM_KEPT_BLOCKS = 16


class Mixture(Dataset[Any]):
    """Dataset that takes samples from several datasets in proportion to their weights.

    The order is a function of the seed and the position. So it does not depend on the number of ranks and workers,
    and a resumed run continues it exactly. In every prefix of the order, the number of samples from each source
    differs by less than one from the number that the weights call for. If all sources have random access, the sample
    at any position can be found without reading earlier ones.

    Each source is shuffled separately, with a new permutation for each pass over it. Read the mixture without further
    shuffling: `prepare` refuses a DataLoader with `shuffle=True`. If a source can only be iterated, the mixture is an
    `IterableDataset` (`StreamMixture`).

    If all sources repeat and have random access, each epoch continues the order of the previous one: epoch 1 begins
    at position `num_samples`. Otherwise each epoch restarts the order. Sources with random access are then shuffled
    differently in each epoch.

    A sample is what the source returns, or also contains the index of its source (see `adds_source`). Create the mixture
    with equal arguments on all ranks. Arguments after `sources` are keyword-only.

    Args:
        sources: Datasets by name. Each has a length and random access, or can only be iterated.
        weights: Weights of the sources, by name or in order. They need not add up to 1. A dict `{update: weights}`
            changes the weights at the given updates. Default: the lengths of the sources. Required if a source can
            only be iterated.
        seed: Seed of the shuffling, 0 or more. Default: 0.
        shuffle: Whether to shuffle each source. A source that is a mixture keeps its own order. Default: True.
        when_source_ends: Action after the last sample of a source. "repeat" (the default) reads the source again. "stop"
            ends the epoch at the position that needs another sample of the source. "drop" continues with the other
            sources in proportion to their weights. Pass one value for all sources, or a dict from source names to
            values.
        num_samples: Maximum number of samples in an epoch. Default: the number of samples until `when_source_ends` ends
            the epoch; if all sources repeat, the total number of samples in the sources.
        samples_per_update: Number of samples per update over all ranks. Required if weights change at updates.
        adds_source: Whether to add the index of the source to each sample: as `sample["source"]`, or as the last item
            of a tuple. Any other sample becomes a pair (sample, index). None (the default): only to mappings.

    Attributes:
        names: Names of the sources. The index of a source is its position in this tuple.
        sources: Datasets, in the order of `names`.
        end_actions: Action at the end of each source, in the order of `names`: "repeat", "stop" or "drop".
        weight_ranges: Ranges of positions with constant weights, as given by `weights`. The end of a source does not change
            them.

    Raises:
        ConfigError: If an argument is out of range or does not fit the sources, or if nothing ends an epoch.
        DataError: If a source is empty, is not a dataset, or is an iterator that can be read only once.

    Example::

        mixture = Mixture({"web": web, "code": code}, weights={"web": 0.8, "code": 0.2}, num_samples=10_000)
        loader = accelerator.prepare(DataLoader(mixture, batch_size=8))
    """

    orders_samples = True
    """Whether the dataset defines the order of its samples, so that a loader must not shuffle them."""

    def __new__(cls, sources: Any = None, *args: Any, **kwargs: Any) -> "Mixture":
        """Create a `StreamMixture` if some source can only be iterated, else a `Mixture`."""
        if cls is Mixture and isinstance(sources, Mapping) and any(map(_is_stream, sources.values())):
            return super().__new__(StreamMixture)
        return super().__new__(cls)

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        weights: Weights | Mapping[int, Weights] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        when_source_ends: str | Mapping[str, str] = "repeat",
        num_samples: int | None = None,
        samples_per_update: int | None = None,
        adds_source: bool | None = None,
    ) -> None:
        self.names = _check_sources(sources)
        self.sources = tuple(sources.values())
        self.seed = _check_number("seed", seed, least=0)
        self.shuffle = shuffle
        self.adds_source = adds_source
        self.end_actions = _read_end_actions(when_source_ends, self.names)
        lengths = [None if _is_stream(source) else len(source) for source in self.sources]
        if weights is None:
            if None in lengths:
                stream = self.names[lengths.index(None)]
                raise ConfigError(
                    f"weights= is needed, because source {stream!r} has no length; give each source a weight"
                )
            weights = [length or 0 for length in lengths]
        self.weight_ranges = read_weights(weights, self.names, samples_per_update)
        if num_samples is not None:
            _check_number("num_samples", num_samples, least=1)
        self._lengths = lengths
        # Some dataset wrappers set the attribute to None, so check its value, as torch's fetcher does.
        self._reads_batches = [bool(getattr(source, "__getitems__", None)) for source in self.sources]
        self._tables = JoinedTables(self.sources)
        self._prepare_order(num_samples)
        # Persistent workers keep their copy of the dataset, so only shared memory shows them a new epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def _prepare_order(self, num_samples: int | None) -> None:
        """Compute the order of the sources and the length of an epoch.

        Raises:
            ConfigError: If neither a source nor `num_samples` ends an epoch.
        """
        lengths = [length or 0 for length in self._lengths]
        limits = [length if action == "drop" else None for length, action in zip(lengths, self.end_actions)]
        weight_ranges, end = limit_weight_ranges(self.weight_ranges, limits)
        self._order = QuotaOrder(weight_ranges, end)
        ends = [end]  # positions at which an epoch ends; None for a reason that does not end it
        for source, action in enumerate(self.end_actions):
            if action == "stop":
                ends.append(self._order.find_sample_position(source, lengths[source]))
        self._continues_across_epochs = set(self.end_actions) == {"repeat"}
        if num_samples is None and self._continues_across_epochs:
            num_samples = sum(lengths)
        ends.append(num_samples)
        known_ends = [each for each in ends if each is not None]
        if not known_ends:
            raise ConfigError(
                f"when_source_ends={dict(zip(self.names, self.end_actions))} never ends an epoch, because some sources repeat and no "
                "source with a weight stops; pass num_samples=, the samples of an epoch"
            )
        self._num_samples = min(known_ends)
        self._blocks: OrderedDict[tuple[int, int], tuple[list[int], list[int]]] = OrderedDict()
        self._description = self._describe_order()

    @property
    def epoch(self) -> int:
        """Index of the current epoch, from 0. The positions of samples are counted within this epoch."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Select an epoch, from 0. A prepared loader calls it before each pass."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, position: int) -> Any:
        """Return the sample at a position of the current epoch.

        Raises:
            IndexError: If the position is negative or not less than the length.
            DataError: If the sample already has an entry "source", and the index of its source would be added.
        """
        source, index = self.find_sample(position)
        return attach_source(self.sources[source][index], source, self.adds_source)

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at several positions of the current epoch. A DataLoader calls it for each batch.

        A source with `__getitems__`, such as a `datasets.Dataset`, reads its samples of the batch at once. If all
        sources are `datasets.Dataset`s with equal columns and formats, all samples are read at once.

        Raises:
            IndexError: If a position is negative or not less than the length.
            DataError: If a sample already has an entry "source", and the index of its source would be added.
        """
        epoch = self.epoch
        locations = [self._find_sample(position, epoch) for position in positions]
        samples = self._tables.read(locations) or self._read_by_source(locations)
        return [attach_source(sample, source, self.adds_source) for sample, (source, _) in zip(samples, locations)]

    def _read_by_source(self, locations: list[tuple[int, int]]) -> list[Any]:
        """Return samples, reading all samples of a source at once if it has `__getitems__`.

        Args:
            locations: Pairs of (index of the source, index of the sample in this source).
        """
        samples: list[Any] = [None] * len(locations)
        places_by_source: dict[int, list[int]] = {}  # places in `samples`
        for place, (source, index) in enumerate(locations):
            if self._reads_batches[source]:
                places_by_source.setdefault(source, []).append(place)
            else:
                samples[place] = self.sources[source][index]
        for source, places in places_by_source.items():
            batch = self.sources[source].__getitems__([locations[place][1] for place in places])
            for place, sample in zip(places, batch):
                samples[place] = sample
        return samples

    def find_sample(self, position: int) -> tuple[int, int]:
        """Return the index of the source at a position of the current epoch, and the sample's index in that source.

        Args:
            position: Position in the current epoch, from 0 to the length minus 1.

        Returns:
            Pair of (index of the source in `names`, index with which the source returns the sample).

        Raises:
            IndexError: If the position is negative or not less than the length.
        """
        return self._find_sample(position, self.epoch)

    def _find_sample(self, position: int, epoch: int) -> tuple[int, int]:
        """Return the sample at a position of an epoch, as a pair (index of the source, index of the sample in the source).

        The order is computed block by block, and the last blocks are kept.

        Raises:
            IndexError: If the position is out of range.
        """
        position = to_index(position)
        if not 0 <= position < self._num_samples:
            raise IndexError(f"position {position} of a mixture of {self._num_samples} samples")
        if self._continues_across_epochs:
            position += epoch * self._num_samples
            epoch = 0
        number, offset = divmod(position, self._order.block_size)
        block = self._blocks.get((epoch, number))
        if block is None:
            block = self._blocks[epoch, number] = self._compute_block(number, epoch)
            if len(self._blocks) > _NUM_KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        sources, indices = block
        return sources[offset], indices[offset]

    def count_samples(self, position: int) -> dict[str, int]:
        """Return the number of samples that each source contributes to the current epoch before a position.

        Args:
            position: Position in the current epoch.

        Returns:
            Number of samples by source name.

        Raises:
            IndexError: If the position is negative or greater than the length.
        """
        position = to_index(position)
        if not 0 <= position <= self._num_samples:
            raise IndexError(f"position {position} of a mixture of {self._num_samples} samples")
        start = self.epoch * self._num_samples if self._continues_across_epochs else 0
        counts_at_start = self._order.count_samples(start)
        counts = self._order.count_samples(start + position)
        return {
            name: count - count_at_start for name, count, count_at_start in zip(self.names, counts, counts_at_start)
        }

    def describe_order(self) -> str:
        """Return a text that identifies the order of the samples. A resumed run compares it with the saved text."""
        return self._description

    def _describe_order(self) -> str:
        """Return a text that is equal for mixtures with the same order. It contains a hash of the settings."""
        # Checkpoints contain this digest, so it depends on the names of `WeightRange` and its fields (through repr).
        settings = (
            self.names,
            self._lengths,
            self.weight_ranges,
            self.seed,
            self.shuffle,
            self.end_actions,
            self._num_samples,
        )
        digest = blake2b(repr(settings).encode(), digest_size=6).hexdigest()
        return f"a Mixture of {', '.join(self.names)} with the order {digest}"

    def _compute_block(self, number: int, epoch: int) -> tuple[list[int], list[int]]:
        """Return two lists for block `number` of the order: source indices, and sample indices within the sources."""
        block = self._order.compute_block(number)
        sources = numpy.array(block.sources)
        indices = numpy.empty(len(sources), dtype=numpy.int64)
        for source, count in enumerate(block.counts):
            places = numpy.flatnonzero(sources == source)
            if len(places):
                indices[places] = self._find_indices(source, count, len(places), epoch)
        return block.sources, indices.tolist()

    def _find_indices(self, source: int, first: int, count: int, epoch: int) -> Any:
        """Return the dataset indices of consecutive samples in the shuffled order of a source with a length.

        If the source is not shuffled, they are consecutive indices, which start again at 0 after the last sample.

        Args:
            source: Index of the source.
            first: Number of samples of the source that come earlier in the order.
            count: Number of samples to return.
            epoch: Index of the epoch; 0 if each epoch continues the order of the previous one.
        """
        length = self._lengths[source]
        assert length is not None
        passes, offsets = numpy.divmod(numpy.arange(first, first + count), length)
        if not self.shuffle or not count or getattr(self.sources[source], "orders_samples", False):
            return offsets
        source_key = crc32(self.names[source].encode())
        for pass_number in range(int(passes[0]), int(passes[-1]) + 1):
            is_in_pass = passes == pass_number
            seed = mix_seed(self.seed, source_key, epoch, pass_number)
            offsets[is_in_pass] = shuffle_offsets(offsets[is_in_pass], length, seed)
        return offsets

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": OrderedDict()}


class StreamMixture(Mixture, IterableDataset[Any]):
    """Mixture in which some sources can only be iterated. Create it with `Mixture`, which documents the arguments.

    Sources take turns as in a `Mixture`. In every prefix of the order, the number of samples from each source differs
    by less than one from the number that the weights call for. After a source has been dropped, this number is counted
    from the position at which it was dropped. An iterable source is read in its own order. Each epoch reads all sources
    from their start. Before each pass over an iterable source, its method `set_epoch` is called, if it has one.

    Read it with at most one worker. Each rank reads all samples and keeps its share of them, so the order does not
    depend on the number of ranks. `state_dict` contains the position, including the states of sources that have a
    `state_dict`. After a resume, other iterable sources are read again up to the position. Register the mixture with
    `accelerator.register_for_checkpointing` to resume without reading samples again.
    """

    def _prepare_order(self, num_samples: int | None) -> None:
        """Reset the position. The order of the sources and the end of an epoch are only found by reading.

        Args:
            num_samples: Maximum number of samples in an epoch. None: an epoch ends only when the sources end it.
        """
        self._limit = num_samples
        self._continues_across_epochs = False
        self._num_samples = num_samples or 0
        self._description = self._describe_order()
        self._reader: MixtureReader | None = None
        self._loaded: State | None = None

    def __len__(self) -> int:
        """Return `num_samples`.

        Raises:
            TypeError: If `num_samples` was not given, or an epoch can end earlier because some source does not repeat.
        """
        if self._limit is None or set(self.end_actions) != {"repeat"}:
            raise TypeError(
                "the length of a mixture with iterable sources is known only with num_samples= and repeated sources"
            )
        return self._limit

    def __getitem__(self, position: int) -> Any:
        """Raise `DataError`, because iterable sources have no random access."""
        raise DataError("a mixture with iterable sources has no positions; iterate it")

    def find_sample(self, position: int) -> tuple[int, int]:
        """Raise `DataError`, because iterable sources have no random access."""
        raise DataError("a mixture with iterable sources has no positions; iterate it")

    def count_samples(self, position: int) -> dict[str, int]:
        """Raise `DataError`, because the samples of an iterable source can only be counted by reading them."""
        raise DataError("a mixture with iterable sources counts no samples in advance; count batch['source']")

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the current epoch, from the loaded position or else from the first one.

        Raises:
            DataError: If several workers would read the sources, or a source yields no sample. Also if a sample already
                has an entry "source", and the index of its source would be added.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise DataError(
                f"{worker.num_workers} workers would each read all samples of a mixture with iterable sources, so each sample "
                "would be read several times; pass num_workers=0 or 1 to the DataLoader, or give sources with a length and indices"
            )
        loaded, self._loaded = self._loaded, None
        self._reader = MixtureReader(self, self.epoch, loaded)
        return self._reader.read(self._limit)

    def state_dict(self) -> State:
        """Return the state from which iteration continues after the most recently yielded sample.

        Before the first iteration, this is the loaded state, or else a state with position 0.
        """
        if self._reader is None:
            return self._loaded or {"position": 0}
        return self._reader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Make the next iteration continue from a state that `state_dict` returned, in the epoch of that state.

        A state with position 0 makes the next iteration start at the beginning of the current epoch.

        Raises:
            StateError: If the state belongs to a mixture with another order, such as other sources, weights or seed.
        """
        if state.get("mixture", self._description) != self._description:
            raise StateError(
                f"the position was saved by {state['mixture']}, and this is {self._description}; some samples would be read twice "
                "and others never. Give the mixture the sources, weights and seed that it had"
            )
        self._loaded = copy.deepcopy(state) if state["position"] else None
        self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the reader, whose iterators cannot be pickled."""
        return {**self.__dict__, "_reader": None}


def _is_stream(source: object) -> bool:
    """Whether a source is only iterated: an `IterableDataset`, or an iterable without a length or random access."""
    if isinstance(source, IterableDataset):
        return True
    return not (hasattr(source, "__getitem__") and hasattr(source, "__len__")) and hasattr(source, "__iter__")


def _check_sources(sources: Any) -> tuple[str, ...]:
    """Return the names of a mixture's sources, or raise an error if the sources are invalid.

    Raises:
        ConfigError: If `sources` is not a mapping, is empty, or has names that are not strings.
        DataError: If a source is empty, is not a dataset, or is an iterator that can be read only once.
    """
    if not isinstance(sources, Mapping) or not sources:
        received = "no sources" if not sources else f"a {type(sources).__name__}"
        raise ConfigError(f"a Mixture got {received}; give datasets by name, such as {{'web': first, 'code': second}}")
    for name, source in sources.items():
        if not isinstance(name, str):
            raise ConfigError(f"a source of a Mixture has the name {name!r}; give names that are text")
        if _is_stream(source):
            if _is_iterator(source):
                raise DataError(
                    f"source {name!r} is an iterator ({type(source).__name__}), which can be read only once; give a dataset that "
                    "starts from its first sample each time that it is iterated"
                )
            continue
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise DataError(
                f"source {name!r} is a {type(source).__name__}; give a dataset with a length and indices, or an iterable dataset"
            )
        if len(source) == 0:
            raise DataError(f"source {name!r} is empty; leave it out of the mixture")
    return tuple(sources)


def _is_iterator(source: object) -> bool:
    """Whether a source is an iterator, which cannot be read a second time."""
    return isinstance(source, Iterator)


def _read_end_actions(actions: str | Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the action at the end of each source: "repeat", "stop" or "drop".

    Args:
        actions: One action for all sources, or actions by name.
        names: Names of the sources.

    Raises:
        ConfigError: If an action is unknown, or the names differ from the names of the sources.
    """
    by_name = dict.fromkeys(names, actions) if isinstance(actions, str) else actions
    if not isinstance(by_name, Mapping) or set(by_name) != set(names) or not set(by_name.values()) <= set(_END_ACTIONS):
        raise ConfigError(
            f"when_source_ends={by_name!r}; give {', '.join(map(repr, _END_ACTIONS))}, or one of these words for each of "
            f"{list(names)}"
        )
    return tuple(by_name[name] for name in names)


def _check_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}; give a whole number, {least} or more")
    return value
