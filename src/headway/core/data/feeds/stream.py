"""`BatchFeed` for iterable datasets: every rank reads all samples, but collates only its slice of each step.

In one step (also called round), every rank gets one batch. The DataLoader that reads the dataset collects the raw
samples of all ranks for one step, with torch's own batching in each worker. The collate function then keeps this
rank's slice. So all ranks know every rank's row counts without an exchange. The user's dataset and worker_init_fn
run as in a plain loader. Skipped samples are read, but never collated or moved to a device. With several workers,
each worker reads its own copy of the dataset. A dataset that ignores `get_worker_info` therefore repeats its data,
as in plain torch. The workers deliver steps round-robin, and each worker's last step can be incomplete.

All ranks must read the same samples in the same order. The dataset may shuffle them in `set_epoch`, or with its own
`torch.Generator`, whose state is synchronized and saved. It may also use the global generators, whose states are
equal on all ranks while the dataset is read. Each rank's samples are compared with those of the other ranks
(`same_rounds.py`).

Some datasets have their own shards, such as Hugging Face's `datasets.IterableDataset`. If there are at least as many
shards as ranks, each rank reads only its shards. Ranks can then have different amounts of data, so they exchange
their row counts in each step, one step ahead. This exchange also informs all ranks of the end of the data. A rank
whose data is exhausted yields padding batches until the other ranks are done.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple
from warnings import warn

import numpy
import torch
from torch.utils.data import DataLoader, get_worker_info

from headway.core import extensions
from headway.core.data.compare.fingerprint import Fingerprint, pick_samples, take_fingerprint
from headway.core.data.feeds.protocol import UNCOUNTABLE, Delivery, State
from headway.core.data.feeds.shuffle_buffers import has_shuffle_buffer
from headway.core.data.feeds.worker import rebuild_loader, set_on_reader
from headway.core.data.sampling.dataset_rng import DatasetRNGStates
from headway.core.data.sampling.handover import DatasetHandover
from headway.core.data.sampling.loader_generator import BaseSeed, seed_generator
from headway.core.data.sampling.own_generators import OwnGenerators
from headway.core.data.sampling.rng import Agree
from headway.core.data.sampling.shard import RankBatch, SampleSplit, WindowSplit, mark_last
from headway.core.runtime.collectives.tree import copy_containers, find_batch_size
from headway.core.runtime.seed import mix_seed
from headway.errors import DataError, HeadwayWarning
from headway.log import get_logger

log = get_logger(__name__)

_KEPT = ("num_rounds", "round_size", "reading", "inner", "dataset")
"""Keys of a saved state that describe the position in a pass. The other keys hold RNG states."""


class StreamReadOrder(NamedTuple):
    """Numbers that determine the sample order of a pass. A saved state contains them as a list, with the key "reading".

    Attributes:
        num_shard_readers: Number of ranks that read different shards; 1 if each rank reads all samples of the dataset.
        num_workers: Number of workers of each rank; 1 if the rank reads without workers.
        samples_per_step: Number of samples that a worker reads per step. It is 1 if a single reader reads all samples,
            because the order is then the dataset's own for any number of samples per step.
    """

    num_shard_readers: int
    num_workers: int
    samples_per_step: int


class CollatedStep(NamedTuple):
    """Result of the collate function for one step, in which every rank gets one batch.

    Attributes:
        batches: One batch for each rank for which this process reads; empty if the step is skipped.
        shares: `RankBatch` of each batch, with its row counts.
        num_samples: Number of non-padding samples in the step on all ranks. If the loader does not batch, the
            dataset's items are counted.
        state: State of the StatefulDataLoader after this step, or of the dataset if it is saved; None if neither is
            needed.
        fingerprint: Fingerprint of some samples; None if ranks do not compare their data.
        loose: Last raw samples of a worker, if they are too few for a step. The leftovers of several workers together
            may be enough for one. None for a regular step.
    """

    batches: list[Any]
    shares: list[RankBatch]
    num_samples: int
    state: Any = None
    fingerprint: Fingerprint | None = None
    loose: list[Any] | None = None


RoundMarker = Callable[[Iterator[CollatedStep]], Iterator[tuple[CollatedStep, bool]]]
"""Function that marks the last step in an iterator over `CollatedStep` objects, one per step.

