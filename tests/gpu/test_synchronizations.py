"""On a CUDA device: synchronizations per update, as reported by CUDA, do not exceed the figures in docs/synchronizations.md."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headway import Accelerator
from tests.synchronizations.count import NUM_FIRST
from tests.synchronizations.loops import LOOPS
from tests.synchronizations.test_counts import read_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


@pytest.mark.parametrize("name", LOOPS)
def test_an_update_waits_no_more_often_than_the_page_says(name: str) -> None:
    updates: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def at_update() -> None:
            found = [str(each.message) for each in caught if "synchronizing CUDA operation" in str(each.message)]
            updates.append(len(found))
            caught.clear()

        torch.cuda.set_sync_debug_mode("warn")
        try:
            LOOPS[name](at_update)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert max(updates[NUM_FIRST:]) <= read_table()[name], updates


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_arrive_whole_while_the_device_is_busy(num_workers: int) -> None:
    """Check that the memory of a batch is not reused before the device has finished computing with it."""
    accelerator = Accelerator()
    data = torch.arange(64 * 4096, dtype=torch.float32).reshape(64, 4096)
    loader = accelerator.prepare(DataLoader(TensorDataset(data), batch_size=4, num_workers=num_workers))
    sums = []
    for (batch,) in loader:
        torch.cuda._sleep(4 * 10**7)  # cycles: 20 ms
        sums.append(batch.double().sum())
        del batch
    assert torch.stack(sums).cpu().tolist() == data.reshape(-1, 4 * 4096).double().sum(1).tolist()


class OneBuffer(Dataset[torch.Tensor]):
    """A dataset that returns the same pinned buffer for every item."""

    def __init__(self) -> None:
        self.buffer = torch.empty(1 << 24, pin_memory=True)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.buffer.fill_(index)


def test_a_buffer_of_the_dataset_is_not_overwritten_while_it_is_copied() -> None:
    loader = Accelerator().prepare(DataLoader(OneBuffer(), batch_size=None))
    assert [batch.unique().tolist() for batch in list(loader)] == [[float(number)] for number in range(8)]


def test_the_copy_does_not_wait_for_what_is_queued() -> None:
    """Check that a batch is copied on its own stream.

    On the compute stream, the copy would only start after the kernel that keeps the device busy.
    """
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2, 8)), batch_size=1))
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # cycles: half a second
    side = loader._transfer._stream
    next(batches)
    side.synchronize()
    assert not torch.cuda.current_stream().query(), "the device became idle before the copy finished"
