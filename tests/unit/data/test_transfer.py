"""How batches get to a device; the side stream itself is shown in tests/synchronisations and tests/gpu."""

import torch

from headway.data.transfer import WaitingTransfer, transfer_to

META = torch.device("meta")


def test_nothing_is_moved_where_batches_are():
    for non_blocking in (None, True, False):
        assert transfer_to(None, non_blocking) is None
        assert transfer_to(torch.device("cpu"), non_blocking) is None


def test_a_device_without_streams_gets_batches_the_plain_way():
    for non_blocking in (None, True, False):
        transfer = transfer_to(META, non_blocking)
        assert isinstance(transfer, WaitingTransfer)
        assert not transfer.wants_pinned
    moved = transfer({"x": torch.ones(2), "text": ["a"]})
    assert (moved["x"].device, moved["text"]) == (META, ["a"])
