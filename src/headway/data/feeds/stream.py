"""Batches of an iterable dataset: every rank reads the whole stream and collates only its slice of each round.

The inner loader gathers the raw samples of a whole round (torch's own batching, in each worker); the collate function
then keeps this rank's slice. So all ranks know every rank's true counts without asking, the user's dataset and
worker_init_fn see what they would see in a plain loader, and samples that are skipped are read but never collated or
moved. With several workers each reads what the dataset gives it (a dataset that ignores `get_worker_info` repeats its
data, as in plain torch), rounds come from them in turn, and each worker's last one may be short.

All ranks must see the same stream: shuffle it by `set_epoch`, by a `torch.Generator` that the dataset holds (its state
is synchronised and saved), or in workers, whose RNG states are the same on all ranks.

A dataset that is sharded itself, such as Hugging Face's `datasets.IterableDataset` with at least as many shards as ranks,
is read the same way, as if this rank were alone. Ranks may then hold different amounts of data, and agree on each round:
one small exchange a round, one round ahead, tells all ranks all counts and the end. A rank that has run out yields
batches of no real rows until the others are done too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple
from warnings import warn

from torch.utils.data import DataLoader, get_worker_info

from headway.data.feeds import UNCOUNTABLE, Delivery, State, seed_generator
from headway.data.feeds.worker import rebuild
from headway.data.sampling.order import BaseSeed
from headway.data.sampling.rng import Agree, DatasetRNGStates, OwnGenerators
from headway.data.sampling.shard import RankBatch, SampleSplit, WindowSplit, mark_last
from headway.errors import DataError, HeadwayWarning
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import find_batch_size, map_leaves, map_tensors
from headway.runtime.seed import mix


class Collated(NamedTuple):
    """What the collate function makes of a round.

    Attributes:
        batches: one for each rank that is read for; empty where the round is skipped.
        shares: what is known about each of them.
        num_samples: real samples (unbatched: items) of the round.
        state: of the inner loader just after this round, where it keeps one.
    """

    batches: list[Any]
    shares: list[RankBatch]
    num_samples: int
    state: Any = None


class StreamCollate:
    """Collates only the slices of a round that are wanted. Travels to workers, and keeps its own state in each.

    Args:
        collate_fn: the user's.
        split: how a round is cut.
        ranks: whose slices to collate.
        is_batched: a slice is several samples; False: it is one ready-made batch.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], split: SampleSplit | WindowSplit, ranks: Sequence[int], is_batched: bool
    ) -> None:
        self.collate_fn, self.split, self.ranks, self.is_batched = collate_fn, split, ranks, is_batched
        self.begin()

    def begin(self, num_skipped: int = 0, num_cut: int = 0) -> None:
        """A pass begins after `num_skipped` rounds and `num_cut` samples of the next one."""
        self._num_skipped = num_skipped
        self._num_cut = num_cut
        self._is_seeking = num_skipped > 0 or num_cut > 0
        self._num_seen = 0
        self._opening: list[Any] | None = None

    def __call__(self, samples: list[Any]) -> Collated:
        """Collate one round's raw samples."""
        if self._opening is None:
            self._opening = copy_containers(samples) if self.split.is_even else []
        if self._is_seeking:
            number = self._number()
            if number < self._num_skipped:
                return Collated([], [], len(samples))
            self._is_seeking = False
            if number == self._num_skipped:
                samples = samples[self._num_cut :]
        return self._collate(samples, self._opening) if samples else Collated([], [], 0)

    def _number(self) -> int:
        """Which round of the pass this is; workers make them in turn."""
        worker = get_worker_info()
        number = self._num_seen if worker is None else self._num_seen * worker.num_workers + worker.id
        self._num_seen += 1
        return number

    def _collate(self, samples: list[Any], opening: list[Any]) -> Collated:
        is_full, num_samples = len(samples) == self.split.round_size, len(samples)
        batches, shares = [], []
        counts = None if self.is_batched else self._count_items(samples)
        for rank in self.ranks:
            own, sample_counts = self.split.share(samples, rank, opening)
            # A collate function may take its samples apart; where one comes twice, each time it is whole.
            own = own if is_full else copy_containers(own)
            batch = self.collate_fn(own) if self.is_batched else self.collate_fn(own[0])
            num_rows = len(own) if self.is_batched else find_batch_size(batch)
            batches.append(batch)
            shares.append(RankBatch([], num_rows, sample_counts if self.is_batched else counts, num_samples, False))
        return Collated(batches, shares, num_samples)

    def _count_items(self, items: list[Any]) -> tuple[int, ...] | None:
        rows = [self._rows(item) for item in items]
        if None not in rows:
            return (*(size for size in rows if size is not None), *[0] * (self.split.count - len(rows)))
        if self.split.count == 1:
            return None
        raise DataError(UNCOUNTABLE.format(what=f"an item of type {type(items[rows.index(None)]).__name__}"))

    def _rows(self, item: object) -> int | None:
        rows = find_batch_size(item)
        return find_batch_size(self.collate_fn(item)) if rows is None else rows


