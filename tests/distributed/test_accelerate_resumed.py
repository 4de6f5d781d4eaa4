"""Scripts that run `--as accelerate` and skip the batches they have read: resumed training matches an uninterrupted run."""

import itertools
import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from headway import set_seed
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.state import AcceleratorState
from headway.core.config.run import DataLoaderConfiguration
from tests.distributed.ranks import run_ranks

ROWS, SIZE, EPOCHS = 37, 3, 3


class Rows(Dataset):
    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.tensor([float(index)]) + (torch.randn(1) if self.noise else 0)


class Stream(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        return (torch.tensor([float(i)]) for i in torch.randperm(ROWS, generator=self.generator).tolist())


def make_loader(kind):
    if kind == "stream":
        return DataLoader(Stream(), batch_size=SIZE)
    if kind == "its own generator":
        data = Rows(False)
        return DataLoader(data, SIZE, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(4)))
    noise, workers = (True, 2) if kind == "workers that draw" else (False, 0)
    return DataLoader(
        Rows(noise), SIZE, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def run(folder, saved_at, is_resumed, kind, is_seedable, says_epoch, dispatches):
    """Train and return the samples of each micro-batch over all ranks, with the weight after it.

    Args:
        folder: Folder of the checkpoint.
        saved_at: Number of micro-batches before the save.
        is_resumed: Whether to start from the checkpoint instead of saving it.
        kind: Kind of loader, see `make_loader`.
        is_seedable: `use_seedable_sampler` of the configuration.
        says_epoch: Whether the script calls `set_epoch`.
        dispatches: Whether rank 0 reads the batches of all ranks.
    """
    AcceleratorState._reset_state(reset_partial_state=False)
    set_seed(3)
    config = DataLoaderConfiguration(use_seedable_sampler=is_seedable, dispatch_batches=dispatches or None)
    accelerator = AccelerateAccelerator(cpu=True, dataloader_config=config)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(kind))
    per_epoch = -(-ROWS // (SIZE * accelerator.num_processes))
    begun, skipped = 0, 0
    if is_resumed:
        accelerator.load_state(folder)
        begun, skipped = divmod(saved_at, per_epoch)
    records = []
    for epoch in range(begun, EPOCHS):
        active = accelerator.skip_first_batches(loader, skipped) if skipped and epoch == begun else loader
        if says_epoch:
            active.set_epoch(epoch)
        for x in active:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.dropout(model(x), 0.3).mean())
                optimizer.step()
                optimizer.zero_grad()
            records.append((accelerator.gather(x).flatten().tolist(), model.weight.item()))
            if len(records) == saved_at and not is_resumed:
                accelerator.save_state(folder)
    return records


def compare_resumed_runs(root, kind, dispatches):
    """Return whether resumed runs match uninterrupted ones, for several save positions, samplers and epoch settings."""
    last = -(-ROWS // (SIZE * int(os.environ["WORLD_SIZE"])))
    found = {}
    for each in itertools.product((2, last, last + 3), (False, True), (False, True)):
        folder = f"{root}/{each}"
        whole = run(folder, each[0], False, kind, *each[1:], dispatches)
        found[each] = run(folder, each[0], True, kind, *each[1:], dispatches) == whole[each[0] :]
    return found


KINDS = [(1, "workers that draw", False), (2, "shuffled", False), (2, "stream", False), (2, "shuffled", True)]
MATRIX_KINDS = [
    (1, "shuffled", False),
    (1, "stream", False),
    (1, "its own generator", False),
    (2, "its own generator", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "kind", "dispatches"),
    [*KINDS, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MATRIX_KINDS)],
)
def test_resumed_run_matches_uninterrupted_run(num_ranks, kind, dispatches, tmp_path):
    for found in run_ranks(compare_resumed_runs, num_ranks, str(tmp_path), kind, dispatches):
        assert [each for each, is_equal in found.items() if not is_equal] == []
