"""Functions for ranks that read Hugging Face `datasets` streams, stop, and continue with other numbers of ranks and workers."""

import itertools

import datasets
from torch.utils.data import DataLoader

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import DataError

ROWS = 64


def make_stream(kind, num_shards):
    """Return a stream of the numbers 0 to 63 in equal shards."""
    table = datasets.Dataset.from_dict({"x": list(range(ROWS))})
    stream = table.to_iterable_dataset(num_shards=num_shards)
    if kind == "shuffled":
        return stream.shuffle(seed=3, buffer_size=8)
    if kind == "interleaved":
        halves = [
            table.select(range(half * ROWS // 2, (half + 1) * ROWS // 2)).to_iterable_dataset(num_shards=num_shards)
            for half in (0, 1)
        ]
        return datasets.interleave_datasets(halves, seed=3, probabilities=[0.5, 0.5], stopping_strategy="all_exhausted")
    return stream.map(lambda row: {"x": row["x"]}) if kind == "mapped" else stream


def read_stream(case, batch_size, num_workers, state, num_batches, is_registered=False):
    """Read batches and return this rank's valid rows, the state after them, and the rows of a second epoch, or the error.

    Args:
        case: Kind of stream, number of shards, and arguments of DataLoaderConfiguration.
        batch_size: Samples per rank and batch.
        num_workers: Workers of the loader.
        state: Position from which to continue, or None for the start.
        num_batches: Number of batches to read, or None for all. Only then is a second epoch read.
        is_registered: Whether the stream is registered for checkpointing, so that its state is part of the position.
    """
    kind, num_shards, config = case
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    stream = make_stream(kind, num_shards)
    if is_registered:
        accelerator.register_for_checkpointing(stream)
    context = "fork" if num_workers else None
    loader = accelerator.prepare(
        DataLoader(stream, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context)
    )
    if state is not None:
        position, dataset = state
        loader.load_state_dict(position)
        if is_registered:
            stream.load_state_dict(dataset)
    try:
        rows = [batch["x"][: loader.num_valid].tolist() for batch in itertools.islice(loader, num_batches)]
    except DataError as error:
        return str(error), None
    dataset = stream.state_dict() if is_registered else None
    following = None
    if num_batches is None:
        following = [batch["x"][: loader.num_valid].tolist() for batch in loader]
    return rows, (loader.state_dict(), dataset), following
