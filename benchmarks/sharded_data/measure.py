"""What a batch of sharded files costs, and how long a resume at sample 10^6 takes, beside other readers of the same files.

Every reader gives batches of 64 records on one process without workers. "plain torch" is an IterableDataset that reads
the lines of the files in order and parses them; it cannot shuffle or resume without reading. A resume lasts from the
saved state to the first batch.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.timing import interleave, num_repeats, rows_of, save
from headway import Accelerator, ShardedDataset

NUM_RECORDS, NUM_SHARDS, BATCH = 1_100_000, 11, 64
NUM_BATCHES = 400
TEXT = "the quick brown fox jumps over the lazy dog " * 8
RESUME_AT = 1_000_000 // BATCH * BATCH


def write_shards(folder: Path) -> None:
    """Write one dataset as JSON lines and as Parquet."""
    size = NUM_RECORDS // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        records = [{"id": number, "text": TEXT[number % 40 :]} for number in range(shard * size, shard * size + size)]
        with (folder / f"{shard:02}.jsonl").open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(records), folder / f"{shard:02}.parquet", row_group_size=2000
        )


class Lines(IterableDataset[Any]):
    """Lines of JSON files, in order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        for name in self.names:
            with open(name, "rb") as file:
                for line in file:
                    yield json.loads(line)


class Rows(IterableDataset[Any]):
    """Rows of Parquet files, in order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        for name in self.names:
            for batch in pyarrow.parquet.ParquetFile(name).iter_batches(2000, use_threads=False):
                yield from batch.to_pylist()


def count(samples: list[Any]) -> int:
    """Return the size of a batch; a collate function that costs nothing."""
    return len(samples)


def load(dataset: Any) -> DataLoader[Any]:
    """Return a plain loader."""
    return DataLoader(dataset, batch_size=BATCH, collate_fn=count)


def walk(make: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that reads some batches from a new loader."""

    def run() -> None:
        assert sum(islice(make(), NUM_BATCHES)) == NUM_BATCHES * BATCH

    return run


def time_resume(resume: Callable[[], Any], repeats: int) -> float:
    """Return the fewest seconds from a saved state to the first batch."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        assert next(iter(resume())) == BATCH
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    """Measure and save."""
    torch.set_num_threads(1)
    repeats = num_repeats(7)
    rows: dict[str, Any] = {}
    resumes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_shards(folder)
        for suffix, reader, word in (("jsonl", Lines, "json"), ("parquet", Rows, "parquet")):
            names = sorted(str(path) for path in folder.glob(f"*.{suffix}"))

            def stream(names: list[str] = names, word: str = word) -> Any:
                return datasets.load_dataset(
                    word, data_files=names, split="train", streaming=True, cache_dir=str(folder / "hf")
                )

            def open_shards(shuffle: bool, names: list[str] = names) -> ShardedDataset:
                return ShardedDataset(names, shuffle=shuffle, cache_dir=folder / "cache")

            began = time.perf_counter()
            open_shards(False)
            resumes[f"{suffix}: build the index of {NUM_RECORDS} records, once"] = time.perf_counter() - began
            passes = {
                "plain torch": walk(lambda reader=reader, names=names: load(reader(names))),
                "datasets, streaming": walk(lambda stream=stream: load(stream())),
                "datasets, streaming, shuffled": walk(
                    lambda stream=stream: load(stream().shuffle(seed=1, buffer_size=10_000))
                ),
                "headway": walk(
                    lambda open_shards=open_shards: Accelerator(cpu=True).prepare(load(open_shards(False)))
                ),
                "headway, shuffled": walk(
                    lambda open_shards=open_shards: Accelerator(cpu=True).prepare(load(open_shards(True)))
                ),
            }
            found = interleave(passes, repeats)
            rows |= {
                f"{suffix}, {name}": row for name, row in rows_of(found, 1e6 / NUM_BATCHES).items() if name in passes
            }

            def resume_ours(open_shards: Any = open_shards) -> Any:
                return Accelerator(cpu=True).prepare(load(open_shards(True))).skip(RESUME_AT // BATCH)

            resumes[f"{suffix}, headway, shuffled"] = time_resume(resume_ours, 3)
            resumes[f"{suffix}, plain torch (reads again)"] = time_resume(
                lambda reader=reader, names=names: islice(load(reader(names)), RESUME_AT // BATCH, None), 1
            )
            hf = stream()
            for _ in islice(hf, RESUME_AT):
                pass
            state = hf.state_dict()

            def resume_hf(stream: Any = stream, state: Any = state) -> Any:
                again = stream()
                again.load_state_dict(state)
                return load(again)

            resumes[f"{suffix}, datasets, in order, by its state"] = time_resume(resume_hf, 3)
    rows["resume at sample 10^6, in seconds"] = {name: round(value, 4) for name, value in resumes.items()}
    save("sharded_data", "us per batch of 64 records", rows, "the first row of each format is the floor")


if __name__ == "__main__":
    main()
