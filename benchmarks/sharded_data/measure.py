"""Cost of a batch from sharded files, and time to resume at sample 10^6, compared with other readers of the same files.

Every reader returns batches of 64 records on one process without workers. "plain torch" is an IterableDataset that reads
the lines of the files in order and parses them; it cannot shuffle, and it resumes by reading again. A resume is timed from the
saved state to the first batch.

Run it with `python -m benchmarks.sharded_data.measure`.
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

from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway import Accelerator, ShardedDataset

NUM_RECORDS, NUM_SHARDS, BATCH = 1_100_000, 11, 64
NUM_BATCHES = 400
TEXT = "the quick brown fox jumps over the lazy dog " * 8
RESUME_AT = 1_000_000 // BATCH * BATCH


def write_shards(folder: Path) -> None:
    """Write the same records as JSON lines and as Parquet."""
    size = NUM_RECORDS // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        records = [{"id": number, "text": TEXT[number % 40 :]} for number in range(shard * size, shard * size + size)]
        with (folder / f"{shard:02}.jsonl").open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(records), folder / f"{shard:02}.parquet", row_group_size=2000
        )


class Lines(IterableDataset[Any]):
    """Iterable dataset of the lines of JSON files, in order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        for name in self.names:
            with open(name, "rb") as file:
                for line in file:
                    yield json.loads(line)


class Rows(IterableDataset[Any]):
    """Iterable dataset of the rows of Parquet files, in order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __iter__(self) -> Iterator[Any]:
        for name in self.names:
            for batch in pyarrow.parquet.ParquetFile(name).iter_batches(2000, use_threads=False):
                yield from batch.to_pylist()


def count_samples(samples: list[Any]) -> int:
    """Return the size of a batch; a collate function that costs nothing."""
    return len(samples)


def make_loader(dataset: Any) -> DataLoader[Any]:
    """Return a plain DataLoader."""
    return DataLoader(dataset, batch_size=BATCH, collate_fn=count_samples)


def make_pass(make: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that reads NUM_BATCHES batches from a new loader."""

    def run() -> None:
        assert sum(islice(make(), NUM_BATCHES)) == NUM_BATCHES * BATCH

    return run


def time_resume(resume: Callable[[], Any], repeats: int) -> float:
    """Return the smallest number of seconds from a saved state to the first batch, over `repeats` resumes."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        assert next(iter(resume())) == BATCH
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Measure all variants in turn and write result.json."""
    torch.set_num_threads(1)
    repeats = get_num_repeats(7)
    rows: dict[str, Any] = {}
    resumes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder)
        for suffix, reader, word in (("jsonl", Lines, "json"), ("parquet", Rows, "parquet")):
            names = sorted(str(path) for path in folder.glob(f"*.{suffix}"))

            def stream(names: list[str] = names, word: str = word) -> Any:
                return datasets.load_dataset(
                    word, data_files=names, split="train", streaming=True, cache_dir=str(folder / "hf")
                )

            def open_shards(shuffle: bool, names: list[str] = names) -> ShardedDataset:
                return ShardedDataset(names, shuffle=shuffle, cache_dir=folder / "cache")

            start = time.perf_counter()
            open_shards(False)
            resumes[f"{suffix}: build the index of {NUM_RECORDS} records, once"] = time.perf_counter() - start
            passes = {
                "plain torch": make_pass(lambda reader=reader, names=names: make_loader(reader(names))),
                "datasets, streaming": make_pass(lambda stream=stream: make_loader(stream())),
                "datasets, streaming, shuffled": make_pass(
                    lambda stream=stream: make_loader(stream().shuffle(seed=1, buffer_size=10_000))
                ),
                "headway": make_pass(
                    lambda open_shards=open_shards: Accelerator(cpu=True).prepare(make_loader(open_shards(False)))
                ),
                "headway, shuffled": make_pass(
                    lambda open_shards=open_shards: Accelerator(cpu=True).prepare(make_loader(open_shards(True)))
                ),
            }
            times = time_interleaved(passes, repeats)
            rows |= {
                f"{suffix}, {name}": row for name, row in make_rows(times, 1e6 / NUM_BATCHES).items() if name in passes
            }

            def resume_ours(open_shards: Any = open_shards) -> Any:
                return Accelerator(cpu=True).prepare(make_loader(open_shards(True))).skip(RESUME_AT // BATCH)

            resumes[f"{suffix}, headway, shuffled"] = time_resume(resume_ours, 3)
            resumes[f"{suffix}, plain torch (reads all records again)"] = time_resume(
                lambda reader=reader, names=names: islice(make_loader(reader(names)), RESUME_AT // BATCH, None), 1
            )
            hf = stream()
            for _ in islice(hf, RESUME_AT):
                pass
            state = hf.state_dict()

            def resume_hf(stream: Any = stream, state: Any = state) -> Any:
                resumed = stream()
                resumed.load_state_dict(state)
                return make_loader(resumed)

            resumes[f"{suffix}, datasets, in order, from its state dict"] = time_resume(resume_hf, 3)
    rows["resume at sample 10^6, in seconds"] = {name: round(value, 4) for name, value in resumes.items()}
    save_result("sharded_data", "us per batch of 64 records", rows, "The first row of each format is the floor")


if __name__ == "__main__":
    main()
