"""Ranks as threads of one process, datasets that count what is fetched, and short ways to prepare a loader."""

import threading
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, IterableDataset

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.build import prepare_loader
from headway.core.data.loader import LoaderEvents


@dataclass(frozen=True)
class Part:
    index: int
    count: int


class Meeting:
    """Where threads exchange what they hold, in lockstep."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=20)
        self.table = [None] * count


class ThreadCollectives:
    """The part of the collectives that data loading uses, among threads."""

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


def on_ranks(count, function):
    """What `function(rank, collectives)` returns on each rank."""
    meeting = Meeting(count)
    results, errors = [None] * count, []

    def main(rank):
        try:
            results[rank] = function(rank, ThreadCollectives(rank, meeting))
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(count)]
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
    config.setdefault("use_seedable_sampler", True)  # ranks that are played by threads share one global generator
    return prepare_loader(
        loader,
        shard=Part(rank, count),
        config=DataLoaderConfiguration(**config),
        device=device,
        collectives=collectives,
        events=LoaderEvents([] if active is None else active),
        seed=seed,
        rng_types=rng_types,
    )


class Numbers(Dataset):
    """0 .. length-1; remembers what was fetched."""

    def __init__(self, length):
        self.length = length
        self.fetched = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched.append(index)
        return torch.tensor(index)


class Stream(IterableDataset):
    """0 .. length-1, as a stream; remembers what was read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __iter__(self):
        for index in range(self.length):
            self.read.append(index)
            yield torch.tensor(index)


class SizedStream(Stream):
    def __len__(self):
        return self.length


def read(loader, num_batches=None):
    """Each batch as (rows, real counts, own real count, is_last), up to `num_batches`."""
    out = []
    for batch in loader:
        rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        out.append((rows, loader.valid_counts, loader.num_valid, loader.is_last))
        if num_batches is not None and len(out) == num_batches:
            break
    return out


def joined(ranks):
    """The real rows of what several ranks read, in the order of the epoch; checks that all ranks agree."""
    out = []
    for parts in zip(*ranks, strict=True):
        assert len({counts for _, counts, _, _ in parts}) == 1
        assert len({is_last for *_, is_last in parts}) == 1
        for rank, (rows, counts, num_valid, _) in enumerate(parts):
            assert counts[rank] == num_valid
            out += rows[:num_valid]
    return out
