"""Batches of a map-style dataset: indices are planned one round ahead, and only what this rank needs is fetched."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, Sampler

from headway.data.feeds import UNCOUNTABLE, Delivery, State, seed_generator
from headway.data.feeds.worker import (
    IndexAfter,
    SeededIndices,
    WorkerRNGStates,
    WorkerStateCollate,
    is_read_one_by_one,
    rebuild,
    seed_generators,
)
from headway.data.sampling.order import BaseSeed, SampleOrder
from headway.data.sampling.rng import write_text
from headway.data.sampling.shard import BatchSplit, EpochStart, RankBatch, SampleSplit, WindowSplit, mark_last
from headway.errors import DataError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import find_batch_size
from headway.runtime.seed import mix

log = get_logger(__name__)

Recount = Callable[[Any, RankBatch], RankBatch]
"""Corrects a share's counts once its batch is there."""


class ShareSampler(Sampler[Any]):
    """Where the inner loader takes its indices from; remembers the shares it handed out, for the batches they become.

    Args:
        is_batched: hand out lists of indices; False: single ones.
    """

    def __init__(self, is_batched: bool) -> None:
        self.is_batched = is_batched
        self._shares: Iterator[RankBatch] = iter(())
        self._handed_out: deque[RankBatch] = deque()

    def begin(self, shares: Iterator[RankBatch]) -> deque[RankBatch]:
        """The next pass is over these; returns where they will queue up."""
        self._shares, self._handed_out = shares, deque()
        return self._handed_out

    def __iter__(self) -> Iterator[Any]:
        # Bound now: a pass that is still alive when the next one begins keeps its own.
        return self._indices(self._shares, self._handed_out)

    def _indices(self, shares: Iterator[RankBatch], handed_out: deque[RankBatch]) -> Iterator[Any]:
        for share in shares:
            handed_out.append(share)
            yield share.indices if self.is_batched else share.indices[0]


