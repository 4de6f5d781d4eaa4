"""Test stall limits of datasets with remote storage, also below wrappers, and the leniency while a batch is fetched."""

from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from headway import Accelerator
from headway.core.data.stalls import find_stall_limit
from headway.core.runtime import heartbeat_file


class Remote(Dataset[Any]):
    """Dataset of numbers that records the leniency of the hang watch at each read."""

    def __init__(self, stall_limit: float) -> None:
        self.stall_limit = stall_limit
        self.seen: list[float] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.seen.append(heartbeat_file.get_own_file().read().timeout_extension)
        return index


def test_wrappers_have_the_limit_of_their_datasets() -> None:
    remote = Remote(7.0)
    local = torch.utils.data.TensorDataset(torch.arange(3))
    assert find_stall_limit(local) == 0.0
    assert find_stall_limit([1, 2]) == 0.0
    assert find_stall_limit(Subset(remote, [0])) == 7.0
    assert find_stall_limit(ConcatDataset([local, Subset(remote, [1]), Remote(3.0)])) == 7.0


def test_hang_watch_is_lenient_only_while_a_batch_is_fetched() -> None:
    accelerator = Accelerator(cpu=True)
    remote, other = Remote(7.0), Remote(0.0)
    loader, plain = accelerator.prepare(DataLoader(remote, batch_size=2), DataLoader(other, batch_size=2))
    remote.seen.clear()
    for _ in loader:
        assert heartbeat_file.get_own_file().read().timeout_extension == 0.0
    for _ in plain:
        pass
    assert remote.seen == [7.0] * 6
    assert set(other.seen) == {0.0}
    assert heartbeat_file.get_own_file().read().timeout_extension == 0.0
    for _ in loader:
        break
    assert heartbeat_file.get_own_file().read().timeout_extension == 0.0
