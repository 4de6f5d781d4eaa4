"""Sizes predicted from torch's allocator statistics: pieces of a batch on one and two ranks, and a batch size."""

import pytest
import torch

from headway import Accelerator, find_executable_batch_size
from headway.core.runtime import process
from tests.distributed.ranks import run_ranks

pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")
pytestmark = pytest.mark.sizes

MIB, WIDTH, TOKENS = 1 << 20, 1024, 1024


def build_model() -> torch.nn.Module:
    """Build a model that needs about 29 MiB per row: several activations of 4 MiB each, and a loss."""
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).cuda()


def limit_memory(num_mib: int) -> None:
    fits_by_hand(1, 2)  # libraries allocate their workspaces before the limit is computed
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_mib * MIB) / total)


def fits_by_hand(num_rows: int, batch_rows: int) -> bool:
    """Return whether a plain loop over pieces of `num_rows` rows fits into memory."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for _ in range(2):
            for piece in torch.zeros(batch_rows, TOKENS, WIDTH, device="cuda").split(num_rows):
                model(piece).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad()
        del model, optimizer
        piece = None
        torch.cuda.empty_cache()
    return True


def cut_batches(limits: list[int], batch_rows: int, num_batches: int) -> tuple[list[list[int]], int, int]:
    """Train with automatic micro-batching under a memory limit in MiB per rank.

    Return each batch's piece sizes, the number of replays, and the largest piece with which a plain loop fits.
    """
    accelerator = Accelerator(microbatching="auto")
    limit_memory(limits[accelerator.process_index])
    largest = max(rows for rows in range(1, batch_rows) if rows == 1 or fits_by_hand(rows, batch_rows))
    model = build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = torch.zeros(batch_rows, TOKENS, WIDTH, device="cuda")
    pieces: list[list[int]] = []

    def loss(piece: torch.Tensor) -> torch.Tensor:
        pieces[-1].append(len(piece))
        return model(piece).square().mean()

    for _ in range(num_batches):
        pieces.append([])
        accelerator.forward_backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return pieces, sum(sum(each) > batch_rows for each in pieces), largest


@pytest.mark.parametrize("limits", [[512], [900, 512]], ids=["one rank", "two ranks"])
def test_pieces_are_as_few_as_fit_after_one_prediction(limits: list[int]) -> None:
    """Check that the rank with the least memory decides, and that at most three batches are replayed."""
    results = run_ranks(cut_batches, len(limits), limits, 32, 8, timeout=200)
    largest = min(result[2] for result in results)
    assert 1 < largest < 16
    for pieces, num_replays, _ in results:
        assert num_replays <= 3
        assert pieces[-1] == results[0][0][-1], "ranks agree"
        assert len(pieces[-1]) <= -(-32 // largest) + 1
        assert max(pieces[-1]) <= largest
        assert sum(pieces[-1]) == 32


def test_batch_size_is_predicted_from_small_probes() -> None:
    process.reset()
    limit_memory(512)
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    calls: list[list[int]] = []

    @find_executable_batch_size(starting_batch_size=100, search="predicted")
    def train(batch_size: int) -> None:
        calls.append([batch_size, 0])
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.zeros(batch_size, TOKENS, WIDTH, device="cuda")).square().mean().backward()
            calls[-1][1] += 1
            optimizer.step()
            optimizer.zero_grad()

    train()
    assert torch.cuda.memory_stats()["num_ooms"] - before <= 1
    assert [each for each, _ in calls[:2]] == [2, 4]
    assert all(num == 2 for _, num in calls[:2])
    assert calls[-1] == [train.batch_size, 5]
    assert not fits_by_hand(train.batch_size + 2, train.batch_size + 2)
    torch.cuda.set_per_process_memory_fraction(1.0)
