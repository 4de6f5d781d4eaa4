"""`BatchFeed` for iterable datasets. In one step, every rank gets one batch.

Each rank reads all samples, but collates only its slice of each step. The DataLoader that reads the dataset collects the
raw samples of all ranks for one step, with torch's own batching in each worker. The collate function then keeps this
rank's slice (`stream_collate.py`). So all ranks know every rank's row counts without an exchange. The user's dataset and
worker_init_fn run as in a plain loader. Skipped samples are read, but never collated or moved to a device. With several
workers, each worker reads its own copy of the dataset. A dataset that ignores `get_worker_info` therefore repeats its
data, as in plain torch. The workers deliver steps round-robin, and each worker's last step can be incomplete.

All ranks must read the same samples in the same order. The dataset may shuffle them in `set_epoch`, or with its own
`torch.Generator`, whose state is synchronized and saved. It may also use the global generators, whose states are
equal on all ranks while the dataset is read. Each rank's samples are compared with those of the other ranks
(`step_comparison.py`).

Exception: some datasets have their own shards, such as Hugging Face's `datasets.IterableDataset`. If there are at least
as many shards as ranks, each rank reads only its shards (`OwnShards`). Ranks can then have different amounts of data, so
they exchange their row counts in each step, one step ahead (`row_count_exchange.py`). This exchange also informs all
ranks of the end of the data. A rank whose data is exhausted yields padding batches until the other ranks are done.

A pass over an epoch runs as follows::

    `start_pass`         chooses the order of the samples, seeds the workers, and finds the position to resume from
    `_read_steps`        yields the `CollatedStep` of each step, as the DataLoader delivers it
    `_attach_states`     adds the dataset's state after the step, if it is saved
    `_mark_last`         finds the last step; with several ranks, compares the steps or exchanges their row counts
    `_deliver_batches`   yields each batch with its `RankBatch`
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple
from warnings import warn

from torch.utils.data import DataLoader

from headway.core import extensions
from headway.core.data.feeds.dataset_state import DatasetStateRecord, has_dataset_state
from headway.core.data.feeds.protocol import Delivery, State
from headway.core.data.feeds.shuffle_buffers import has_shuffle_buffer
from headway.core.data.feeds.stream_collate import CollatedStep, StepMarker, StreamCollate
from headway.core.data.feeds.worker import iterate_loader, rebuild_loader, set_loader_attribute
from headway.core.data.sampling.dataset_rng import DatasetRNGStates
from headway.core.data.sampling.handover import DatasetHandover
from headway.core.data.sampling.loader_generator import BaseSeed, seed_generator
from headway.core.data.sampling.own_generators import OwnGenerators
from headway.core.data.sampling.rng import Broadcast
from headway.core.data.sampling.shard import SampleSplit, UpdateSplit, mark_last
from headway.core.runtime.seed import mix_seed
from headway.errors import DataError, HeadwayWarning
from headway.log import get_logger

log = get_logger(__name__)

_POSITION_KEYS = ("num_rounds", "round_size", "reading", "inner", "dataset")
"""Keys of a saved state that describe the position in a pass. The other keys hold RNG states.

