"""Helpers for loader tests: threads as ranks, datasets that record reads, and short ways to prepare and read a loader."""

import threading
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, IterableDataset

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.batch_reads import BatchReads
from headway.core.data.build import prepare_loader
from headway.core.data.loader import LoaderEvents


@dataclass(frozen=True)
class ShardPosition:
    """Number of a data shard, and the number of all shards."""

    index: int
    count: int


class Rendezvous:
    """Meeting point at which threads exchange their objects in lockstep."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=20)
        self.table = [None] * count


class ThreadCollectives:
    """The collectives that data loading uses, among threads."""

    def __init__(self, rank, meeting):
        self.rank, self.meeting, self.world_size = rank, meeting, len(meeting.table)
        self.num_calls = 0

    def gather_objects(self, obj):
        self.num_calls += 1
        self.meeting.table[self.rank] = obj
        self.meeting.barrier.wait()
        rows = list(self.meeting.table)
        self.meeting.barrier.wait()
        return rows

    def gather_numbers(self, values):
        return [list(map(float, row)) for row in self.gather_objects(values)]

    def broadcast_object(self, obj, src=0):
        return self.gather_objects(obj)[src]


def run_on_ranks(count, function):
    """Run `function(rank, collectives)` in one thread per rank and return the results, or raise the first error."""
    meeting = Rendezvous(count)
    results, errors = [None] * count, []

    def run_rank(rank):
        try:
            results[rank] = function(rank, ThreadCollectives(rank, meeting))
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if told:
        raise told[0]
    return results


def prepare(
    loader, rank=0, count=1, collectives=None, *, seed=7, active=None, device=None, rng_types=("generator",), **config
):
    """Return a prepared loader for one rank. Keyword arguments not listed are settings of DataLoaderConfiguration."""
    config.setdefault("use_seedable_sampler", True)  # threads share one global generator
    return prepare_loader(
        loader,
        shard=ShardPosition(rank, count),
        config=DataLoaderConfiguration(**config),
        device=device,
        collectives=collectives,
        events=LoaderEvents(BatchReads(active_loaders=active)),
        seed=seed,
        rng_types=rng_types,
    )


class Numbers(Dataset):
    """Dataset of the numbers from 0 to length - 1, which records the fetched indices."""

    def __init__(self, length):
        self.length = length
        self.fetched = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched.append(index)
        return torch.tensor(index)


class Stream(IterableDataset):
    """Stream of the numbers from 0 to length - 1, which records the numbers read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __iter__(self):
        for index in range(self.length):
            self.read.append(index)
            yield torch.tensor(index)


class SizedStream(Stream):
    """Stream with a length."""

    def __len__(self):
        return self.length


def read_batches(loader, num_batches=None):
    """Return a list of (rows, real counts of all ranks, own real count, is_last), one for each of `num_batches` or all batches."""
    out = []
    for batch in loader:
        rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        out.append((rows, loader.valid_counts, loader.num_valid, loader.is_last))
        if num_batches is not None and len(out) == num_batches:
            break
    return out


def join_real_rows(ranks):
    """Return the real rows that several ranks read, in the order of the epoch, and check that all ranks agree."""
    out = []
    for parts in zip(*ranks, strict=True):
        assert len({counts for _, counts, _, _ in parts}) == 1
        assert len({is_last for *_, is_last in parts}) == 1
        for rank, (rows, counts, num_valid, _) in enumerate(parts):
            assert counts[rank] == num_valid
            out += rows[:num_valid]
    return out
