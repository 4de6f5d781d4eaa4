"""Test how batches are moved to a device. tests/synchronizations and tests/gpu test the side stream."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.core.data.transfer import BlockingTransfer, make_transfer
from tests.unit.core.data.fakes import prepare

META = torch.device("meta")


def test_batches_on_their_device_are_not_moved():
    for non_blocking in (None, True, False):
        assert make_transfer(None, non_blocking) is None
        assert make_transfer(torch.device("cpu"), non_blocking) is None


def test_device_without_streams_uses_blocking_transfers():
    for non_blocking in (None, True, False):
        transfer = make_transfer(META, non_blocking)
        assert isinstance(transfer, BlockingTransfer)
        assert not transfer.is_faster_when_pinned
    moved = transfer({"x": torch.ones(2), "text": ["a"]})
    assert (moved["x"].device, moved["text"]) == (META, ["a"])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))


def test_workers_still_pin_memory_after_the_rounds_change():
    """Pinning is set on the inner loader if batches go to an accelerator. Otherwise, the main thread would pin."""
    feed = prepare(DataLoader(Stream(), batch_size=4, num_workers=1))._feed
    feed.inner_loader.pin_memory = True
    feed.set_update_size(4, 2, 1)
    assert (feed.inner_loader.batch_size, feed.inner_loader.pin_memory) == (2, True)