It returns an iterator over pairs of (`CollatedStep` of one step, whether it is the last step).
"""


class StreamCollate:
    """Collate function that receives the samples of all ranks for one step, and collates only the slices of some ranks.

    It is pickled to workers, and has separate state in each of them.

    Args:
        collate_fn: User's collate function.
        split: Rule that divides the samples of one step among the ranks.
        ranks: Ranks whose slices to collate.
        is_batched: Whether a slice consists of several samples. Otherwise it is one item of the dataset, which already
            is a batch.

    Attributes:
        is_compared: Whether to add a fingerprint of some raw samples to each result.
        keeps_loose: Whether to return samples uncollated if there are too few of them for one step.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], split: SampleSplit | WindowSplit, ranks: Sequence[int], is_batched: bool
    ) -> None:
        self.collate_fn = collate_fn
        self.split = split
        self.ranks = ranks
        self.is_batched = is_batched
        self.is_compared = False
        self.keeps_loose = False
        self.start_pass()

    def start_pass(self, num_skipped: int = 0, num_cut: int = 0) -> None:
        """Start a pass, and set the samples to skip at its start.

        Args:
            num_skipped: Number of steps whose samples are not collated. Default: 0.
            num_cut: Number of samples to drop from the first step after the skipped ones. Default: 0.
        """
        self._num_skipped = num_skipped
        self._num_cut = num_cut
        self._is_seeking = num_skipped > 0 or num_cut > 0
        self._num_seen = 0
        self._opening: list[Any] | None = None

    def __call__(self, samples: list[Any]) -> CollatedStep:
        """Collate the slices of this process's ranks from the raw samples of one step on all ranks.

        The result has no batches if the step is skipped, or if its samples are too few and `keeps_loose` is set.
        """
        if self.keeps_loose and len(samples) < (self.split.round_size or 0):
            return CollatedStep([], [], 0, loose=samples)
        if self._opening is None:
            self._opening = copy_containers(samples) if self.split.is_even else []
        if self._is_seeking:
            number = self._count_call()
            if number < self._num_skipped:
                return CollatedStep([], [], len(samples))
            self._is_seeking = False
            if number == self._num_skipped:
                samples = samples[self._num_cut :]
        return self.collate_round(samples, self._opening) if samples else CollatedStep([], [], 0)

    def _count_call(self) -> int:
        """Return the index, within the pass, of the step that is being collated.

        Workers produce steps round-robin, so the index depends on the worker.
        """
        worker = get_worker_info()
        number = self._num_seen if worker is None else self._num_seen * worker.num_workers + worker.id
        self._num_seen += 1
        return number

    def collate_round(self, samples: list[Any], opening: list[Any]) -> CollatedStep:
        """Collate the slices of this process's ranks from the raw samples of one step.

        Args:
            samples: Raw samples of the step on all ranks.
            opening: First samples of the epoch, with which an incomplete step is padded.
        """
        # Take it before the user's collate function, which may change the samples.
        fingerprint = take_fingerprint(pick_samples(samples)) if self.is_compared else None
        is_full, num_samples = len(samples) == self.split.round_size, len(samples)
        batches, shares = [], []
        counts = None if self.is_batched else self._count_items(samples)
        for rank in self.ranks:
            own, sample_counts = self.split.get_share(samples, rank, opening)
            # A collate function may modify its samples, so a repeated sample must be a separate copy.
            own = own if is_full else copy_containers(own)
            batch = self.collate_fn(own) if self.is_batched else self.collate_fn(own[0])
            num_rows = len(own) if self.is_batched else find_batch_size(batch)
            batches.append(batch)
            shares.append(RankBatch([], num_rows, sample_counts if self.is_batched else counts, num_samples, False))
        return CollatedStep(batches, shares, num_samples, fingerprint=fingerprint)

    def _count_items(self, items: list[Any]) -> tuple[int, ...] | None:
        rows = [self._count_item_rows(item) for item in items]
        if None not in rows:
            return (*(size for size in rows if size is not None), *[0] * (self.split.count - len(rows)))
        if self.split.count == 1:
            return None
        raise DataError(UNCOUNTABLE.format(what=f"an item of type {type(items[rows.index(None)]).__name__}"))

    def _count_item_rows(self, item: object) -> int | None:
        rows = find_batch_size(item)
        return find_batch_size(self.collate_fn(item)) if rows is None else rows


