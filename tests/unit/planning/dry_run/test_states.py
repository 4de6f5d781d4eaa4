"""Test bytes of optimizer state in a plan against those of torch's optimizers on one process."""

import torch
from torch import nn

import headway


class Model(nn.Module):
    """Model with a large matrix that rank 0 owns, and a scalar bias of which rank 1 has an empty shard."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(64, 64, bias=False)
        self.small = nn.ModuleList(nn.Linear(64, 24, bias=False) for _ in range(12))
        self.scalar = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.large(x).sum() + sum(part(x).sum() for part in self.small) + self.scalar.sum()


def test_shards_missing_on_the_dry_run_rank_are_counted():
    planned = headway.plan(Model, "fsdp", 2, step=lambda model: model(torch.zeros(8, 64)), optimizer="muon")
    states = [planned.shares.get_share(rank).optimizer_state for rank in range(2)]
    matrices = 4 * (64 * 64 + 12 * 64 * 24)  # one momentum for each
    assert sum(states) == matrices + 2 * 4 + 2 * 4  # two moments of the scalar, and its step count on both ranks
    assert states[1] > states[0]  # so rank 1 was dry-run
