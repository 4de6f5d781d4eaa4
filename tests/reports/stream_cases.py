"""Iterable data sets that are the same on all ranks or differ, for the ranks of `test_unlike_streams.py`."""

import itertools
import logging
import random

import datasets
import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import HeadwayError

ROWS = 32


class Stream(IterableDataset):
    """A stream of the rows that a function returns in each pass."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows())


class OwnGenerator(IterableDataset):
    """A stream that shuffles with its own NumPy generator."""

    def __init__(self, seed):
        self.generator = numpy.random.default_rng(seed)

    def __iter__(self):
        return iter(self.generator.permutation(ROWS).tolist())


class Augmented(IterableDataset):
    """A stream with the same order on all ranks, and noise that differs between ranks."""

    def __init__(self, rank):
        self.generator = numpy.random.default_rng(rank)

    def __iter__(self):
        for row in range(ROWS):
            yield {"x": row + torch.from_numpy(self.generator.normal(size=3)), "label": row}


def _shuffle_rows(shuffle):
    rows = list(range(ROWS))
    shuffle(rows)
    return rows


def _make_hf_stream(num_shards):
    return datasets.Dataset.from_dict({"label": list(range(ROWS))}).to_iterable_dataset(num_shards=num_shards)


UNLIKE = {
    "datasets with shards, shuffled": lambda rank, world: _make_hf_stream(4).shuffle(buffer_size=8),
    "datasets with one shard, shuffled": lambda rank, world: _make_hf_stream(1).shuffle(buffer_size=8),
    "datasets, a shard for each rank": lambda rank, world: _make_hf_stream(4).shard(num_shards=world, index=rank),
    "datasets, a shuffled shard for each rank": lambda rank, world: (
        _make_hf_stream(4).shard(world, rank).shuffle(seed=1, buffer_size=8)
    ),
    "every n-th row": lambda rank, world: Stream(lambda: itertools.islice(range(ROWS), rank, None, world)),
    "strings": lambda rank, world: Stream(lambda: [f"row {row}" for row in range(rank, ROWS, world)]),
    "floats": lambda rank, world: Stream(lambda: (torch.tensor(row * 1.0) for row in range(rank, ROWS, world))),
    "an own random.Random": lambda rank, world: Stream(lambda: _shuffle_rows(random.Random(rank).shuffle)),
    "samples of one rank only": lambda rank, world: Stream(lambda: range(0 if rank else ROWS)),
}
LIKE = {
    # A NumPy generator of the data set receives rank 0's state, like a torch.Generator.
    "a NumPy generator that the dataset holds": lambda rank, world: OwnGenerator(rank),
    "in order": lambda rank, world: Stream(lambda: range(ROWS)),
    "strings": lambda rank, world: Stream(lambda: [f"row {row}" for row in range(ROWS)]),
    "one seed": lambda rank, world: Stream(lambda: _shuffle_rows(random.Random(7).shuffle)),
    "Python's global generator": lambda rank, world: Stream(lambda: _shuffle_rows(random.shuffle)),
    "NumPy's global generator": lambda rank, world: Stream(lambda: numpy.random.permutation(ROWS).tolist()),
    "torch's global generator": lambda rank, world: Stream(lambda: torch.randperm(ROWS).tolist()),
    "datasets with shards, one seed": lambda rank, world: _make_hf_stream(4).shuffle(seed=3, buffer_size=8),
    "datasets with one shard, one seed": lambda rank, world: _make_hf_stream(1).shuffle(seed=3, buffer_size=8),
    "noise of each rank's own": lambda rank, world: Augmented(rank),
}


def _get_rows(batch):
    """Return the row numbers of a batch: a tensor of numbers, a list of "row 5", or a dict with the numbers as labels."""
    rows = batch["label"] if isinstance(batch, dict) else batch
    if isinstance(rows, torch.Tensor):
        rows = rows.tolist()
    return [int(float(str(row).removeprefix("row "))) for row in rows]


def read(make, num_workers=0, num_epochs=2, **config):
    """Return the valid rows of each epoch on this rank, or the error."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    rank = accelerator.process_index
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    context = "fork" if num_workers else None  # lambdas in the cases cannot be pickled
    dataset = make(rank, accelerator.num_processes)
    epochs = []
    try:
        loader = accelerator.prepare(
            DataLoader(dataset, batch_size=4, num_workers=num_workers, multiprocessing_context=context)
        )
        for _ in range(num_epochs):
            epochs.append([row for batch in loader for row in _get_rows(batch)[: loader.num_valid]])
    except HeadwayError as error:
        return f"{type(error).__name__}: {error}"
    return epochs


class WarningRecorder(logging.Handler):
    """A log handler that collects Headway's warnings in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("headway").addHandler(self)

    def emit(self, record):
        """Append the message."""
        self.texts.append(record.getMessage())


def read_all(cases, num_workers=0, **config):
    """Return the result of `read` for each case on this rank."""
    return {name: read(cases[name], num_workers, **config) for name in cases}


def read_unlike(num_workers=0, **config):
    """Read streams that differ between the ranks."""
    return read_all(UNLIKE, num_workers, **config)


def read_like(num_workers=0, **config):
    """Read streams that are the same on all ranks. Return the rows and the warnings."""
    recorder = WarningRecorder()
    return read_all(LIKE, num_workers, **config), recorder.texts
