"""What a prepared loader costs per batch beyond torch's DataLoader, on one process.

The samples are plain numbers and are not stacked, so that the iteration itself is what is measured. By default
Accelerate reads streams on the main process and dispatches them; with dispatch_batches=False it hands them through.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.timing import HAS_ACCELERATE, interleave, num_repeats, rows_of, save

NUM_BATCHES, BATCH_SIZE = 500, 4


class Numbers(Dataset[Any]):
    """A map-style dataset of its own indices."""

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_BATCHES * BATCH_SIZE))


ROW = torch.zeros(BATCH_SIZE)


def same(samples: list[Any]) -> torch.Tensor:
    """A collate function that costs nothing."""
    return ROW


def loader(kind: str) -> DataLoader[Any]:
    """A plain loader."""
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH_SIZE, collate_fn=same)
    return DataLoader(Numbers(), batch_size=BATCH_SIZE, shuffle=kind == "shuffled map", collate_fn=same)


def walk(batches: Any) -> Callable[[], None]:
    """One pass over the loader."""

    def run() -> None:
        for _ in batches:
            pass

    return run


def main() -> None:
    """Measure and save."""
    repeats = num_repeats(60)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    rows: dict[str, Any] = {}
    for kind in ("map", "shuffled map", "stream"):
        passes = {
            "torch": walk(loader(kind)),
            "torch, again (A/A)": walk(loader(kind)),
            "headway": walk(headway.Accelerator(cpu=True).prepare(loader(kind))),
        }
        if HAS_ACCELERATE:
            import accelerate

            passes["accelerate"] = walk(accelerate.Accelerator(cpu=True).prepare(loader(kind)))
            if kind == "stream":
                direct = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
                undispatched = accelerate.Accelerator(cpu=True, dataloader_config=direct)
                passes["accelerate, dispatch_batches=False"] = walk(undispatched.prepare(loader(kind)))
        found = rows_of(interleave(passes, repeats), 1e6 / NUM_BATCHES)
        rows |= {f"{kind}: {name}": row for name, row in found.items()}
    save("loader_cost", "us per batch", rows)


if __name__ == "__main__":
    main()
