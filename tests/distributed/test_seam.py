"""Two groups: a data shard of several ranks. The strategy is the example of a package of its own, `mirror`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from tests.distributed.mirror import install, write_entry_points
from tests.distributed.ranks import run_ranks


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return write_entry_points(folder)


def make(num_rows: int = 37) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(num_rows, 4)
    return model, TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(num_rows, 1))


def mirrored(folder: Path, **options: Any) -> Accelerator:
    install(folder)
    return Accelerator(cpu=True, strategy="mirror", **options)


# ---------------------------------------------------------------- the same losses as one process


def plain(batch: int, steps: int, epochs: int) -> dict[str, torch.Tensor]:
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x, y = data.tensors
    losses, norms, size = [], [], batch * steps
    for _ in range(epochs):
        for start in range(0, len(x), size):
            loss = mse_loss(model(x[start : start + size]), y[start : start + size])
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return told(losses, norms, model)


def told(losses: list[float], norms: list[float], model: nn.Module) -> dict[str, torch.Tensor]:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "weights": weights}


def trained(folder: Path, batch: int, steps: int, epochs: int, **config: Any) -> dict[str, Any]:
    accelerator = mirrored(
        folder, gradient_accumulation_steps=steps, on_non_finite="skip",
        dataloader_config=DataLoaderConfiguration(**config),
    )  # fmt: skip
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    count = accelerator.strategy.data_shard.count
    size = batch if config.get("split_batches") else batch // count
    loader = DataLoader(data, batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, sums = [], [], [0.0, 0]
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                errors = (model(inputs) - targets).square()
                real = errors if loader.mask is None else errors[loader.mask]
                accelerator.backward(real.sum(), weight=len(real), reduction="sum")
                sums = [sums[0] + real.sum().item(), sums[1] + len(real)]
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    losses.append(float(accelerator.reduce_mean(*sums)))
                    sums = [0.0, 0]
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.strategy.check(model)
    found: dict[str, Any] = told(losses, norms, model)
    return found | {"total": loader.total_batch_size}


@pytest.mark.parametrize(
    ("world", "steps", "config"),
    [
        (4, 2, {"even_batches": False}),
        (4, 2, {"dispatch_batches": True}),
        (4, 1, {"split_batches": True}),
        (2, 2, {}),
        (2, 2, {"dispatch_batches": True}),
    ],
    ids=["weights", "dispatched", "split", "one part of the data", "one part, dispatched"],
)
def test_mirrored_ranks_train_as_one_process(package: Path, world: int, steps: int, config: dict[str, Any]) -> None:
    wanted = plain(8, steps, 2)
    for found in run_ranks(_train, world, package, steps, config):
        assert found["total"] == 8
        for name, values in wanted.items():
            torch.testing.assert_close(found[name], values, atol=2e-5, rtol=2e-5)


def _train(package: Path, steps: int, config: dict[str, Any]) -> dict[str, Any]:
    return trained(package, 8, steps, 2, **config)
