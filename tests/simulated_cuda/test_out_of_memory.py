"""Batches that are replayed in pieces after real out-of-memory errors of torch's allocator give the weights of whole batches."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from headway import Accelerator
from headway.core.runtime import process
from tests.gpu.test_running_out import Momentum

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def reset_memory_limit() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def train_in_pieces(limit: int | None) -> tuple[list[int], list[torch.Tensor], int]:
    """Train with a memory limit in bytes; return the pieces' numbers of rows, the weights, and the number of memory errors."""
    process.reset()
    torch.cuda.empty_cache()
    if limit is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + limit) / total)
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    accelerator = Accelerator(microbatching="auto")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.flip(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2048))
    sizes = []
    for batch in loader:
        for x, y in accelerator.microbatches(batch):
            with accelerator.accumulate(model):
                sizes.append(len(x))
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    weights = [parameter.detach().double().cpu() for parameter in model.parameters()]
    accelerator.free_memory()
    return sizes, weights, torch.cuda.memory_stats()["num_ooms"] - before


def test_batches_in_pieces_give_the_weights_of_whole_batches() -> None:
    whole, expected, none = train_in_pieces(None)
    pieces, found, errors = train_in_pieces(112 * MIB)
    assert (whole, none) == ([2048, 2048], 0)
    assert errors >= 1
    assert max(pieces[1:]) < 2048
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in zip(found, expected))


def test_later_steps_of_a_custom_optimizer_copy_only_the_loss_to_the_host() -> None:
    accelerator = Accelerator(microbatching="auto")
    model = torch.nn.Linear(1024, 1024)
    model, optimizer = accelerator.prepare(model, Momentum(model.parameters()))
    for number in range(4):
        accelerator.forward_backward(torch.ones(4, 1024, device="cuda"), lambda piece: model(piece).mean())
        before = simulated_cuda.counts()
        optimizer.step()
        after = simulated_cuda.counts()
        optimizer.zero_grad()
        copied = sum(after[name] - before.get(name, 0) for name in after if "bytes: device to p" in name)
        assert (copied > 4) == (number < 2), (number, copied)  # each step reads the loss, without waiting