@dataclass(frozen=True)
class OwnShards:
    """Dataset shards that only this rank reads. The dataset must have `num_shards` and `shard()`.

    Attributes:
        dataset: Dataset with this rank's shards only.
        index: Index of this rank.
        count: Number of ranks.
        mark_last: Function that exchanges each step's row counts with the other ranks, and marks the last step.
        whole_split: Rule that divides the samples of the dataset if every rank reads it in full. Ranks do so when they
            resume a pass that was begun by a different number of ranks.
        mark_whole: Function that marks the last step when every rank reads the dataset in full. It also compares each
            step's samples on all ranks. None to mark the last step without a comparison.
    """

    dataset: Any
    index: int
    count: int
    mark_last: RoundMarker
    whole_split: SampleSplit
    mark_whole: RoundMarker | None


class StreamFeed:
    """`BatchFeed` that reads an iterable dataset.

    In one step (also called round), every rank gets one batch.

    Args:
        loader: User's loader, for its dataset and settings.
        split: Rule that divides samples into steps.
        ranks: Ranks whose batches this process reads: only its own rank, or all ranks if it reads for all.
        seed: Seed of the workers' random numbers.
        base_seed: Object that draws the workers' base seed as torch does. In a run with several ranks, the workers are
            seeded from `seed` instead.
        kind: Class of the DataLoader that reads the dataset. If it has a `state_dict` method, a resumed pass loads the
            saved state into the DataLoader. Default: torch's DataLoader.
        shards: Shards of this rank, if each rank reads different shards. Default: None, to read all samples of the
            dataset.
        agree: Function that returns rank 0's value on every rank. With it, the dataset's random generators start each
            epoch with rank 0's states. Default: None, to keep each rank's states.
        is_shared: Whether other ranks read the same samples and need equal random numbers in their workers. Default:
            False.
        worker_reads_one_rank: Whether each worker reads the batch of one rank at a time, so that the batches of a step
            come from successive workers. Otherwise each worker reads the batches of all ranks for a step. Default:
            False.
        agree_rounds: Function that compares the samples of each step on all ranks and marks the last step. Default:
            None, to mark the last step without a comparison.
        handover: Source of the global RNG states with which the dataset is read in a pass, equal on all ranks.
            Default: None, to let the dataset draw from this process's global generators.

    Attributes:
        source: User's loader.
        inner: DataLoader that reads the dataset.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: SampleSplit,
        ranks: Sequence[int],
        seed: int,
        base_seed: BaseSeed,
        kind: type[DataLoader[Any]] = DataLoader,
        shards: OwnShards | None = None,
        agree: Agree | None = None,
        is_shared: bool = False,
        worker_reads_one_rank: bool = False,
        agree_rounds: RoundMarker | None = None,
        handover: DatasetHandover | None = None,
    ) -> None:
        self._is_shared = is_shared
        self._worker_reads_one_rank = worker_reads_one_rank
        self.source = loader
        self._base_seed = base_seed
        self._mark_last = (shards.mark_last if shards is not None else agree_rounds) or mark_last
        self.seed = seed
        self._configured_shards = shards
        self._active_shards = shards  # None while a saved order is followed, because every rank then reads all samples
        self._followed_order: StreamReadOrder | None = None
        self._epoch = 0
        self._generators = OwnGenerators(loader.dataset, agree)
        self._collate = StreamCollate(loader.collate_fn, split, ranks, is_batched=loader.batch_size is not None)
        self._collate.is_compared = agree_rounds is not None
        self._configured_split = split
        # Split of the pass if `keep_window` were not used. Not the configured one while a saved order is followed.
        self._split_without_window = split
        self._kind = kind
        self.inner = self._build_loader()
        self._is_stateful = hasattr(self.inner, "state_dict")
        # Whether the dataset is read with separate global RNG states. Workers do not need them, because they have RNG
        # states of their own. Nor does a stateful loader, which does not read samples again when it is resumed.
        self._isolates_dataset_rng = not (self._is_stateful or self.inner.num_workers)
        self._dataset_rng = DatasetRNGStates()  # stays empty if the dataset does not get its own RNG states
        self._handover = handover if self._isolates_dataset_rng else None
        self._num_rounds = 0
        self._inner_state: Any = None
        self._keeps_dataset_state = False
        self._records_dataset_state = False
        self._has_dataset_position = False
        self._dataset_state: Any = None
        self._loaded: State = {}

    def _build_loader(self) -> DataLoader[Any]:
        changes: dict[str, Any] = {} if self._active_shards is None else {"dataset": self._active_shards.dataset}
        if self._followed_order is not None:  # a single reader has to read the dataset in the order of the saved pass
            dataset = self._build_ordered(self._followed_order)
            changes = {"dataset": dataset, "num_workers": min(1, self.source.num_workers)}
        split = self._collate.split
        # With drop_last, torch drops each worker's incomplete last batch. To torch, a batch is here a whole round, with
        # the samples of all ranks, so too much would be dropped.
        self._collate.keeps_loose = (
            isinstance(split, SampleSplit)
            and split.drop_last
            and split.count > 1
            and self._collate.is_batched
            and self.source.num_workers > 1
            and self._followed_order is None
            and not (self._worker_reads_one_rank or hasattr(self._kind, "state_dict"))
        )
        return rebuild_loader(
            self.source,
            self._kind,
            batch_size=(split.round_size or 0) // split.count if self._joins_worker_batches else split.round_size,
            drop_last=split.drop_last and not self._collate.keeps_loose,
            collate_fn=list if self._joins_worker_batches else self._collate,
            **changes,
        )

    @property
    def _joins_worker_batches(self) -> bool:
        return self._worker_reads_one_rank and self._followed_order is None

    @property
    def is_even(self) -> bool:
        """Whether an incomplete last step is completed with repeated samples, so that every rank gets a full batch."""
        return self._collate.split.is_even

    @is_even.setter
    def is_even(self, value: bool) -> None:
        self._collate.split = replace(self._collate.split, is_even=value)

    @property
    def round_size(self) -> int:
        """Number of samples that all ranks together get per step.

        If the loader does not batch (`batch_size=None`), the dataset's items are counted.
        """
        return (self._collate.split.round_size or 0) * (1 if self._active_shards is None else self._active_shards.count)

    @property
    def step_size(self) -> int:
        """Number of samples per step over all ranks, as configured in the user's DataLoader.

        Unlike `round_size`, it ignores `keep_window`.
        """
        return self._split_without_window.round_size * (1 if self._active_shards is None else self._active_shards.count)

    def can_fit_window(self, window: int, num_rounds: int) -> bool:
        """Whether `num_rounds` equal steps can hold exactly `window` samples per update.

        Batches may be smaller than the configured batch size, but not larger. Always False if the loader does not
        batch or if each rank reads different shards.

        Args:
            window: Number of samples per gradient update over all ranks.
            num_rounds: Number of batches per rank and update.
        """
        is_cut = self._configured_shards is None and self._collate.is_batched and window % num_rounds == 0
        return is_cut and window // num_rounds <= self._split_without_window.round_size

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Use `window` samples per gradient update from the next pass on.

        Args:
            window: Number of samples per update over all ranks; 0 to return to the user's settings.
            num_rounds: Number of batches per rank and update.
            unit: With drop_last, an incomplete last update is truncated to a multiple of this number of samples.
        """
        wanted: SampleSplit | WindowSplit = self._split_without_window
        if window:
            wanted = WindowSplit(window // num_rounds, 1, wanted.count, unit if wanted.drop_last else 1)
        now = self._collate.split
        wanted = replace(wanted, is_even=now.is_even)
        if wanted != now:
            self._collate.split, is_pinning = wanted, self.inner.pin_memory
            self.inner = self._build_loader()
            self.inner.pin_memory = is_pinning  # may have been set for the device transfer

    def __len__(self) -> int:
        split = SampleSplit(self.round_size, 1, self._collate.split.drop_last)
        return split.count_rounds(len(self.source.dataset))  # type: ignore[arg-type]

    def open_pass(self) -> None:
        """Draw the random numbers that torch's DataLoader draws in `iter()`."""
        self._dataset_rng.end_pass()
        self._base_seed.draw_seed()

    def start_pass(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Start a pass.

        Skipped samples are read but not collated, unless the pass resumes from a saved state of the StatefulDataLoader
        or of the dataset. In that case, skipped samples are not read.

        Args:
            epoch: Number of the epoch.
            consumed: Number of non-padding samples after which to start.
            num_skipped: If not 0, number of batches per rank after which to start. `consumed` is then ignored.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).

        Raises:
            DataError: If the pass is resumed, and the saved order of the samples cannot be read any more. The iterator
                also raises it if the ranks' samples differ.
        """
        is_resumed = bool(consumed and not num_skipped)
        loaded = self._loaded if is_resumed else {}
        self._choose_read_order(_get_read_order(loaded), epoch)
        self._seed_pass(epoch)
        self._loaded = {}
        self._choose_dataset_recording()
        if self._records_dataset_state:
            if loaded.get("dataset") is not None:
                return consumed, self._resume_from_dataset(loaded)
            self._dataset_state = copy.deepcopy(self.source.dataset.state_dict())  # type: ignore[attr-defined]
        num_rounds, num_cut = (num_skipped, 0) if num_skipped else self._find_start(consumed, loaded)
        self._num_rounds = num_rounds
        self._inner_state = loaded.get("inner")
        if self._inner_state is not None:
            return consumed, self._resume_from_loader()
        return self._skip_to(num_rounds, num_cut)

    def _seed_pass(self, epoch: int) -> None:
        """Seed the workers, and start the dataset's own generators and its separate global RNG states.

        Args:
            epoch: Number of the epoch.
        """
        # Ranks that read one stream need equal random numbers in their workers; ranks with different shards need
        # different ones.
        shards = self._active_shards
        seed_generator(self.inner, mix_seed(self.seed, epoch, 0 if shards is None else 1 + shards.index))
        reads_alone = shards is None and self._split_without_window.count == 1 and not self._is_shared
        self._base_seed.start_pass(self.inner, is_given=reads_alone)
        self._generators.start_epoch()
        is_shared = self._handover is not None and self._handover.is_needed
        self._dataset_rng.start_pass(self._handover if is_shared else None)

    def _choose_dataset_recording(self) -> None:
        """Determine whether the dataset's state is recorded after each step of this pass, and discard earlier states."""
        is_whole = self.inner.dataset is self.source.dataset and not (self._is_stateful or self.inner.num_workers)
        self._records_dataset_state = self._keeps_dataset_state and is_whole
        self._has_dataset_position = False
        self._dataset_state = None

    def _resume_from_dataset(self, loaded: State) -> Iterator[Delivery]:
        """Load the dataset's saved state, and return an iterator over the batches after it.

        Args:
            loaded: Saved state of the pass. It contains the dataset's state.
        """
        self.source.dataset.load_state_dict(copy.deepcopy(loaded["dataset"]))  # type: ignore[attr-defined]
        self._dataset_state = loaded["dataset"]
        self._has_dataset_position = True
        self._num_rounds = int(loaded.get("num_rounds", 0))
        self._inner_state = None
        self._collate.start_pass()
        return self._deliver_batches(self._mark_rounds())

    def _resume_from_loader(self) -> Iterator[Delivery]:
        """Load the saved state of the StatefulDataLoader, and return an iterator over the batches after it."""
        self._collate.start_pass()
        self.inner.load_state_dict(self._inner_state)  # type: ignore[attr-defined]
        return self._deliver_batches(self._mark_rounds())

    def _skip_to(self, num_rounds: int, num_cut: int) -> tuple[int, Iterator[Delivery]]:
        """Read the dataset from its first sample. Skipped samples are collated only by persistent workers.

        Args:
            num_rounds: Number of steps to skip.
            num_cut: Number of samples to skip in the following step.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).
        """
        if self.inner.persistent_workers and not num_cut:
            # Persistent workers would continue to skip in the next pass if this one ends too early.
            self._collate.start_pass()
        else:
            self._collate.start_pass(num_rounds, num_cut)
        rounds = self._mark_rounds()
        consumed = num_cut + sum(collated.num_samples for collated, _ in islice(rounds, num_rounds))
        return consumed, self._deliver_batches(rounds)

    def keep_dataset_state(self, is_kept: bool) -> None:
        """Set whether saved positions include the dataset's `state_dict()` after each step, from the next pass on.

        The states are needed if the script registers the dataset for checkpointing. Loading a checkpoint then restores
        the dataset at a position after the consumed samples. Without the dataset's state, the loader would skip these
        samples a second time.

        The setting takes effect only if this process reads all samples of the dataset without workers and without a
        StatefulDataLoader.

        Args:
            is_kept: Whether to include the dataset's state.

        Raises:
            DataError: If `is_kept` is True and the dataset shuffles with a buffer. The dataset's state lacks the
                samples in the buffer.
        """
        if is_kept and has_shuffle_buffer(self.source.dataset):
            raise DataError(
                "the registered stream is shuffled by a buffer, and datasets saves its state without the samples in the buffer, so a "
                "resumed run would lose them. Leave out register_for_checkpointing(dataset): the loader finds its position by "
                "reading the stream again. headway.ShardedDataset shuffles files by a buffer that can be resumed without reading"
            )
        self._keeps_dataset_state = is_kept

    def follow_pass(self, epoch: int) -> None:
        """Record that a pass starts that another process reads for this rank. Nothing is read.

        No random numbers are drawn, because `open_pass` has drawn those of an iterable dataset's loader.

        Args:
            epoch: Unused.
        """
        self._base_seed.start_pass(self.inner, is_given=False)

    def _find_start(self, consumed: int, loaded: State) -> tuple[int, int]:
        """Return where a pass starts, as a pair of (steps to skip, samples to skip in the following step).

        Warn if the sizes of the steps have changed and the saved state does not describe the order of the samples.

        Args:
            consumed: Number of samples consumed in the epoch, on all ranks together.
            loaded: Saved state of the pass; empty if there is none.

        Raises:
            DataError: If the order of the samples has changed since the state was saved, and the saved order cannot be
                read any more.
        """
        before = _get_read_order(loaded)
        if before is not None and before != self._read_order:
            name = type(self.source.dataset).__name__
            raise DataError(_load_turns().describe_other_order(name, consumed, before, self._read_order))
        if self._followed_order is None and loaded.get("round_size") == self.round_size:
            return int(loaded["num_rounds"]), 0
        if before is None and consumed and (self._active_shards is not None or self.inner.num_workers > 1):
            is_whole = self._active_shards is None
            readers = "Several workers read in turn" if is_whole else "Each rank reads its own shards"
            warn(
                f"a stream is resumed after {consumed} samples with rounds of {self.round_size} samples instead of "
                f"{loaded.get('round_size', 'an unknown number')}. {readers}, so some samples may be read twice and others not at "
                "all. Resume with the same number of ranks and the same batch size to be exact",
                HeadwayWarning,
                stacklevel=2,
            )
        return divmod(consumed, self.round_size)

    def _choose_read_order(self, saved: StreamReadOrder | None, epoch: int) -> None:
        """Choose the sample order of a pass: the order of the saved pass that it continues, or this run's own order.

        If the two orders differ and the saved one can be followed, every rank follows it by reading all samples of the
        dataset, with at most one worker.

        Args:
            saved: Sample order of the saved pass; None if the pass starts from the beginning.
            epoch: Number of the epoch.
        """
        is_followed = saved is not None and saved != self._default_read_order and self._can_follow(saved)
        if not is_followed and self._followed_order is None:
            return
        self._followed_order, self._epoch = saved if is_followed else None, epoch
        shards = self._configured_shards
        if shards is not None:
            self._active_shards = None if is_followed else shards
            split = shards.whole_split if is_followed else self._configured_split
            self._split_without_window = split
            self._collate.split = replace(split, is_even=self._collate.split.is_even)
            self._collate.ranks = (shards.index,) if is_followed else (0,)
            self._collate.is_compared = is_followed and shards.mark_whole is not None
            self._mark_last = (shards.mark_whole or mark_last) if is_followed else shards.mark_last
        is_pinning = self.inner.pin_memory
        self.inner = self._build_loader()
        self.inner.pin_memory = is_pinning
        if is_followed and (shards is not None or self.source.num_workers > 1):
            log.warning_once(_load_turns().describe_whole_reading(type(self.source.dataset).__name__, saved))

    def _can_follow(self, order: StreamReadOrder) -> bool:
        """Whether a single reader can read the dataset in the order of a saved pass.

        This requires that the saved pass had one reader per rank, and that the dataset has enough shards.

        Args:
            order: Sample order of the saved pass.
        """
        num_ranks = order.num_shard_readers
        return order.num_workers == 1 and (num_ranks == 1 or is_shardable(self.source.dataset, num_ranks))

    def _build_ordered(self, order: StreamReadOrder) -> Any:
        dataset, num_ranks = self.source.dataset, order.num_shard_readers
        if num_ranks == 1:
            return dataset
        return _load_turns().ShardTurns(dataset, num_ranks, order.samples_per_step, self.source.drop_last, self._epoch)

    @property
    def _read_order(self) -> StreamReadOrder:
        """Sample order of the current pass."""
        return self._followed_order or self._default_read_order

    @property
    def _default_read_order(self) -> StreamReadOrder:
        """Sample order of a pass that does not continue a saved one."""
        num_workers = max(1, self.source.num_workers)
        if self._configured_shards is not None:
            size = self._configured_split.round_size or 1
            return StreamReadOrder(self._configured_shards.count, num_workers, size)
        if num_workers == 1:
            return StreamReadOrder(1, 1, 1)
        size = self._collate.split.round_size or 1
        num_ranks = self._split_without_window.count if self._worker_reads_one_rank else 1
        return StreamReadOrder(1, num_workers, size // num_ranks)

    def _mark_rounds(self) -> Iterator[tuple[CollatedStep, bool]]:
        return self._mark_last(self._attach_states(self._read_rounds()))

    def _read_rounds(self) -> Iterator[CollatedStep]:
        if self._joins_worker_batches:
            return self._join_batches(iter(self.inner))
        if self._collate.keeps_loose:
            return self._regroup_leftovers(iter(self.inner))
        if not self._isolates_dataset_rng:
            return iter(self.inner)
        return self._read_isolated(self._dataset_rng.call_with_states(lambda: iter(self.inner)))

    def _join_batches(self, batches: Iterator[list[Any]]) -> Iterator[CollatedStep]:
        while several := list(islice(batches, self._collate.split.count)):
            samples = [sample for batch in several for sample in batch]
            if not self._collate.split.drop_last or len(samples) == self._collate.split.round_size:
                yield self._collate(samples)

    def _regroup_leftovers(self, batches: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the batches of full steps, and of the steps that can be built from the workers' leftover samples.

        A worker's leftover samples are used in multiples of one rank's batch size, in order of arrival.

        Args:
            batches: Results that the collate function returned in the workers.
        """
        split = self._collate.split
        size = (split.round_size or 0) // split.count
        loose: list[Any] = []
        for collated in batches:
            if collated.loose is None:
                yield collated
                continue
            loose += collated.loose[: len(collated.loose) // size * size]
            while len(loose) >= size * split.count:
                yield self._collate.collate_round(loose[: size * split.count], [])
                del loose[: size * split.count]

    def _read_isolated(self, batches: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the batches of an iterator, reading each one with the dataset's own RNG states (`DatasetRNGStates`).

        Args:
            batches: Iterator of the DataLoader that reads the dataset.
        """
        while (collated := self._dataset_rng.call_with_states(lambda: next(batches, None))) is not None:
            yield collated

    def _attach_states(self, batches: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        for collated in batches:
            if self._is_stateful:
                collated = collated._replace(state=self.inner.state_dict())  # type: ignore[attr-defined]
            elif self._records_dataset_state:
                collated = collated._replace(state=copy.deepcopy(self.source.dataset.state_dict()))  # type: ignore[attr-defined]
            if collated.num_samples:
                yield collated

    def _deliver_batches(self, rounds: Iterator[tuple[CollatedStep, bool]]) -> Iterator[Delivery]:
        for collated, is_last in rounds:
            self._num_rounds += 1
            if self._records_dataset_state:
                self._store_dataset_state(collated.state)
            else:
                self._inner_state = collated.state
            for batch, share in zip(collated.batches, collated.shares):
                if is_last or self.inner.pin_memory:
                    # Some versions of torch convert a tuple to a list when they pin memory.
                    counts = None if share.valid_counts is None else tuple(share.valid_counts)
                    share = share._replace(is_last=is_last, valid_counts=counts)
                yield batch, share
        self._dataset_rng.end_pass(is_complete=True)

    def _store_dataset_state(self, state: Any) -> None:
        """Store the dataset's state after a step, and record whether it changes from step to step.

        A state that is unchanged after the first step contains no position, and is not saved.
        """
        self._has_dataset_position = self._has_dataset_position or not has_equal_values(state, self._dataset_state)
        self._dataset_state = state

    def state(self, is_running: bool) -> State:
        """Return the position and the RNG states of the current pass.

        For a StatefulDataLoader, also return its state after the latest step. Between passes, return the position and
        the RNG states from which the next pass starts.

        Args:
            is_running: Whether a pass is in progress.
        """
        if not is_running:
            began = {**self._base_seed.state(False), **self._generators.state(False)}
            return {**self._loaded, **began, **self._dataset_rng.state()}
        state = self.position_state()
        if self._is_stateful:
            state |= {"inner": self._inner_state, "reader": self._reader}
        return state

    def position_state(self) -> State:
        """Return the position and the RNG states of the current pass.

        The position consists of the number of steps read and, if it is kept and changes, the dataset's state. The state
        of a StatefulDataLoader is left out, because it is valid only for the latest batch.
        """
        began = {**self._base_seed.state(True), **self._generators.state(True), **self._dataset_rng.state()}
        position = {"num_rounds": self._num_rounds, "round_size": self.round_size, "reading": list(self._read_order)}
        return {**began, **position, **({"dataset": self._dataset_state} if self._has_dataset_position else {})}

    def state_after_break(self) -> State:
        """Return the dataset's current RNG states, after a pass that was left early (by `break`).

        These are the states of generators that are attributes of the dataset, and the dataset's separate global states.
        The next pass starts with them. The state has no position. It is empty if the dataset has neither, or if it has
        only separate global states and all ranks share them.
        """
        return {**self._generators.state(False), **self._dataset_rng.state_after_break()}

    def set_loader_option(self, name: str, value: Any) -> None:
        """Change a setting of the DataLoader that reads the dataset, from the next pass on.

        Args:
            name: "collate_fn", "worker_init_fn", "timeout", "pin_memory" or "prefetch_factor".
            value: New value.
        """
        if name == "collate_fn":
            self._collate.collate_fn = value
        else:
            set_on_reader(self.inner, name, value)

    def load_state(self, state: State) -> None:
        """Load the state that `state`, `position_state` or `state_after_break` returned. The next pass starts from it.

        The state of a StatefulDataLoader is used only if this rank's shards and the samples per step are unchanged, and
        if it contains the dataset's state. It is never used for a dataset that shuffles with a buffer.

        Args:
            state: Saved state. An empty state discards the one that was loaded before.
        """
        self._base_seed.load_state(state)
        self._generators.load_state(state)
        if self._isolates_dataset_rng:
            self._dataset_rng.load_state(state)
        self._loaded = {name: value for name, value in state.items() if name in _KEPT}
        is_mine = state.get("round_size") == self.round_size and state.get("reader") == self._reader
        is_mine = is_mine and not has_shuffle_buffer(self.source.dataset)
        # Without a dataset state, torchdata's loader too reads from the start, but miscounts from the second resume on.
        if not (is_mine and self._is_stateful and has_dataset_state(state.get("inner"))):
            self._loaded.pop("inner", None)

    @property
    def _reader(self) -> int | None:
        """Index of the rank whose shards are read; None if every rank reads all samples of the dataset."""
        return None if self._active_shards is None else self._active_shards.index


def _get_read_order(state: State) -> StreamReadOrder | None:
    order = state.get("reading")
    return None if order is None else StreamReadOrder(*order)


def _load_turns() -> Any:
    """Return the extension that continues a pass after the number of ranks or workers has changed.

    It is imported on first use.
    """
    return extensions.load("feature", "read_in_turns")


def has_dataset_state(inner: Any) -> bool:
    """Whether a state dict of torchdata's StatefulDataLoader contains the state of a dataset or of its iterator."""
    if not isinstance(inner, dict):
        return False
    snapshot = inner.get("_snapshot")
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, dict) else None
    for each in workers.values() if isinstance(workers, dict) else (inner,):
        fetcher = each.get("fetcher_state") or {}
        if each.get("dataset_state") is not None or fetcher.get("dataset_iter_state") is not None:
            return True
    return False


def has_equal_values(one: Any, other: Any) -> bool:
    """Whether two state dicts contain equal values. Tensors and NumPy arrays are compared by value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(has_equal_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(has_equal_values, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray):
        return numpy.array_equal(one, other)
    return bool(one == other)


def is_shardable(dataset: object, count: int) -> bool:
    """Whether the dataset can be split by its `shard` method into one part for each of `count` ranks.

    It must have at least `count` shards. Always False for a single rank, which needs no split.
    """
    num_shards = getattr(dataset, "num_shards", None)
    has_enough = count > 1 and isinstance(num_shards, int) and num_shards >= count
    return has_enough and callable(getattr(dataset, "shard", None))