@dataclass(frozen=True)
class OwnShards:
    """What this rank reads of a dataset that is sharded itself.

    Attributes:
        dataset: its shards.
        index: its number among the ranks.
        count: the ranks.
        mark_last: agrees with the others on every round, and tells which is the last.
    """

    dataset: Any
    index: int
    count: int
    mark_last: Callable[[Iterator[Collated]], Iterator[tuple[Collated, bool]]]


class StreamFeed:
    """Reads an iterable dataset.

    Args:
        loader: the user's, for its dataset and settings.
        split: cuts what is read into rounds.
        ranks: whose batches to read: this rank's, or all for one process that reads for them.
        seed: of the workers' streams.
        kind: the class of the inner loader; one with a state_dict resumes by it.
        own: this rank's shards, where the dataset is sharded itself; None: the whole stream.
        agree: begin each epoch with rank 0's states of the generators that the dataset holds; None: do not.
        base_seed: draws that of the workers, as torch would; on one process they get it.
        is_shared: other ranks read the same, and their workers need the same streams.
        joins: workers read a batch of one rank at a time, and a round is made of as many as there are ranks, one worker after
            the other; False: each worker reads whole rounds.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: SampleSplit,
        ranks: Sequence[int],
        seed: int,
        base_seed: BaseSeed,
        kind: type[DataLoader[Any]] = DataLoader,
        own: OwnShards | None = None,
        agree: Agree | None = None,
        is_shared: bool = False,
        joins: bool = False,
    ) -> None:
        self._is_shared, self._joins, self.source, self._base_seed = is_shared, joins, loader, base_seed
        self.seed, self._own = seed, own
        self._generators = OwnGenerators(loader.dataset, agree)
        self._collate = StreamCollate(loader.collate_fn, split, ranks, is_batched=loader.batch_size is not None)
        self._own_split, self._kind = split, kind
        self.inner = self._build()
        self._is_stateful = hasattr(self.inner, "state_dict")
        # In workers streams are apart anyway; a loader with a state of its own does not read again.
        self._is_apart = not (self._is_stateful or self.inner.num_workers)
        self._lines = DatasetRNGStates()  # without any, where the dataset does not draw apart
        self._num_rounds = 0
        self._inner_state: Any = None
        self._loaded: State = {}

    def _build(self) -> DataLoader[Any]:
        changes = {} if self._own is None else {"dataset": self._own.dataset}
        split = self._collate.split
        return rebuild(
            self.source,
            self._kind,
            batch_size=(split.round_size or 0) // split.count if self._joins else split.round_size,
            drop_last=split.drop_last,
            collate_fn=list if self._joins else self._collate,
            **changes,
        )

    @property
    def is_even(self) -> bool:
        """Are short rounds completed?"""
        return self._collate.split.is_even

    @is_even.setter
    def is_even(self, value: bool) -> None:
        self._collate.split = replace(self._collate.split, is_even=value)

    @property
    def round_size(self) -> int:
        """Samples (unbatched: items) that all ranks together get per step."""
        return (self._collate.split.round_size or 0) * (1 if self._own is None else self._own.count)

    @property
    def step_size(self) -> int:
        """The same by the loader's own settings."""
        return self._own_split.round_size * (1 if self._own is None else self._own.count)

    def fits_window(self, window: int, num_rounds: int) -> bool:
        """Can `window` samples be given out in so many rounds? A stream is read in equal ones."""
        is_cut = self._own is None and self._collate.is_batched and window % num_rounds == 0
        return is_cut and window // num_rounds <= self._own_split.round_size

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Give them out so from the next pass on; a window of 0: as the loader says."""
        own, now = self._own_split, self._collate.split
        ragged = WindowSplit(window // num_rounds, 1, own.count, unit if own.drop_last else 1)
        wanted = replace(ragged if window else own, is_even=now.is_even)
        if wanted != now:
            self._collate.split, is_pinning = wanted, self.inner.pin_memory
            self.inner = self._build()
            self.inner.pin_memory = is_pinning  # which whoever moves the batches may have asked for

    def __len__(self) -> int:
        split = SampleSplit(self.round_size, 1, self._collate.split.drop_last)
        return split.num_rounds(len(self.source.dataset))  # type: ignore[arg-type]

    def open(self) -> None:
        """Draw what torch's loader draws when it is iterated."""
        self._lines.end()
        self._base_seed.open()

    def start(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Begin a pass; what lies before it is read, not collated - unless the inner loader can resume by its state."""
        # Who reads the same stream needs the same randomness in its workers; who reads other shards, another.
        seed_generator(self.inner, mix(self.seed, epoch, 0 if self._own is None else 1 + self._own.index))
        is_alone = self._own is None and self._own_split.count == 1 and not self._is_shared
        self._base_seed.begin(self.inner, is_given=is_alone)
        self._generators.begin()
        self._lines.begin()
        loaded, self._loaded = self._loaded, {}
        if num_skipped or not consumed:
            loaded = {}
        num_rounds, num_cut = (num_skipped, 0) if num_skipped else self._seek(consumed, loaded)
        self._num_rounds, self._inner_state = num_rounds, loaded.get("inner")
        if self._inner_state is not None:
            self._collate.begin()
            self.inner.load_state_dict(self._inner_state)  # type: ignore[attr-defined]
            return consumed, self._deliveries(self._rounds())
        if self.inner.persistent_workers and not num_cut:
            # Workers that outlive this pass would go on skipping in the next one if this one ends too early.
            self._collate.begin()
        else:
            self._collate.begin(num_rounds, num_cut)
        rounds = self._rounds()
        consumed = num_cut + sum(collated.num_samples for collated, _ in islice(rounds, num_rounds))
        return consumed, self._deliveries(rounds)

    def follow(self, epoch: int) -> None:
        """A pass that another process reads begins."""
        self._base_seed.begin(self.inner, is_given=False)

    def _seek(self, consumed: int, loaded: State) -> tuple[int, int]:
        """The rounds to skip, and the samples of the next one."""
        if loaded.get("round_size") == self.round_size:
            return int(loaded["num_rounds"]), 0
        if consumed and (self._own is not None or self.inner.num_workers > 1):
            readers = "Several workers read in turn" if self._own is None else "Each rank reads its own shards"
            warn(
                f"a stream is resumed after {consumed} samples with rounds of {self.round_size} samples instead of "
                f"{loaded.get('round_size', 'an unknown number')}. {readers}, so some samples may come twice and "
                "others not at all. Resume with the same number of ranks and the same batch size to be exact",
                HeadwayWarning,
                stacklevel=2,
            )
        return divmod(consumed, self.round_size)

    def _rounds(self) -> Iterator[tuple[Collated, bool]]:
        return (mark_last if self._own is None else self._own.mark_last)(self._stamped(self._read()))

    def _read(self) -> Iterator[Collated]:
        if self._joins:
            return self._joined(iter(self.inner))
        if not self._is_apart:
            return iter(self.inner)
        return self._read_apart(self._lines.fetch(lambda: iter(self.inner)))

    def _joined(self, batches: Iterator[list[Any]]) -> Iterator[Collated]:
        while several := list(islice(batches, self._collate.split.count)):
            samples = [sample for batch in several for sample in batch]
            if not self._collate.split.drop_last or len(samples) == self._collate.split.round_size:
                yield self._collate(samples)

    def _read_apart(self, batches: Iterator[Collated]) -> Iterator[Collated]:
        """The same batches; what the dataset draws for each comes from lines of its own."""
        while (collated := self._lines.fetch(lambda: next(batches, None))) is not None:
            yield collated

    def _stamped(self, batches: Iterator[Collated]) -> Iterator[Collated]:
        for collated in batches:
            if self._is_stateful:
                collated = collated._replace(state=self.inner.state_dict())  # type: ignore[attr-defined]
            if collated.num_samples:
                yield collated

    def _deliveries(self, rounds: Iterator[tuple[Collated, bool]]) -> Iterator[Delivery]:
        for collated, is_last in rounds:
            self._num_rounds, self._inner_state = self._num_rounds + 1, collated.state
            for batch, share in zip(collated.batches, collated.shares):
                if is_last or self.inner.pin_memory:
                    # Some versions of torch make a list of a tuple when they pin memory.
                    counts = None if share.valid_counts is None else tuple(share.valid_counts)
                    share = share._replace(is_last=is_last, valid_counts=counts)
                yield batch, share
        self._lines.end()

    def state(self, is_running: bool) -> State:
        """Rounds read, and the inner loader's own state as it was after the last of them."""
        if not is_running:
            began = {**self._base_seed.state(False), **self._generators.state(False)}
            return {**self._loaded, **began, **self._lines.state()}
        state = self.mark()
        if self._is_stateful:
            state |= {"inner": self._inner_state, "reader": self._reader}
        return state

    def mark(self) -> State:
        """Rounds read, without the inner loader's own state, which is that of the batch last read."""
        began = {**self._base_seed.state(True), **self._generators.state(True), **self._lines.state()}
        return {**began, "num_rounds": self._num_rounds, "round_size": self.round_size}

    def left(self) -> State:
        """What the next pass needs of one that was left."""
        return self._lines.left()

    def load_state(self, state: State) -> None:
        """Go on from that; the inner loader's state serves only who reads the same in rounds of the same size."""
        self._base_seed.load_state(state)
        self._generators.load_state(state)
        if self._is_apart:
            self._lines.load_state(state)
        self._loaded = {name: value for name, value in state.items() if name in ("num_rounds", "round_size", "inner")}
        is_mine = state.get("round_size") == self.round_size and state.get("reader") == self._reader
        if not (is_mine and self._is_stateful):
            self._loaded.pop("inner", None)

    @property
    def _reader(self) -> int | None:
        """Whose shards are read; None: the whole stream, as every rank does."""
        return None if self._own is None else self._own.index


def copy_containers(tree: object) -> Any:
    """The same leaves in lists, dicts and tuples of their own."""
    return map_leaves(lambda leaf: leaf, tree)


def is_shardable(dataset: object, count: int) -> bool:
    """Can every one of `count` ranks read shards of its own?"""
    num_shards = getattr(dataset, "num_shards", None)
    has_enough = count > 1 and isinstance(num_shards, int) and num_shards >= count
    return has_enough and callable(getattr(dataset, "shard", None))


class SharedRounds:
    """Turns one rank's parts into rounds that all ranks take part in.

    Args:
        collectives: the ranks.
        drop_last: end with the first round in which a rank has no batch.
    """

    def __init__(self, collectives: Collectives, drop_last: bool) -> None:
        self._collectives, self._drop_last = collectives, drop_last
        self._spare: Collated | None = None

    def __call__(self, parts: Iterator[Collated]) -> Iterator[tuple[Collated, bool]]:
        """Each round's part with whether it is the last round."""
        current = self._agree(next(parts, None))
        while current is not None:
            following = self._agree(next(parts, None))
            yield current, following is None
            current = following

    def _agree(self, part: Collated | None) -> Collated | None:
        if part is not None and part.batches:
            # The loop may change the batch it gets (e.g. pop a key): the spare has containers of its own.
            self._spare = part._replace(batches=copy_containers(part.batches))
        rows = self._collectives.gather_numbers([*_count(part), self._spare is not None])
        has_part = [row[0] >= 0 for row in rows]
        if not any(has_part) or (self._drop_last and not all(has_part)):
            self._spare = None
            return None
        sources = [rank for rank, row in enumerate(rows) if row[2]]
        if not all(has_part) and 0 < len(sources) < len(rows):
            self._send_spare(sources[0])
        num_samples = int(sum(max(0, row[1]) for row in rows))
        mine = part if part is not None else self._spare
        if mine is None:  # without any spare this round is one of those that are skipped on resuming
            return Collated([], [], num_samples)
        counts = tuple(max(0, int(row[0])) for row in rows)
        shares = [share._replace(valid_counts=counts, num_samples=num_samples) for share in mine.shares]
        batches = mine.batches if part is not None else copy_containers(mine.batches)
        return Collated(batches, shares, num_samples, mine.state)

    def _send_spare(self, source: int) -> None:
        """Give ranks whose shards held nothing at all a batch to copy."""
        spare = self._spare
        given = None if spare is None else spare._replace(batches=compact(spare.batches), state=None)
        given = self._collectives.broadcast_object(given, source)
        self._spare = given if spare is None else spare


def _count(part: Collated | None) -> tuple[int, int]:
    """Real rows and samples; -1 real rows where there is no part."""
    if part is None:
        return -1, 0
    if not part.batches:
        return 0, part.num_samples
    counts = part.shares[0].valid_counts
    if counts is None:
        raise DataError(UNCOUNTABLE.format(what="an item"))
    return counts[0], part.num_samples


def compact(tree: object) -> Any:
    """The tree with tensors that own no more memory than they show: pickling a view would send all it looks into."""
    return map_tensors(
        lambda tensor: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, tree
    )
