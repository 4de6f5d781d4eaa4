"""Functions for ranks that train on shards from a server that stalls."""

from datetime import timedelta
from pathlib import Path

import torch

from headway import Accelerator, InitProcessGroupKwargs, ShardedDataset
from headway.core.runtime.control_plane import control

COUNT = 24


def collate_values(samples: list[dict[str, float]]) -> torch.Tensor:
    """Return the values of the records as a column of shape (batch, 1)."""
    return torch.tensor([[sample["value"]] for sample in samples])


def make_parts(
    url: str, cache: str, stall_limit: float, num_workers: int
) -> tuple[ShardedDataset, torch.utils.data.DataLoader[torch.Tensor]]:
    """Return the dataset and its loader."""
    dataset = ShardedDataset(url, shuffle=True, seed=1, cache_dir=cache, memory_bytes=1, stall_limit=stall_limit)
    return dataset, torch.utils.data.DataLoader(
        dataset,
        batch_size=2,
        num_workers=num_workers,
        collate_fn=collate_values,
        prefetch_factor=2 if num_workers else None,
    )


def train_alone(url: str, cache: str) -> list[float]:
    """Return the weight after each update of plain PyTorch with batches of four."""
    dataset, _ = make_parts(url, cache, 10.0, 0)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = []
    for first in range(0, COUNT, 4):
        loss = model(collate_values([dataset[first + offset] for offset in range(4)])).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(model.weight.item())
    return weights


def train_while_one_waits(url: str, folder: str, num_workers: int, stall_limit: float = 60.0) -> list[float]:
    """Return the weight after each batch on two ranks. Only rank 1 reads from the server, which stalls once the file `go` exists."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=3))])
    dataset, loader = make_parts(url, f"{folder}/rank{accelerator.process_index}", stall_limit, num_workers)
    if accelerator.process_index == 0:
        list(dataset)  # fills this rank's cache folder
    accelerator.wait_for_everyone()
    Path(folder, "go").touch()
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    weights = []
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            assert control.current().vote([1.0], "sum") == [2.0]
        weights.append(accelerator.unwrap_model(model).weight.item())
    return weights


if __name__ == "__main__":
    import sys

    train_while_one_waits(sys.argv[1], sys.argv[2], int(sys.argv[3]), stall_limit=4.0)
    print("the end of training")
