"""Losses whose backward hook runs the model in pieces, as GradCache and the cached losses of sentence-transformers do."""

from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import run_ranks

NUM_UPDATES, STEPS, ROWS = 3, 2, 6


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def make_rows(update: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * update + 10 * step + rank)
    return torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)


def compare_rows(embeddings: torch.Tensor) -> torch.Tensor:
    """Return a loss in which each row depends on all others."""
    return torch.nn.functional.cross_entropy(embeddings @ embeddings.T, torch.arange(ROWS).roll(1))


def compute_cached_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the loss of all rows, whose backward computes the embeddings of two rows at a time again."""
    pieces = rows.split(2)
    with torch.no_grad():
        embeddings = [model(piece) for piece in pieces]
    leaves = [each.detach().requires_grad_() for each in embeddings]
    loss = compare_rows(torch.cat(leaves))
    loss.backward()

    def run_model(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            for piece, leaf in zip(pieces, leaves, strict=True):
                ((model(piece) * leaf.grad).sum() * grad).backward()

    result = loss.detach().requires_grad_()
    result.register_hook(run_model)
    return result


def train(strategy: str) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=STEPS)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for update in range(NUM_UPDATES):
        for step in range(STEPS):
            with accelerator.accumulate(model):
                rows = make_rows(update, step, accelerator.process_index)
                accelerator.backward(compute_cached_loss(model, rows))
                optimizer.step()
                optimizer.zero_grad()
    return list(accelerator.get_state_dict(model).values())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_cached_loss_trains_as_the_whole_batch_does(strategy: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in range(NUM_UPDATES):
        for step in range(STEPS):
            for rank in range(2):
                (compare_rows(model(make_rows(update, step, rank))) / (2 * STEPS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(train, 2, strategy)[0]
    torch.testing.assert_close(found, list(model.state_dict().values()), rtol=1e-9, atol=1e-11)
