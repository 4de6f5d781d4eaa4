"""Test streams of `datasets` with a shuffle buffer, which resume by reading again because their state lacks the buffer."""

import datasets
import pytest
from torch.utils.data import DataLoader

from headway import Accelerator, DataLoaderConfiguration
from headway.core.data.feeds.shuffle_buffers import has_shuffle_buffer
from headway.errors import DataError


def make_stream() -> datasets.IterableDataset:
    """Return a stream of 40 numbers in four shards."""
    return datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)


def shuffle(stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """Return the stream, shuffled by a buffer and mapped."""
    return stream.shuffle(seed=3, buffer_size=8).map(lambda row: {"y": row["x"] + 1})


def test_buffers_are_found_below_other_steps() -> None:
    plain = make_stream()
    assert not has_shuffle_buffer(plain.map(lambda row: row))
    assert has_shuffle_buffer(shuffle(plain))
    assert has_shuffle_buffer(datasets.interleave_datasets([plain, plain.shuffle(seed=1, buffer_size=4)]))
    assert not has_shuffle_buffer([1, 2])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_shuffled_stream_loses_nothing_when_it_resumes(num_workers: int, is_stateful: bool) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful)

    def prepare():
        context = "fork" if num_workers else None
        loader = DataLoader(
            shuffle(make_stream()), batch_size=3, num_workers=num_workers, multiprocessing_context=context
        )
        return Accelerator(cpu=True, dataloader_config=config).prepare(loader)

    def read(loader, steps=None):
        rows = []
        for step, batch in enumerate(loader):
            rows += batch["x"].tolist()
            if step + 1 == steps:
                return rows, loader.state_dict()
        return rows, None

    whole, _ = read(prepare())
    assert sorted(whole) == list(range(40))
    first, state = read(prepare(), steps=4)
    loader = prepare()
    loader.load_state_dict(state)
    second, state = read(loader, steps=3)
    loader = prepare()
    loader.load_state_dict(state)
    assert first + second + read(loader)[0] == whole


def test_registered_shuffled_stream_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    stream = shuffle(make_stream())
    accelerator.register_for_checkpointing(stream)
    loader = accelerator.prepare(DataLoader(stream, batch_size=3))
    with pytest.raises(DataError, match="without the samples in the buffer"):
        next(iter(loader))