"num_rounds" is the number of steps read in the pass, and "round_size" is the number of samples per step over all ranks.
"reading" holds a `StreamReadOrder`, "inner" the state of a StatefulDataLoader, and "dataset" that of the dataset.
"""


class StreamReadOrder(NamedTuple):
    """Numbers that determine the sample order of a pass. A saved state contains them as a list, with the key "reading".

    Attributes:
        num_shard_readers: Number of ranks that read different shards; 1 if each rank reads all samples of the dataset.
        num_workers: Number of workers of each rank; 1 if the rank reads without workers.
        samples_per_turn: Number of samples that a worker reads before the next worker's turn. It is 1 if a single
            reader reads all samples, because the order is then the dataset's own for any number of samples.
    """

    num_shard_readers: int
    num_workers: int
    samples_per_turn: int


@dataclass(frozen=True)
class OwnShards:
    """Dataset shards that only this rank reads. The dataset must have `num_shards` and `shard()`.

    Attributes:
        dataset: Dataset with this rank's shards only.
        index: Index of this rank.
        count: Number of ranks.
        mark_last: Function that exchanges each step's row counts with the other ranks, and marks the last step.
        full_read_split: Rule that divides the samples of the dataset if every rank reads it in full. Ranks do so when
            they resume a pass that was begun by a different number of ranks.
        compare_full_reads: Function that compares each step's samples on all ranks, and marks the last step, if every
            rank reads the dataset in full. None to mark the last step without a comparison.
    """

    dataset: Any
    index: int
    count: int
    mark_last: StepMarker
    full_read_split: SampleSplit
    compare_full_reads: StepMarker | None


class StreamFeed:
    """`BatchFeed` that reads an iterable dataset.

    In one step, every rank gets one batch.

    Args:
        loader: User's loader, for its dataset and settings.
        split: Rule that divides samples into steps.
        ranks: Ranks whose batches this process reads: only its own rank, or all ranks if it reads for all.
        seed: Seed of the workers' random numbers.
        base_seed: Object that draws the workers' base seed as torch does. In a run with several ranks, the workers are
            seeded from `seed` instead.
        reads_alone: Whether this is the only process that reads the data. Its workers then get the base seed that torch
            would draw.
        loader_class: Class of the DataLoader that reads the dataset. If it has a `state_dict` method, a resumed pass loads the
            saved state into the DataLoader. Default: torch's DataLoader.
        shards: Shards of this rank, if each rank reads different shards. Default: None, to read all samples of the
            dataset.
        broadcast: Function that returns rank 0's value on every rank. With it, the dataset's random generators start
            each epoch with rank 0's states. Default: None, to keep each rank's states.
        worker_reads_one_rank: Whether each worker reads the batch of one rank at a time, so that the batches of a step
            come from successive workers. Otherwise each worker reads the batches of all ranks for a step. Default:
            False.
        compare_steps: Function that compares the samples of each step on all ranks and marks the last step. Default:
            None, to mark the last step without a comparison.
        handover: Source of the global RNG states with which the dataset is read in a pass, equal on all ranks.
            Default: None, to let the dataset draw from this process's global generators.

    Attributes:
        user_loader: User's loader.
        seed: Seed of the workers' random numbers. A change takes effect with the next pass.
        inner_loader: DataLoader that reads the dataset. It is replaced when the size of steps or the order changes.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: SampleSplit,
        ranks: Sequence[int],
        seed: int,
        base_seed: BaseSeed,
        reads_alone: bool,
        loader_class: type[DataLoader[Any]] = DataLoader,
        shards: OwnShards | None = None,
        broadcast: Broadcast | None = None,
        worker_reads_one_rank: bool = False,
        compare_steps: StepMarker | None = None,
        handover: DatasetHandover | None = None,
    ) -> None:
        self.user_loader = loader
        self.seed = seed
        self._loader_class = loader_class
        self._reads_alone = reads_alone
        self._worker_reads_one_rank = worker_reads_one_rank
        self._configured_split = split
        self._configured_shards = shards

        # What the current pass reads. It differs from the configuration while the order of a saved pass is followed.
        self._followed_order: StreamReadOrder | None = None
        self._epoch = 0  # epoch whose saved order is followed
        self._active_shards = shards  # None while a saved order is followed, because every rank then reads all samples
        self._split_by_batch_size = split  # without the effect of `set_update_size`
        self._mark_last = (shards.mark_last if shards is not None else compare_steps) or mark_last
        self._collate = StreamCollate(loader.collate_fn, split, ranks, is_batched=loader.batch_size is not None)
        self._collate.takes_fingerprints = compare_steps is not None
        self.inner_loader = self._build_loader()
        self._is_stateful = hasattr(self.inner_loader, "state_dict")

        # Random numbers of the workers and of the dataset.
        self._base_seed = base_seed
        self._generators = OwnGenerators(loader.dataset, broadcast)
        # Whether torch's own DataLoader reads the dataset in this process. The dataset then gets separate global RNG
        # states. Workers do not need them, because they have RNG states of their own. Nor does a stateful loader, which
        # does not read samples again when it is resumed.
        self._reads_without_workers = not (self._is_stateful or self.inner_loader.num_workers)
        self._dataset_rng = DatasetRNGStates()  # stays empty if the dataset does not get its own RNG states
        self._handover = handover if self._reads_without_workers else None

        # Position.
        self._num_steps = 0  # steps read in the current pass, including those before a resume
        self._inner_state: Any = None  # state of the StatefulDataLoader after the latest step
        self._dataset_record = DatasetStateRecord(loader.dataset)
        self._loaded: State = {}  # position from which the next pass is resumed

    # ---------------------------------------------------------------- start of a pass

    def draw_iter_seeds(self) -> None:
        """Draw the seeds that torch's DataLoader draws in `iter()`.

        Before that, end the dataset's separate global RNG states of the previous pass, so that the seeds are drawn from
        the states that a plain loop would have.
        """
        self._dataset_rng.end_pass()
        self._base_seed.draw_seed()

    def start_pass(self, epoch: int, num_consumed: int, num_skipped_steps: int) -> tuple[int, Iterator[Delivery]]:
        """Start a pass.

        Skipped samples are read but not collated, unless the pass resumes from a saved state of the StatefulDataLoader
        or of the dataset. In that case, skipped samples are not read.

        Args:
            epoch: Number of the epoch.
            num_consumed: Number of non-padding samples after which to start.
            num_skipped_steps: If not 0, number of batches per rank after which to start. `num_consumed` is then
                ignored.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).

        Raises:
            DataError: If the pass is resumed, and the saved order of the samples cannot be read any more. The iterator
                also raises it if the ranks' samples differ.
        """
        is_resumed = bool(num_consumed and not num_skipped_steps)
        loaded = self._loaded if is_resumed else {}
        self._choose_read_order(_get_read_order(loaded), epoch)
        self._seed_pass(epoch)
        self._loaded = {}
        reads_user_dataset = self._reads_without_workers and self.inner_loader.dataset is self.user_loader.dataset
        if self._dataset_record.start_pass(reads_user_dataset, loaded.get("dataset")):
            self._num_steps = int(loaded.get("num_rounds", 0))
            self._inner_state = None
            return num_consumed, self._continue_reading()
        num_skipped_samples = 0
        if not num_skipped_steps:
            num_skipped_steps, num_skipped_samples = self._find_start(num_consumed, loaded)
        self._num_steps = num_skipped_steps
        self._inner_state = loaded.get("inner")
        if self._inner_state is not None:
            self.inner_loader.load_state_dict(self._inner_state)  # type: ignore[attr-defined]
            return num_consumed, self._continue_reading()
        return self._skip_samples(num_skipped_steps, num_skipped_samples)

    def _seed_pass(self, epoch: int) -> None:
        """Seed the workers, and start the dataset's own generators and its separate global RNG states.

        Args:
            epoch: Number of the epoch.
        """
        # Ranks that read one stream need equal random numbers in their workers; ranks with different shards need
        # different ones.
        shards = self._active_shards
        seed_generator(self.inner_loader, mix_seed(self.seed, epoch, 0 if shards is None else 1 + shards.index))
        self._base_seed.start_pass(self.inner_loader, is_used=self._reads_alone)
        self._generators.start_epoch()
        is_shared = self._handover is not None and self._handover.is_needed
        self._dataset_rng.start_pass(self._handover if is_shared else None)

    def _find_start(self, num_consumed: int, loaded: State) -> tuple[int, int]:
        """Return where a pass starts, as a pair of (steps to skip, samples to skip in the following step).

        Warn if the sizes of the steps have changed and the saved state does not describe the order of the samples.

        Args:
            num_consumed: Number of samples consumed in the epoch, on all ranks together.
            loaded: Saved state of the pass; empty if there is none.

        Raises:
            DataError: If the order of the samples has changed since the state was saved, and the saved order cannot be
                read any more.
        """
        saved_order = _get_read_order(loaded)
        if saved_order is not None and saved_order != self._read_order:
            name = type(self.user_loader.dataset).__name__
            message = _load_interleaving().describe_changed_order(name, num_consumed, saved_order, self._read_order)
            raise DataError(message)
        if self._followed_order is None and loaded.get("round_size") == self.samples_per_step:
            return int(loaded["num_rounds"]), 0
        has_several_readers = self._active_shards is not None or self.inner_loader.num_workers > 1
        if saved_order is None and num_consumed and has_several_readers:
            readers = (
                "Several workers read in turn" if self._active_shards is None else "Each rank reads its own shards"
            )
            warn(
                f"a stream is resumed after {num_consumed} samples with steps of {self.samples_per_step} samples instead of "
                f"{loaded.get('round_size', 'an unknown number')}. {readers}, so some samples may be read twice and others not at "
                "all. Resume with the same number of ranks and the same batch size to be exact",
                HeadwayWarning,
                stacklevel=2,
            )
        return divmod(num_consumed, self.samples_per_step)

    def _continue_reading(self) -> Iterator[Delivery]:
        """Return an iterator over the batches after a position from which the dataset or its loader continues by itself."""
        self._collate.start_pass()
        return self._deliver_batches(self._iterate_steps())

    def _skip_samples(self, num_steps: int, num_samples: int) -> tuple[int, Iterator[Delivery]]:
        """Read the dataset from its first sample, and skip samples. Only persistent workers collate skipped samples.

        Args:
            num_steps: Number of steps to skip.
            num_samples: Number of samples to skip in the following step.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).
        """
        if self.inner_loader.persistent_workers and not num_samples:
            # Persistent workers would continue to skip in the next pass if this one ends too early.
            self._collate.start_pass()
        else:
            self._collate.start_pass(num_steps, num_samples)
        steps = self._iterate_steps()
        num_consumed = num_samples + sum(collated.num_samples for collated, _ in islice(steps, num_steps))
        return num_consumed, self._deliver_batches(steps)

    def draw_for_remote_pass(self, epoch: int) -> None:
        """Record that a pass starts that another process reads for this rank. Nothing is read.

        No random numbers are drawn, because `draw_iter_seeds` has drawn those of an iterable dataset's loader.

        Args:
            epoch: Unused.
        """
        self._base_seed.start_pass(self.inner_loader, is_used=False)

    # ---------------------------------------------------------------- steps of a pass

    def _iterate_steps(self) -> Iterator[tuple[CollatedStep, bool]]:
        """Return an iterator over pairs of (collated step, whether it is the last one)."""
        return self._mark_last(self._attach_states(self._read_steps()))

    def _read_steps(self) -> Iterator[CollatedStep]:
        """Yield the collated steps of the inner loader, in the way that the settings of this feed require."""
        if self._joins_worker_batches:
            return self._join_batches(iterate_loader(self.inner_loader))
        if self._collate.returns_leftovers:
            return self._regroup_leftovers(iterate_loader(self.inner_loader))
        if not self._reads_without_workers:
            return iterate_loader(self.inner_loader)
        return self._read_isolated(self._dataset_rng.call_with_states(lambda: iterate_loader(self.inner_loader)))

    def _join_batches(self, batches: Iterator[list[Any]]) -> Iterator[CollatedStep]:
        """Yield steps that are collated from the raw samples of one batch per rank.

        Args:
            batches: Raw samples of one rank's batch at a time, rank 0 first.
        """
        while step_batches := list(islice(batches, self._collate.split.num_ranks)):
            samples = [sample for batch in step_batches for sample in batch]
            if not self._collate.split.drop_last or len(samples) == self._collate.split.samples_per_step:
                yield self._collate(samples)

    def _regroup_leftovers(self, batches: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the batches of full steps, and of the steps that can be built from the workers' leftover samples.

        A worker's leftover samples are used in multiples of one rank's batch size, in order of arrival.

        Args:
            batches: Results that the collate function returned in the workers.
        """
        samples_per_step = self._collate.split.samples_per_step or 0
        samples_per_rank = samples_per_step // self._collate.split.num_ranks
        leftovers: list[Any] = []
        for collated in batches:
            if collated.leftovers is None:
                yield collated
                continue
            num_used = len(collated.leftovers) // samples_per_rank * samples_per_rank
            leftovers += collated.leftovers[:num_used]
            while len(leftovers) >= samples_per_step:
                yield self._collate.collate_step(leftovers[:samples_per_step], [])
                del leftovers[:samples_per_step]

    def _read_isolated(self, batches: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the batches of an iterator, reading each one with the dataset's own RNG states (`DatasetRNGStates`).

        Args:
            batches: Iterator of the DataLoader that reads the dataset.
        """
        while (collated := self._dataset_rng.call_with_states(lambda: next(batches, None))) is not None:
            yield collated

    def _attach_states(self, steps: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the steps that have samples, with the state of the StatefulDataLoader or of the dataset if needed.

        The state must be read here, directly after the step, because later iterators read one step ahead.
        """
        for collated in steps:
            if self._is_stateful:
                collated = collated._replace(state=self.inner_loader.state_dict())  # type: ignore[attr-defined]
            elif self._dataset_record.is_active:
                collated = collated._replace(state=self._dataset_record.read_state())
            if collated.num_samples:
                yield collated

    def _deliver_batches(self, steps: Iterator[tuple[CollatedStep, bool]]) -> Iterator[Delivery]:
        """Yield each batch with its `RankBatch`, and record the position and the states after each step."""
        for collated, is_last in steps:
            self._num_steps += 1
            if self._dataset_record.is_active:
                self._dataset_record.record_step(collated.state)
            else:
                self._inner_state = collated.state
            for batch, rank_batch in zip(collated.batches, collated.rank_batches):
                if is_last or self.inner_loader.pin_memory:
                    # Some versions of torch convert a tuple to a list when they pin memory.
                    counts = None if rank_batch.valid_counts is None else tuple(rank_batch.valid_counts)
                    rank_batch = rank_batch._replace(is_last=is_last, valid_counts=counts)
                yield batch, rank_batch
        self._dataset_rng.end_pass(is_complete=True)

    # ---------------------------------------------------------------- order of the samples

    def _choose_read_order(self, saved_order: StreamReadOrder | None, epoch: int) -> None:
        """Choose the sample order of a pass: the order of the saved pass that it continues, or this run's own order.

        If the two orders differ and the saved one can be followed, every rank follows it by reading all samples of the
        dataset, with at most one worker.

        Args:
            saved_order: Sample order of the saved pass; None if the pass starts from the beginning.
            epoch: Number of the epoch.
        """
        followed_order = None
        if saved_order is not None and saved_order != self._default_read_order and self._can_follow(saved_order):
            followed_order = saved_order
        if followed_order is None and self._followed_order is None:
            return
        self._followed_order, self._epoch = followed_order, epoch
        shards = self._configured_shards
        if shards is not None:
            if followed_order is None:
                self._read_own_shards(shards)
            else:
                self._read_all_shards(shards)
        self._replace_inner_loader()
        if followed_order is not None and (shards is not None or self.user_loader.num_workers > 1):
            name = type(self.user_loader.dataset).__name__
            log.warning_once(_load_interleaving().describe_full_read(name, followed_order))

    def _can_follow(self, order: StreamReadOrder) -> bool:
        """Whether a single reader can read the dataset in the order of a saved pass.

        This requires that the saved pass had one reader per rank, and that the dataset has enough shards.

        Args:
            order: Sample order of the saved pass.
        """
        num_ranks = order.num_shard_readers
        return order.num_workers == 1 and (num_ranks == 1 or is_shardable(self.user_loader.dataset, num_ranks))

    def _read_own_shards(self, shards: OwnShards) -> None:
        """Let this rank read only its own shards of the dataset, from the next pass on."""
        self._active_shards = shards
        self._split_by_batch_size = self._configured_split
        self._collate.split = replace(self._configured_split, even_batches=self._collate.split.even_batches)
        self._collate.ranks = (0,)
        self._collate.takes_fingerprints = False
        self._mark_last = shards.mark_last

    def _read_all_shards(self, shards: OwnShards) -> None:
        """Let this rank read the dataset in full and keep its slice of each step, from the next pass on."""
        self._active_shards = None
        self._split_by_batch_size = shards.full_read_split
        self._collate.split = replace(shards.full_read_split, even_batches=self._collate.split.even_batches)
        self._collate.ranks = (shards.index,)
        self._collate.takes_fingerprints = shards.compare_full_reads is not None
        self._mark_last = shards.compare_full_reads or mark_last

    @property
    def _read_order(self) -> StreamReadOrder:
        """Sample order of the current pass."""
        return self._followed_order or self._default_read_order

    @property
    def _default_read_order(self) -> StreamReadOrder:
        """Sample order of a pass that does not continue a saved one."""
        num_workers = max(1, self.user_loader.num_workers)
        if self._configured_shards is not None:
            # The split of a rank with its own shards covers only this rank's samples.
            samples_per_rank = self._configured_split.samples_per_step or 1
            return StreamReadOrder(self._configured_shards.count, num_workers, samples_per_turn=samples_per_rank)
        if num_workers == 1:
            return StreamReadOrder(num_shard_readers=1, num_workers=1, samples_per_turn=1)
        samples_per_step = self._collate.split.samples_per_step or 1
        num_turns = self._split_by_batch_size.num_ranks if self._worker_reads_one_rank else 1
        return StreamReadOrder(1, num_workers, samples_per_turn=samples_per_step // num_turns)

    @property
    def _reader(self) -> int | None:
        """Index of the rank whose shards are read; None if every rank reads all samples of the dataset."""
        return None if self._active_shards is None else self._active_shards.index

    # ---------------------------------------------------------------- the DataLoader that reads the dataset

    def _build_loader(self) -> DataLoader[Any]:
        """Build the DataLoader that reads the dataset for the current split, shards and order."""
        changes: dict[str, Any] = {}
        if self._followed_order is not None:  # a single reader has to read the dataset in the order of the saved pass
            dataset = self._build_ordered_dataset(self._followed_order)
            changes = {"dataset": dataset, "num_workers": min(1, self.user_loader.num_workers)}
        elif self._active_shards is not None:
            changes = {"dataset": self._active_shards.dataset}
        split = self._collate.split
        # With drop_last, torch drops each worker's incomplete last batch. To torch, a batch is here a whole step, with
        # the samples of all ranks, so too much would be dropped.
        self._collate.returns_leftovers = (
            isinstance(split, SampleSplit)
            and split.drop_last
            and split.num_ranks > 1
            and self._collate.is_batched
            and self.user_loader.num_workers > 1
            and self._followed_order is None
            and not (self._worker_reads_one_rank or hasattr(self._loader_class, "state_dict"))
        )
        batch_size = split.samples_per_step
        collate_fn: Callable[[Any], Any] = self._collate
        if self._joins_worker_batches:
            batch_size = (split.samples_per_step or 0) // split.num_ranks
            collate_fn = list
        return rebuild_loader(
            self.user_loader,
            self._loader_class,
            batch_size=batch_size,
            drop_last=split.drop_last and not self._collate.returns_leftovers,
            collate_fn=collate_fn,
            **changes,
        )

    def _build_ordered_dataset(self, order: StreamReadOrder) -> Any:
        """Return the dataset, or a wrapper around it that yields its samples in the order of a saved pass."""
        dataset, num_ranks = self.user_loader.dataset, order.num_shard_readers
        if num_ranks == 1:
            return dataset
        return _load_interleaving().InterleavedShards(
            dataset, num_ranks, order.samples_per_turn, self.user_loader.drop_last, self._epoch
        )

    def _replace_inner_loader(self) -> None:
        """Build the DataLoader that reads the dataset again, after the split, the shards or the order have changed."""
        pins_memory = self.inner_loader.pin_memory  # may have been set for the device transfer
        self.inner_loader = self._build_loader()
        self.inner_loader.pin_memory = pins_memory

    @property
    def _joins_worker_batches(self) -> bool:
        """Whether workers deliver the raw samples of one rank at a time, which are then joined and collated here."""
        return self._worker_reads_one_rank and self._followed_order is None

    def set_loader_option(self, name: str, value: Any) -> None:
        """Change a setting of the DataLoader that reads the dataset, from the next pass on.

        Args:
            name: "collate_fn", "worker_init_fn", "timeout", "pin_memory" or "prefetch_factor".
            value: New value.
        """
        if name == "collate_fn":
            self._collate.collate_fn = value
        else:
            set_loader_attribute(self.inner_loader, name, value)

    # ---------------------------------------------------------------- state

    def state(self, is_running: bool) -> State:
        """Return the position and the RNG states of the current pass.

        For a StatefulDataLoader, also return its state after the latest step. Between passes, return the position and
        the RNG states from which the next pass starts.

        Args:
            is_running: Whether a pass is in progress.
        """
        if not is_running:
            rng_states = {**self._base_seed.state(False), **self._generators.state(False), **self._dataset_rng.state()}
            return {**self._loaded, **rng_states}
        state = self.position_state()
        if self._is_stateful:
            state |= {"inner": self._inner_state, "reader": self._reader}
        return state

    def position_state(self) -> State:
        """Return the position and the RNG states of the current pass.

        The position consists of the number of steps read, the samples per step, and the sample order. It also contains the
        dataset's own state if the dataset has one that changes while it is read. The state of a StatefulDataLoader is left out,
        because it is valid only for the latest batch.
        """
        rng_states = {**self._base_seed.state(True), **self._generators.state(True), **self._dataset_rng.state()}
        position: State = {
            "num_rounds": self._num_steps,
            "round_size": self.samples_per_step,
            "reading": list(self._read_order),
        }
        return {**rng_states, **position, **self._dataset_record.describe_position()}

    def state_after_break(self) -> State:
        """Return the dataset's current RNG states, after a pass that was left early (by `break`).

        These are the states of generators that are attributes of the dataset, and the dataset's separate global states.
        The next pass starts with them. The state has no position. It is empty if the dataset has neither, or if it has
        only separate global states and all ranks share them.
        """
        return {**self._generators.state(False), **self._dataset_rng.state_after_break()}

    def load_state(self, state: State) -> None:
        """Load the state that `state`, `position_state` or `state_after_break` returned. The next pass starts from it.

        The state of a StatefulDataLoader is used only if this rank's shards and the samples per step are unchanged, and
        if it contains the dataset's state. It is never used for a dataset that shuffles with a buffer.

        Args:
            state: Saved state. An empty state discards the one that was loaded before.
        """
        self._base_seed.load_state(state)
        self._generators.load_state(state)
        if self._reads_without_workers:
            self._dataset_rng.load_state(state)
        self._loaded = {name: value for name, value in state.items() if name in _POSITION_KEYS}
        is_mine = state.get("round_size") == self.samples_per_step and state.get("reader") == self._reader
        is_mine = is_mine and not has_shuffle_buffer(self.user_loader.dataset)
        # Without a dataset state, torchdata's loader too reads from the start, but miscounts from the second resume on.
        if not (is_mine and self._is_stateful and has_dataset_state(state.get("inner"))):
            self._loaded.pop("inner", None)

    def set_dataset_state_saving(self, is_saved: bool) -> None:
        """Set whether saved positions include the dataset's `state_dict()` after each step, from the next pass on.

        It takes effect only if this process reads all samples of the dataset without workers and without a
        StatefulDataLoader.

        Args:
            is_saved: Whether to include the dataset's state.

        Raises:
            DataError: If `is_saved` is True and the dataset shuffles with a buffer, whose samples its state lacks.
        """
        self._dataset_record.set_requested(is_saved)

    # ---------------------------------------------------------------- sizes

    def __len__(self) -> int:
        split = SampleSplit(self.samples_per_step, 1, self._collate.split.drop_last)
        return split.count_steps(len(self.user_loader.dataset))  # type: ignore[arg-type]

    @property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks together get per step.

        If the loader does not batch (`batch_size=None`), the dataset's items are counted.
        """
        return (self._collate.split.samples_per_step or 0) * self._num_shard_readers

    @property
    def configured_samples_per_step(self) -> int:
        """Number of samples per step over all ranks, as configured in the user's DataLoader.

        Unlike `samples_per_step`, it ignores `set_update_size`.
        """
        return self._split_by_batch_size.samples_per_step * self._num_shard_readers

    @property
    def _num_shard_readers(self) -> int:
        """Number of ranks that read different shards; 1 if each rank reads all samples. Splits do not count them."""
        return 1 if self._active_shards is None else self._active_shards.count

    def can_fit_update(self, samples_per_update: int, num_steps: int) -> bool:
        """Whether `num_steps` equal steps can hold exactly `samples_per_update` samples per update.

        Batches may be smaller than the configured batch size, but not larger. Always False if the loader does not
        batch or if each rank reads different shards.

        Args:
            samples_per_update: Number of samples per gradient update over all ranks.
            num_steps: Number of batches per rank and update.
        """
        if self._configured_shards is not None or not self._collate.is_batched or samples_per_update % num_steps:
            return False
        return samples_per_update // num_steps <= self._split_by_batch_size.samples_per_step

    def set_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int) -> None:
        """Use `samples_per_update` samples per gradient update from the next pass on.

        Args:
            samples_per_update: Number of samples per update over all ranks; 0 to return to the user's settings.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples.
        """
        split: SampleSplit | UpdateSplit = self._split_by_batch_size
        if samples_per_update:
            # All steps of a stream have one size, so each of them can be treated as an update.
            size = samples_per_update // num_steps
            split = UpdateSplit(size, 1, split.num_ranks, drop_multiple if split.drop_last else 1)
        split = replace(split, even_batches=self._collate.split.even_batches)
        if split != self._collate.split:
            self._collate.split = split
            self._replace_inner_loader()

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last step is completed with repeated samples, so that every rank gets a full batch."""
        return self._collate.split.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._collate.split = replace(self._collate.split, even_batches=value)


def _get_read_order(state: State) -> StreamReadOrder | None:
    order = state.get("reading")
    return None if order is None else StreamReadOrder(*order)


def _load_interleaving() -> Any:
    """Return the extension that continues a pass after the number of ranks or workers has changed.

    It is imported on first use.
    """
    return extensions.load("feature", "interleave_shards")


def is_shardable(dataset: object, count: int) -> bool:
    """Whether the dataset can be split by its `shard` method into one part for each of `count` ranks.

    It must have at least `count` shards. Always False for a single rank, which needs no split.
    """
    num_shards = getattr(dataset, "num_shards", None)
    has_enough = count > 1 and isinstance(num_shards, int) and num_shards >= count
    return has_enough and callable(getattr(dataset, "shard", None))
