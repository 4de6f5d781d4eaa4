"""Under sharded layouts, what only one rank notices becomes an error or a skipped update on all ranks, so that no rank waits."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.core.strategies.fully_sharded import dtensors
from headway.errors import PrepareError, StateError
from tests.distributed.layouts import build_seeded, run_each
from tests.distributed.ranks import run_ranks


class Net(nn.Module):
    """Model with two blocks, whose last layer (`extra`) a forward pass can skip."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.first, self.extra = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.blocks[0][0].weight[:, :4] = 0  # the first rows of self.first have no gradient

    def forward(self, x: torch.Tensor, is_whole: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.extra(x) if is_whole else x


def prepare_training(layout: str, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy=layout, **options)
    model = build_seeded(0, Net)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def parameters_unused_on_one_rank() -> None:
    accelerator, model, optimizer = prepare_training("fsdp")
    x = torch.ones(2, 8)

    def update(is_whole: bool) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, is_whole).sum())
            optimizer.step()
            optimizer.zero_grad()

    update(True)
    update(True)
    with pytest.raises(StateError, match=r": 2 on rank 1 \(extra\.weight, extra\.bias\)\. If"):
        update(accelerator.process_index != 1)
    accelerator.free_memory()


def gradients_changed_on_one_rank() -> None:
    """Scale a gradient on rank 1 after clipping. If it becomes infinite, all ranks skip the update; otherwise, none does."""
    accelerator, model, optimizer = prepare_training("fsdp", on_non_finite="skip")

    def update(value: float) -> bool:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 8)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if accelerator.process_index == 1 and not math.isnan(value):
                dtensors.get_local_shard(model.extra.weight.grad).mul_(value)
            optimizer.step()
            optimizer.zero_grad()
        return not optimizer.step_was_skipped

    assert update(math.nan)
    assert update(0.5)
    assert not update(math.inf)
    assert update(math.nan)
    assert accelerator.num_updates == 3
    accelerator.free_memory()


def gradients_different_in_one_group() -> None:
    """Give rank 3 other inputs, so that the gradients of ranks 2 and 3 differ. Ranks 0 and 1 raise the same error."""
    plan = {"blocks.*.0": "colwise_rep"}
    accelerator, model, optimizer = prepare_training("fsdp+tp=2", kwargs_handlers=[TensorParallelOptions(plan=plan)])
    rank = accelerator.process_index
    x = torch.full((2, 8), 1.0 if rank < 3 else 2.0)

    def update() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()

    with pytest.raises(PrepareError, match=r"differ between ranks 2, 3: first\.weight"):
        update()
    accelerator.free_memory()


def test_errors_with_shards():
    cases = [gradients_changed_on_one_rank, parameters_unused_on_one_rank]
    for rank, failures in enumerate(run_ranks(run_each, 2, cases, timeout=100)):
        assert not failures, f"rank {rank}: {failures}"


def test_errors_with_groups():
    for rank, failures in enumerate(run_ranks(run_each, 4, [gradients_different_in_one_group], timeout=100)):
        assert not failures, f"rank {rank}: {failures}"
