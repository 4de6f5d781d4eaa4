"""Cost of a prepared loader per batch beyond torch's DataLoader, on one process.

The samples are plain numbers and are not stacked, so that only the iteration is measured. By default
Accelerate reads streams on the main process and dispatches the batches; with dispatch_batches=False it does not.

`python benchmarks/run.py loader_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved

NUM_BATCHES, BATCH_SIZE = 500, 4


class Numbers(Dataset[Any]):
    """Map-style dataset of its own indices."""

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    """Iterable dataset of the same indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_BATCHES * BATCH_SIZE))


FIXED_BATCH = torch.zeros(BATCH_SIZE)


def return_fixed_batch(samples: list[Any]) -> torch.Tensor:
    """Return a fixed batch: a collate function that costs nothing."""
    return FIXED_BATCH


def make_loader(kind: str) -> DataLoader[Any]:
    """Return a plain DataLoader for "map", "shuffled map" or "stream"."""
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH_SIZE, collate_fn=return_fixed_batch)
    return DataLoader(Numbers(), batch_size=BATCH_SIZE, shuffle=kind == "shuffled map", collate_fn=return_fixed_batch)


def make_pass(batches: Any) -> Callable[[], None]:
    """Return a function that passes over all batches once."""

    def run() -> None:
        for _ in batches:
            pass

    return run


def main() -> None:
    """Measure all variants in turn and write result.json."""
    repeats = get_num_repeats(60)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    rows: dict[str, Any] = {}
    for kind in ("map", "shuffled map", "stream"):
        passes = {
            "torch": make_pass(make_loader(kind)),
            "torch, again (A/A)": make_pass(make_loader(kind)),
            "headway": make_pass(headway.Accelerator(cpu=True).prepare(make_loader(kind))),
        }
        if HAS_ACCELERATE:
            import accelerate

            passes["accelerate"] = make_pass(accelerate.Accelerator(cpu=True).prepare(make_loader(kind)))
            if kind == "stream":
                configuration = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
                undispatched = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
                passes["accelerate, dispatch_batches=False"] = make_pass(undispatched.prepare(make_loader(kind)))
        kind_rows = make_rows(time_interleaved(passes, repeats), 1e6 / NUM_BATCHES)
        rows |= {f"{kind}: {name}": row for name, row in kind_rows.items()}
    save_result("loader_cost", "us per batch", rows)


if __name__ == "__main__":
    main()
