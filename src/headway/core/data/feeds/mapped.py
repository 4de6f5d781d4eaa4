"""`BatchFeed` for map-style datasets: plans the indices of each step, and fetches only the samples of this rank.

In one step, every rank gets one batch. A pass over an epoch runs as follows::

    `start_pass`             draws the epoch's order, and divides it into steps
    `_plan_batches`          yields the indices of this rank's next batch, and adds its `RankBatch` to a queue: the
                             indices, the number of rows, and whether it is the last batch
    torch's DataLoader       fetches the samples of these indices, here or in workers, and collates them
    `_match_batches`         yields each batch together with its `RankBatch` from the queue

Steps are planned one step ahead, so that the last one is known (`_mark_steps`). `worker.py` describes how workers get
their random numbers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any
from warnings import warn

from torch.utils.data import DataLoader, RandomSampler, Sampler

from headway.core.data.feeds.protocol import UNCOUNTABLE, Delivery, State
from headway.core.data.feeds.worker import (
    IndexWithCall,
    SeededIndices,
    WorkerRNGStates,
    WorkerSeeding,
    WorkerStateCollate,
    is_read_one_by_one,
    iterate_loader,
    rebuild_loader,
    seed_generators,
    set_loader_attribute,
)
from headway.core.data.sampling.loader_generator import BaseSeed, seed_generator
from headway.core.data.sampling.order import SampleOrder, describe_order
from headway.core.data.sampling.rng import write_global_states
from headway.core.data.sampling.shard import BatchSplit, EpochRemainder, RankBatch, SampleSplit, UpdateSplit, mark_last
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import find_batch_size
from headway.core.runtime.seed import mix_seed
from headway.errors import DataError, HeadwayWarning
from headway.log import get_logger

log = get_logger(__name__)

Recount = Callable[[Any, RankBatch], RankBatch]
"""Function of a batch and its `RankBatch` that returns the `RankBatch` with row counts measured on the batch."""


class PassSampler(Sampler[Any]):
    """Sampler of the DataLoader that fetches samples. Each pass yields the indices that were set with `set_indices`."""

    def __init__(self) -> None:
        self._indices: Iterator[Any] = iter(())

    def set_indices(self, indices: Iterator[Any]) -> None:
        """Set the indices that the next pass yields. A pass in progress is not affected.

        Args:
            indices: Iterator over indices, or over batches of indices.
        """
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class MappedFeed:
    """`BatchFeed` that reads a map-style dataset.

    Args:
        loader: User's loader, for its dataset and settings.
        order: Order of samples, or of batches if a custom batch sampler yields them.
        split: Rule that divides the order into one batch per rank and step.
        ranks: Ranks whose batches this process reads: only its own rank, or all ranks if it reads for all.
        seed: Seed of the random generators in workers.
        collectives: Collectives for exchanging the row counts of unbatched items; None if this process reads alone.
        base_seed: Source of the workers' base seed.
        reads_alone: Whether this is the only process that reads the data.
        worker_seeding: How workers get their random numbers.
        reads_ahead: Whether to fetch the next batch before the current one has been processed. No effect with workers.
            Default: False.
        compare_order: Function that compares the first items of each pass between ranks. It is called on all ranks.
            Default: None, for no comparison, because the order is equal on all ranks by construction.

    Attributes:
        order: Order of samples, or of batches if a custom batch sampler yields them.
        split: Rule that divides the order into one batch per rank and step. It changes with `set_update_size`.
        ranks: Ranks whose batches this process reads.
        is_batched: Whether torch's DataLoader builds batches. Otherwise it yields single items of the dataset.
        inner_loader: DataLoader that fetches the samples of this rank.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        order: SampleOrder,
        split: SampleSplit | BatchSplit,
        ranks: Sequence[int],
        seed: int,
        collectives: Collectives | None,
        base_seed: BaseSeed,
        reads_alone: bool,
        worker_seeding: WorkerSeeding,
        reads_ahead: bool = False,
        compare_order: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self.order = order
        self._saved_order: str | None = None  # description of the order in a loaded state
        self._compare_order = compare_order
        self.split: SampleSplit | BatchSplit | UpdateSplit = split
        self._configured_split = split
        self.ranks = ranks
        self._seed = seed
        self.is_batched = loader.batch_sampler is not None
        has_workers = loader.num_workers > 0
        self._is_in_order = getattr(loader, "in_order", True) or not has_workers
        if not self._is_in_order:
            log.warning_once(
                "in_order=False: a state that is saved in the middle of an epoch does not record which batches arrived early, so "
                "a resumed run may repeat or skip a few samples"
            )

        # Random numbers of the workers.
        self._base_seed = base_seed
        self._uses_base_seed = reads_alone or worker_seeding is WorkerSeeding.TORCH
        self._seeds_by_position = has_workers and worker_seeding is WorkerSeeding.BY_POSITION
        self._seeds_each_sample = is_read_one_by_one(loader.dataset)  # used only if `_seeds_by_position`
        self._rng_states: WorkerRNGStates | None = None
        # A batch's position shows which worker has sent it, so states can be recorded only if batches arrive in order.
        if has_workers and worker_seeding is WorkerSeeding.RECORDED and self._is_in_order:
            self._rng_states = WorkerRNGStates(loader.num_workers, loader.persistent_workers)

        # Start and end of a pass.
        self._draws_order_in_iter = has_workers or len(ranks) > 1
        self._reads_ahead = reads_ahead and not has_workers
        # torch's RandomSampler draws once more at its end, so do not look for the end before the batch is processed.
        self._finds_last_by_count = self._reads_ahead and type(getattr(order, "sampler", None)) is RandomSampler

        self._recount = self._choose_recount(collectives)
        self._sampler = PassSampler()
        changes: dict[str, Any] = {"batch_sampler": self._sampler}
        if not self.is_batched:
            changes = {"batch_size": None, "sampler": self._sampler}
        if self._rng_states is not None:
            changes["collate_fn"] = WorkerStateCollate(loader.collate_fn)
        self.inner_loader = rebuild_loader(loader, **changes)

    # ---------------------------------------------------------------- start of a pass

    def draw_iter_seeds(self) -> None:
        """Draw the seeds that torch's DataLoader draws in `iter()`.

        With workers, torch requests the first indices in `iter()`. So in that case, the random numbers that determine
        the sample order are drawn too. They are also drawn if this process reads for all ranks.
        """
        self._base_seed.draw_seed()
        if self._draws_order_in_iter:
            self.order.draw_ahead()

    def start_pass(self, epoch: int, num_consumed: int, num_skipped_steps: int) -> tuple[int, Iterator[Delivery]]:
        """Start a pass. Skipped samples are usually not fetched.

        The exception is a resumed pass whose state was saved before every worker had delivered a batch. In that case,
        the batches that had been delivered are fetched again and discarded.

        Args:
            epoch: Number of the epoch.
            num_consumed: Number of non-padding samples after which to start.
            num_skipped_steps: If not 0, number of batches per rank after which to start. `num_consumed` is then
                ignored.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).

        Raises:
            DataError: If several ranks read with `in_order=False` and one step of the epoch differs in size from the
                others. Also if `compare_order` finds that the ranks' orders differ.
        """
        if not self._is_in_order and self.split.num_ranks > 1:
            self._check_equal_steps()
        if num_consumed or num_skipped_steps:
            self._warn_of_changed_order()
        self._saved_order = None
        seed = mix_seed(self.seed, epoch)
        rng_states = self._rng_states
        is_resumed = num_consumed > 0 and not num_skipped_steps
        # If not every worker has delivered a batch before the save, only reading again finds the states of the others.
        num_repeated = 0 if rng_states is None else rng_states.start_pass(is_resumed)
        start = 0 if num_repeated else num_consumed
        remainder = self.split.split_epoch(self.order.draw_order(epoch), start, num_skipped_steps)
        if self._compare_order is not None:
            self._compare_order(remainder.first_items)
        rank_batches: deque[RankBatch] = deque()
        self._sampler.set_indices(self._plan_batches(remainder, seed, rank_batches))
        seed_generator(self.inner_loader, mix_seed(seed, 1))
        self._base_seed.start_pass(self.inner_loader, is_used=self._uses_base_seed)
        deliveries = self._match_batches(iterate_loader(self.inner_loader), rank_batches)
        for _ in islice(deliveries, num_repeated):  # fetch again and discard, to advance the workers' RNG states
            pass
        if self._reads_ahead:  # `mark_last` reads one batch ahead
            deliveries = (delivery for delivery, _ in mark_last(deliveries))
        return num_consumed if num_repeated else remainder.num_consumed, deliveries

    def draw_for_remote_pass(self, epoch: int) -> None:
        """Draw the order of an epoch that another process reads for this rank.

        The loader's own draws then leave equal RNG states on all ranks, and a state that this process saves includes
        the order.

        Args:
            epoch: Number of the epoch.
        """
        self.order.draw_order(epoch)  # only for its draws, because another process reads these samples
        self._base_seed.start_pass(self.inner_loader, is_used=False)

    def _check_equal_steps(self) -> None:
        """Raise `DataError` if one step of an epoch differs in size from the others."""
        size = self.samples_per_step if isinstance(self.split, SampleSplit) else None
        if size is None or not (self.split.drop_last or len(self.order) % size == 0):
            raise DataError(
                "in_order=False lets batches arrive in any order, but one step of this data differs from the others (a short "
                "end, or batches of several sizes), and all ranks must reach it at the same step. Pass drop_last=True or "
                "in_order=True to the DataLoader"
            )

    def _warn_of_changed_order(self) -> None:
        """Warn if a loaded state was saved with another type of sample order, such as another sampler."""
        current_order = describe_order(self.order)
        if self._saved_order not in (None, current_order):
            warn(
                f"the samples of this epoch were {self._saved_order} before the save, and now they are {current_order}, so some of "
                "them would be repeated and others left out. Give the loader the shuffle= or sampler= that it had, or begin the "
                "epoch at its first batch: resume(..., changed='data')",
                HeadwayWarning,
                stacklevel=2,
            )

    # ---------------------------------------------------------------- plan of a pass: the indices of each batch

    def _plan_batches(self, remainder: EpochRemainder, seed: int, rank_batches: deque[RankBatch]) -> Iterator[Any]:
        """Yield the indices of each batch for the DataLoader that fetches the samples.

        Args:
            remainder: Remainder of the epoch that the pass reads.
            seed: Seed of the workers' generators in this epoch.
            rank_batches: Queue to which the `RankBatch` of each batch is added. A queue is needed because the loader
                may fetch batches ahead.
        """
        split, position = self.split, remainder.num_consumed
        worker_states = None if self._rng_states is None else iter(self._rng_states.list_initial_states())
        for step_samples, is_last in self._mark_steps(remainder):
            num_samples = 0  # of all ranks together, so it is equal for each rank of the loop
            for rank in self.ranks:
                indices, counts = split.get_rank_samples(step_samples, rank, remainder.first_items)
                num_rows, num_samples = len(indices), sum(counts)
                if self._seeds_by_position:
                    indices = self._seed_indices(indices, seed, position + split.find_first_index(step_samples, rank))
                worker_state = None if worker_states is None else next(worker_states, None)
                if worker_state is not None:
                    indices = self._attach_call(indices, write_global_states, worker_state)
                rank_batches.append(RankBatch(indices, num_rows, counts, num_samples, is_last))
                yield indices if self.is_batched else indices[0]
            position += num_samples

    def _mark_steps(self, remainder: EpochRemainder) -> Iterator[tuple[Any, bool]]:
        """Return an iterator over the steps of a pass, as pairs of (samples on all ranks, whether it is the last step).

        Args:
            remainder: Remainder of the epoch that the pass reads.
        """
        split = self.split
        if self._finds_last_by_count and isinstance(split, SampleSplit):
            return self._mark_steps_by_count(remainder, (len(self) - 1) * split.samples_per_step)
        return mark_last(remainder.steps)

    def _mark_steps_by_count(self, remainder: EpochRemainder, last_step_start: int) -> Iterator[tuple[Any, bool]]:
        """Yield pairs of (samples of one step on all ranks, whether it is the last step) without reading ahead.

        The last step is known from the number of samples.

        Args:
            remainder: Remainder of the epoch that the pass reads.
            last_step_start: Position in the epoch of the first sample of the last step.
        """
        position = remainder.num_consumed
        for step_samples in remainder.steps:
            yield step_samples, position >= last_step_start
            position += len(step_samples)

    def _seed_indices(self, indices: list[Any], seed: int, position: int) -> Any:
        """Return indices that seed the worker's random generators before it fetches each sample, or else the batch.

        Args:
            indices: Indices of one batch, or a list of one index if the loader does not batch.
            seed: Seed of the workers' generators in this epoch.
            position: Position of the first index in the epoch's order.
        """
        if self.is_batched and self._seeds_each_sample:
            return SeededIndices(indices, seed, position)
        return self._attach_call(indices, seed_generators, mix_seed(seed, position))

    def _attach_call(self, indices: list[Any], function: Callable[[Any], None], argument: int | str) -> Any:
        """Return the indices of a batch, or a single index, with a call that the worker makes before it fetches the samples.

        Args:
            indices: Indices of the batch. One if torch's DataLoader does not build batches.
            function: Function to call.
            argument: Its argument.
        """
        if self.is_batched:
            return IndexWithCall(indices, function, argument)
        return [IndexWithCall(indices[0], function, argument)]

    # ---------------------------------------------------------------- batches of a pass, with their row counts

    def _match_batches(self, batches: Iterator[Any], rank_batches: deque[RankBatch]) -> Iterator[Delivery]:
        """Return an iterator over pairs of (batch, `RankBatch` of the batch).

        Args:
            batches: Batches from the DataLoader that fetches the samples.
            rank_batches: Queue with the `RankBatch` of each requested batch.
        """
        if self._recount is None and self._rng_states is None:
            # `zip` needs no Python frame for each batch. It requests the batch first, and that request adds the
            # `RankBatch` to the queue.
            return zip(batches, iter(rank_batches.popleft, None))
        return self._correct_batches(batches, rank_batches)

    def _correct_batches(self, batches: Iterator[Any], rank_batches: deque[RankBatch]) -> Iterator[Delivery]:
        """Yield pairs of (batch, `RankBatch` of the batch), with row counts measured on the batch if necessary.

        The workers' RNG states are removed from the batches and recorded.

        Args:
            batches: Batches from the DataLoader that fetches the samples.
            rank_batches: Queue with the `RankBatch` of each requested batch.
        """
        recount, rng_states = self._recount, self._rng_states
        for batch in batches:
            rank_batch = rank_batches.popleft()
            if rng_states is not None:
                batch = rng_states.record_batch(batch)
            yield batch, rank_batch if recount is None else recount(batch, rank_batch)

    def _choose_recount(self, collectives: Collectives | None) -> Recount | None:
        """Return the function that measures a batch's rows; None if the planned row counts are right.

        They can be wrong if the loader does not batch, because an item of the dataset can have any number of rows. They
        can also be wrong if batches of different sizes arrive out of order.
        """
        if self.is_batched:
            return None if self._is_in_order or self.split.num_ranks > 1 else measure_all_rows
        if len(self.ranks) > 1:  # each batch is for one rank, and `DispatchFeed` combines the rows of all ranks
            return measure_own_rows
        return measure_all_rows if collectives is None else make_row_exchange(collectives)

    # ---------------------------------------------------------------- state

    def state(self, is_running: bool) -> State:
        """Return the state from which the workers' base seed and the sample order can be drawn again.

        It also includes a description of the order, and the workers' RNG states if this object records them.

        Args:
            is_running: Whether a pass is in progress.
        """
        state = {
            **self._base_seed.state(is_running),
            **self.order.state(is_running),
            "order": describe_order(self.order),
        }
        return state if self._rng_states is None else state | self._rng_states.state(is_running)

    def position_state(self) -> State:
        """Return the state of the current pass. It is equal to the result of `state`, which is already small."""
        return self.state(True)

    def state_after_break(self) -> State:
        """Return the state of the sample order for the next pass, after a pass that was left early (by `break`).

        It is empty unless the sampler has its own random generators.
        """
        return self.order.state_after_break()

    def load_state(self, state: State) -> None:
        """Load the state that `state` returned. The next pass resumes from it.

        An empty state discards the state that was loaded before.
        """
        self._base_seed.load_state(state)
        self._saved_order = state.get("order")
        # The description that `state` has added is no part of the order's own state.
        self.order.load_state({name: value for name, value in state.items() if name != "order"})
        if self._rng_states is not None:
            self._rng_states.load_state(state)

    # ---------------------------------------------------------------- sizes and settings

    def __len__(self) -> int:
        return self.split.count_steps(len(self.order))

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples that all ranks together get per step; None if it varies.

        If the loader does not batch (`batch_size=None`), the dataset's items are counted.
        """
        return self.split.samples_per_step

    @property
    def configured_samples_per_step(self) -> int | None:
        """Number of samples per step over all ranks, as configured in the user's DataLoader. None if it varies.

        Unlike `samples_per_step`, it ignores `set_update_size`.
        """
        return self._configured_split.samples_per_step

    def can_fit_update(self, samples_per_update: int, num_steps: int) -> bool:
        """Whether `num_steps` batches per rank can hold `samples_per_update` samples per update.

        Batches may be smaller than the configured batch size, but not larger. Always False if a custom batch sampler
        yields the batches, or if several ranks read with `in_order=False`.

        Args:
            samples_per_update: Number of samples per gradient update over all ranks.
            num_steps: Number of batches per rank and update.
        """
        split = self._configured_split
        if not isinstance(split, SampleSplit) or not (self._is_in_order or split.num_ranks == 1):
            return False
        most_samples_per_step = -(-samples_per_update // num_steps)  # rounded up
        return num_steps <= samples_per_update and most_samples_per_step <= split.samples_per_step

    def set_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int) -> None:
        """Use `samples_per_update` samples per gradient update from the next pass on.

        Args:
            samples_per_update: Number of samples per update over all ranks; 0 to return to the user's settings.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples.
        """
        split: SampleSplit | BatchSplit | UpdateSplit = self._configured_split
        if samples_per_update:
            split = UpdateSplit(samples_per_update, num_steps, split.num_ranks, drop_multiple if split.drop_last else 1)
        self.split = replace(split, even_batches=self.even_batches)

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last step is completed with repeated samples, so that every rank gets a full batch."""
        return self.split.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.split = replace(self.split, even_batches=value)

    @property
    def seed(self) -> int:
        """Seed of the sample order and of the workers' generators."""
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed = value
        self.order.set_seed(value)

    def set_loader_option(self, name: str, value: Any) -> None:
        """Change a setting of the DataLoader that fetches the samples, from the next pass on.

        Args:
            name: "collate_fn", "worker_init_fn", "timeout", "pin_memory" or "prefetch_factor".
            value: New value.
        """
        if name == "collate_fn":
            value = value if self._rng_states is None else WorkerStateCollate(value)
        set_loader_attribute(self.inner_loader, name, value)

    def set_dataset_state_saving(self, is_saved: bool) -> None:
        """Do nothing, because a map-style dataset is read by index and its state need not be saved."""


