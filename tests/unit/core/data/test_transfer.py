"""How batches get to a device; the side stream itself is shown in tests/synchronizations and tests/gpu."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from headway.core.data.transfer import BlockingTransfer, make_transfer
from tests.unit.core.data.fakes import prepare

META = torch.device("meta")


def test_nothing_is_moved_where_batches_are():
    for non_blocking in (None, True, False):
        assert make_transfer(None, non_blocking) is None
        assert make_transfer(torch.device("cpu"), non_blocking) is None


def test_a_device_without_streams_gets_batches_the_plain_way():
    for non_blocking in (None, True, False):
        transfer = make_transfer(META, non_blocking)
        assert isinstance(transfer, BlockingTransfer)
        assert not transfer.wants_pinned
    moved = transfer({"x": torch.ones(2), "text": ["a"]})
    assert (moved["x"].device, moved["text"]) == (META, ["a"])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))


def test_workers_go_on_pinning_when_a_stream_is_read_in_other_rounds():
    """Asked for beside the loader, where batches go to an accelerator; without it the loop's own thread would pin."""
    feed = prepare(DataLoader(Stream(), batch_size=4, num_workers=1))._feed
    feed.inner.pin_memory = True
    feed.keep_window(4, 2, 1)
    assert (feed.inner.batch_size, feed.inner.pin_memory) == (2, True)
