"""Functions for ranks that read a `ShardedDataset` through a prepared loader."""

from pathlib import Path
from typing import Any

import torch

from headway import Accelerator, ShardedDataset
from headway.core.runtime import process

Chunk = dict[str, Any]


def collate_ids(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Return the record numbers of a batch."""
    return torch.tensor([int(sample["id"]) for sample in samples])


def read_chunks(
    pattern: str, options: dict[str, Any], chunks: list[Chunk]
) -> list[tuple[list[list[int]], dict[str, Any]]]:
    """Read parts of epochs one after another on this world's ranks, each starting from a given state.

    Args:
        pattern: Shards to read.
        options: Options of the dataset.
        chunks: Parts to read, with these keys: "state" to start from (None for the beginning), number of "steps" (None for
            all), number of "workers", "batch" size over all ranks, and "epoch".

    Returns:
        For each part, the record numbers in each of this rank's batches, and the state after it.
    """
    results = []
    for chunk in chunks:
        accelerator = Accelerator(cpu=True)
        dataset = ShardedDataset(pattern, **options)
        size = chunk["batch"] // accelerator.num_processes
        loader = accelerator.prepare(
            torch.utils.data.DataLoader(
                dataset, batch_size=size, num_workers=chunk["workers"], collate_fn=collate_ids,
                persistent_workers=chunk["workers"] > 1,
            )
        )  # fmt: skip
        loader.set_epoch(chunk["epoch"])
        if chunk["state"] is not None:
            loader.load_state_dict(chunk["state"])
        found: list[list[int]] = []
        state: dict[str, Any] = {}
        for batch in loader:
            found.append(batch[: loader.num_valid].tolist())
            if len(found) == chunk["steps"]:
                state = loader.state_dict()
                break
        results.append((found, state))
        process.reset()
    return results


def read_passes(pattern: str, options: dict[str, Any], num_workers: int) -> list[list[int]]:
    """Return this rank's record numbers of three epochs. With `num_workers` above 0, persistent workers read them."""
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(
        ShardedDataset(pattern, **options), batch_size=4, num_workers=num_workers, collate_fn=collate_ids,
        persistent_workers=num_workers > 0,
    )  # fmt: skip
    loader = accelerator.prepare(loader)
    return [[int(number) for batch in loader for number in batch[: loader.num_valid]] for _ in range(3)]


def read_with_own_cache(
    places: list[str], options: dict[str, Any], folder: str, batch: int
) -> tuple[list[list[int]], int]:
    """Read an epoch on a rank with its own cache folder, as if each rank were on another machine.

    Returns:
        The record numbers in each of this rank's batches, and the number of blocks that the rank fetched.
    """
    accelerator = Accelerator(cpu=True)
    cache = Path(folder, f"host-{accelerator.process_index}")
    dataset = ShardedDataset(places, cache_dir=cache, **options)
    size = batch // accelerator.num_processes
    loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=size, collate_fn=collate_ids))
    found = [rows[: loader.num_valid].tolist() for rows in loader]
    return found, len(list((cache / "copies").glob("*.copy")))