def measure_own_rows(batch: object, rank_batch: RankBatch) -> RankBatch:
    """Return `rank_batch` with `num_rows` measured on `batch`; None if the batch has no tensor with rows.

    The field `valid_counts` is unchanged.

    Args:
        batch: Collated batch.
        rank_batch: Description of the rank's samples in this step.
    """
    return rank_batch._replace(num_rows=find_batch_size(batch))


def measure_all_rows(batch: object, rank_batch: RankBatch) -> RankBatch:
    """Return `rank_batch` with row counts measured on `batch`, for data that is not split among ranks.

    All rows count as non-padding. The counts are None if the batch has no tensor with rows.

    Args:
        batch: Collated batch.
        rank_batch: Description of the process's samples in this step.
    """
    rows = find_batch_size(batch)
    return rank_batch._replace(num_rows=rows, valid_counts=None if rows is None else (rows,))


def make_row_exchange(collectives: Collectives) -> Recount:
    """Return a function that measures a batch's rows and exchanges the counts with all ranks.

    All ranks must call the function in each step. It raises `DataError` on all ranks if the rows of any rank's batch
    cannot be counted.
    """

    def recount_rows(batch: object, rank_batch: RankBatch) -> RankBatch:
        rows = find_batch_size(batch)
        rows_by_rank = [int(numbers[0]) for numbers in collectives.gather_numbers([-1 if rows is None else rows])]
        if min(rows_by_rank) < 0:
            raise DataError(UNCOUNTABLE.format(what=f"the item that rank {rows_by_rank.index(-1)} read"))
        # `rank_batch.valid_counts` counts items. The rows of a padding item do not count.
        counts = tuple(
            num_rows if num_items else 0 for num_rows, num_items in zip(rows_by_rank, rank_batch.valid_counts or ())
        )
        return rank_batch._replace(num_rows=rows, valid_counts=counts)

    return recount_rows
