"""Batches of a map-style dataset: indices are planned one round ahead, and only what this rank needs is fetched."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Sampler

from headway.data.feed import UNCOUNTABLE, Delivery, seed_generator
from headway.data.order import Order
from headway.data.rebuild import rebuild
from headway.data.shard import BatchSplit, SampleSplit, Share, Start, mark_last
from headway.data.windows import WindowSplit
from headway.data.worker import Seeded, SeededIndices, is_read_one_by_one
from headway.errors import DataError
from headway.log import get_logger
from headway.ops.collectives import Collectives
from headway.ops.tree import find_batch_size
from headway.runtime.seed import mix

log = get_logger(__name__)

Recount = Callable[[Any, Share], Share]
"""Corrects a share's counts once its batch is there."""


class ShareSampler(Sampler[Any]):
    """Where the inner loader takes its indices from; remembers the shares it handed out, for the batches they become.

    Args:
        is_batched: hand out lists of indices; False: single ones.
    """

    def __init__(self, is_batched: bool) -> None:
        self.is_batched = is_batched
        self._shares: Iterator[Share] = iter(())
        self._handed_out: deque[Share] = deque()

    def begin(self, shares: Iterator[Share]) -> deque[Share]:
        """The next pass is over these; returns where they will queue up."""
        self._shares, self._handed_out = shares, deque()
        return self._handed_out

    def __iter__(self) -> Iterator[Any]:
        # Bound now: a pass that is still alive when the next one begins keeps its own.
        return self._indices(self._shares, self._handed_out)

    def _indices(self, shares: Iterator[Share], handed_out: deque[Share]) -> Iterator[Any]:
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
        seed: of the workers' streams.
        collectives: the ranks that have to agree on the rows of unbatched items; None: this process reads alone.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, split: SampleSplit | BatchSplit, ranks: Sequence[int],
                 seed: int, collectives: Collectives | None) -> None:  # fmt: skip
        self.order = order
        self.split: SampleSplit | BatchSplit | WindowSplit = split
        self._own_split = split
        self.ranks = ranks
        self._seed = seed
        self.is_batched = loader.batch_sampler is not None
        self._is_seeded = loader.num_workers > 0
        self._is_one_by_one = is_read_one_by_one(loader.dataset)
        self._is_in_order = getattr(loader, "in_order", True) or loader.num_workers == 0
        if not self._is_in_order:
            log.warning_once(
                "in_order=False: a state saved in mid-epoch does not know which batches overtook others; after "
                "resuming from it a few may come twice or not at all"
            )
        self._sampler = ShareSampler(self.is_batched)
        self._recount = self._choose_recount(collectives)
        source = {"batch_sampler": self._sampler} if self.is_batched else {"batch_size": None, "sampler": self._sampler}
        self.inner = rebuild(loader, **source)

    @property
    def seed(self) -> int:
        """Of the order and of the workers' streams."""
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed = self.order.seed = value

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

    def start(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Begin a pass; what lies before it is never fetched."""
        if not self._is_in_order and self.split.count > 1:
            self._check_uniform()
        seed = mix(self.seed, epoch)
        begun = self.split.start(self.order.draw(epoch), consumed, num_skipped)
        handed_out = self._sampler.begin(self._shares(begun, seed))
        seed_generator(self.inner, mix(seed, 1))
        return begun.consumed, self._deliveries(iter(self.inner), handed_out)

    def _shares(self, begun: Start, seed: int) -> Iterator[Share]:
        split, position = self.split, begun.consumed
        for chunk, is_last in mark_last(begun.rounds):
            num_samples = split.count_samples(chunk)
            for rank in self.ranks:
                indices, counts = split.share(chunk, rank, begun.opening)
                num_rows = len(indices)
                if self._is_seeded:
                    indices = self._seeded(indices, seed, position + split.offset(chunk, rank))
                yield Share(indices, num_rows, counts, num_samples, is_last)
            position += num_samples

    def _seeded(self, indices: list[Any], seed: int, position: int) -> Any:
        if not self.is_batched:
            return [Seeded(index, seed, position) for index in indices]
        return SeededIndices(indices, seed, position) if self._is_one_by_one else Seeded(indices, seed, position)

    def _deliveries(self, batches: Iterator[Any], handed_out: deque[Share]) -> Iterator[Delivery]:
        recount = self._recount
        for batch in batches:
            share = handed_out.popleft()
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

    def state(self, is_running: bool) -> dict[str, Any]:
        """What the order needs to be drawn again."""
        return self.order.state(is_running)

    def load_state(self, state: dict[str, Any]) -> None:
        """Draw the next epoch from that."""
        self.order.load_state(state)


def measure_rows(batch: Any, share: Share) -> Share:
    """Take the rows of the batch from the batch itself."""
    return share._replace(num_rows=find_batch_size(batch))


def count_rows(batch: Any, share: Share) -> Share:
    """The same for one process alone, where all of them are real."""
    rows = find_batch_size(batch)
    return share._replace(num_rows=rows, valid_counts=None if rows is None else (rows,))


def agree_rows(collectives: Collectives) -> Recount:
    """Take each rank's rows from its batch, by one small exchange a step."""

    def recount(batch: Any, share: Share) -> Share:
        rows = find_batch_size(batch)
        told = [int(numbers[0]) for numbers in collectives.gather_numbers([-1 if rows is None else rows])]
        if min(told) < 0:
            raise DataError(UNCOUNTABLE.format(what=f"the item that rank {told.index(-1)} read"))
        # The share counts items; an item that only fills the round has no real rows.
        counts = tuple(rows if is_real else 0 for rows, is_real in zip(told, share.valid_counts or ()))
        return share._replace(num_rows=rows, valid_counts=counts)

    return recount