class MappedFeed:
    """Reads a map-style dataset.

    Args:
        loader: the user's, for its dataset and settings.
        order: of samples, or of batches where `split` hands out batches.
        split: cuts the order into rounds.
        ranks: whose batches to read: this rank's, or all for one process that reads for them.
        seed: of the workers' generators.
        collectives: the ranks that have to agree on the rows of unbatched items; None: this process reads alone.
        base_seed: draws that of the workers.
        is_seedable: order and workers' generators are functions of (seed, epoch); False: on one process, they are torch's own.
        is_shared: other ranks read the same, and their workers need the same generators.
        reads_ahead: without workers, fetch a batch before the one in hand is done with.
        leaves_workers: their generators are torch's own on several ranks too; a resumed epoch then has others.
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
        is_seedable: bool,
        is_shared: bool = False,
        reads_ahead: bool = False,
        leaves_workers: bool = False,
    ) -> None:
        self.order = order
        self.split: SampleSplit | BatchSplit | WindowSplit = split
        self._own_split, self.ranks, self._seed = split, ranks, seed
        self.is_batched = loader.batch_sampler is not None
        self._base_seed = base_seed
        self._is_alone = split.count == 1 and not is_shared
        has_workers, is_alone = loader.num_workers > 0, self._is_alone and not is_seedable
        self._is_seeded = has_workers and not is_alone and not leaves_workers
        self._is_given = self._is_alone or leaves_workers
        self._reads_ahead = reads_ahead and not has_workers
        # torch's shuffling draws once more at its end, which must not be looked for while another batch is in hand.
        self._is_counted = self._reads_ahead and type(getattr(order, "sampler", None)) is RandomSampler
        self._draws_at_once = has_workers or len(ranks) > 1
        self._is_one_by_one = is_read_one_by_one(loader.dataset)
        self._is_in_order = getattr(loader, "in_order", True) or loader.num_workers == 0
        if not self._is_in_order:
            log.warning_once(
                "in_order=False: a state saved in mid-epoch does not know which batches overtook others; after "
                "resuming from it a few may come twice or not at all"
            )
        self._sampler = ShareSampler(self.is_batched)
        self._recount = self._choose_recount(collectives)
        self._rng_states: WorkerRNGStates | None = None
        if has_workers and is_alone and self._is_in_order:
            self._rng_states = WorkerRNGStates(loader.num_workers, loader.persistent_workers)
        changes: dict[str, Any] = {"batch_sampler": self._sampler}
        if not self.is_batched:
            changes = {"batch_size": None, "sampler": self._sampler}
        if self._rng_states is not None:
            changes["collate_fn"] = WorkerStateCollate(loader.collate_fn)
        self.inner = rebuild(loader, **changes)

    @property
    def seed(self) -> int:
        """Of the order and of the workers' generators."""
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed = value
        self.order.reseed(value)

    @property
    def is_even(self) -> bool:
        """Is the last round completed?"""
        return self.split.is_even

    @is_even.setter
    def is_even(self, value: bool) -> None:
        self.split = replace(self.split, is_even=value)

    @property
    def round_size(self) -> int | None:
        """Samples (unbatched: items) that all ranks together get per step."""
        return self.split.round_size

    @property
    def step_size(self) -> int | None:
        """The same by the loader's own settings."""
        return self._own_split.round_size

    def fits_window(self, window: int, num_rounds: int) -> bool:
        """Can `window` samples be given out in so many rounds?"""
        own = self._own_split
        is_cut = isinstance(own, SampleSplit) and (self._is_in_order or own.count == 1)
        return is_cut and num_rounds <= window and -(-window // num_rounds) <= (own.round_size or 0)

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Give them out so from the next pass on; a window of 0: as the loader says."""
        own, is_even = self._own_split, self.is_even
        ragged = WindowSplit(window, num_rounds, own.count, unit if own.drop_last else 1)
        self.split = replace(ragged if window else own, is_even=is_even)

    def __len__(self) -> int:
        return self.split.num_rounds(len(self.order))

    def open(self) -> None:
        """Draw what torch's loader draws when it is iterated, and what its sampler then draws for waiting workers."""
        self._base_seed.open()
        if self._draws_at_once:
            self.order.open()

    def start(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Begin a pass; what lies before it is never fetched, but for a batch of each worker at most."""
        if not self._is_in_order and self.split.count > 1:
            self._check_uniform()
        seed = mix(self.seed, epoch)
        rng_states = self._rng_states
        num_repeated = 0 if rng_states is None else rng_states.begin(consumed > 0 and not num_skipped)
        begun = self.split.start(self.order.draw(epoch), 0 if num_repeated else consumed, num_skipped)
        handed_out = self._sampler.begin(self._shares(begun, seed))
        seed_generator(self.inner, mix(seed, 1))
        self._base_seed.begin(self.inner, is_given=self._is_given)
        deliveries = self._deliveries(iter(self.inner), handed_out)
        for _ in islice(deliveries, num_repeated):
            pass
        if self._reads_ahead:
            deliveries = (delivery for delivery, _ in mark_last(deliveries))
        return consumed if num_repeated else begun.consumed, deliveries

    def follow(self, epoch: int) -> None:
        """A pass that another process reads begins: draw the order, so that it is known to be drawn."""
        self.order.draw(epoch)
        self._base_seed.begin(self.inner, is_given=False)

    def _shares(self, begun: EpochStart, seed: int) -> Iterator[RankBatch]:
        split, position = self.split, begun.consumed
        goes_on = iter(() if self._rng_states is None else self._rng_states.to_send())
        for chunk, is_last in self._marked(begun):
            num_samples = 0
            for rank in self.ranks:
                indices, counts = split.share(chunk, rank, begun.opening)
                num_rows, num_samples = len(indices), sum(counts)
                if self._is_seeded:
                    indices = self._seeded(indices, seed, position + split.offset(chunk, rank))
                yield RankBatch(self._continued(indices, next(goes_on, None)), num_rows, counts, num_samples, is_last)
            position += num_samples

    def _marked(self, begun: EpochStart) -> Iterator[tuple[Any, bool]]:
        """Each round with whether it is the last."""
        split, position = self.split, begun.consumed
        if not self._is_counted or not isinstance(split, SampleSplit):
            yield from mark_last(begun.rounds)
            return
        first_of_last = (len(self) - 1) * split.round_size
        for chunk in begun.rounds:
            yield chunk, position >= first_of_last
            position += len(chunk)

    def _continued(self, indices: Any, rng_states: str | None) -> Any:
        return indices if rng_states is None else self._after(indices, write_text, rng_states)

    def _seeded(self, indices: list[Any], seed: int, position: int) -> Any:
        if self.is_batched and self._is_one_by_one:
            return SeededIndices(indices, seed, position)
        return self._after(indices, seed_generators, mix(seed, position))

    def _after(self, indices: list[Any], act: Callable[[Any], None], value: int | str) -> Any:
        return IndexAfter(indices, act, value) if self.is_batched else [IndexAfter(indices[0], act, value)]

    def _deliveries(self, batches: Iterator[Any], handed_out: deque[RankBatch]) -> Iterator[Delivery]:
        recount, rng_states = self._recount, self._rng_states
        for batch in batches:
            share = handed_out.popleft()
            if rng_states is not None:
                batch = rng_states.note(batch)
            yield batch, share if recount is None else recount(batch, share)

    def _choose_recount(self, collectives: Collectives | None) -> Recount | None:
        if self.is_batched:
            return None if self._is_in_order or self.split.count > 1 else count_rows
        if len(self.ranks) > 1:
            return measure_rows
        return count_rows if collectives is None else agree_rows(collectives)

    def _check_uniform(self) -> None:
        size = self.round_size if isinstance(self.split, SampleSplit) else None
        if size is None or not (self.split.drop_last or len(self.order) % size == 0):
            raise DataError(
                "in_order=False lets workers hand batches over in any order, but this data has a round unlike the "
                "others (a short end, or batches of several sizes), which all ranks must reach at the same step. "
                "Pass drop_last=True or in_order=True to the DataLoader"
            )

    def state(self, is_running: bool) -> State:
        """What the order needs to be drawn again, and the workers' generators."""
        state = {**self._base_seed.state(is_running), **self.order.state(is_running)}
        return state if self._rng_states is None else state | self._rng_states.state(is_running)

    def left(self) -> State:
        """Nothing: an order is drawn again, and samples are fetched when they are due."""
        return {}

    def mark(self) -> State:
        """The same: it is cheap."""
        return self.state(True)

    def load_state(self, state: State) -> None:
        """Draw the next epoch from that."""
        self._base_seed.load_state(state)
        self.order.load_state(state)
        if self._rng_states is not None:
            self._rng_states.load_state(state)


def measure_rows(batch: object, share: RankBatch) -> RankBatch:
    """Take the rows of the batch from the batch itself."""
    return share._replace(num_rows=find_batch_size(batch))


def count_rows(batch: object, share: RankBatch) -> RankBatch:
    """The same for one process alone, where all of them are real."""
    rows = find_batch_size(batch)
    return share._replace(num_rows=rows, valid_counts=None if rows is None else (rows,))


def agree_rows(collectives: Collectives) -> Recount:
    """Take each rank's rows from its batch, by one small exchange a step."""

    def recount(batch: object, share: RankBatch) -> RankBatch:
        rows = find_batch_size(batch)
        told = [int(numbers[0]) for numbers in collectives.gather_numbers([-1 if rows is None else rows])]
        if min(told) < 0:
            raise DataError(UNCOUNTABLE.format(what=f"the item that rank {told.index(-1)} read"))
        # The share counts items; an item that only fills the round has no real rows.
        counts = tuple(rows if is_real else 0 for rows, is_real in zip(told, share.valid_counts or ()))
        return share._replace(num_rows=rows, valid_counts=counts)

    return recount
