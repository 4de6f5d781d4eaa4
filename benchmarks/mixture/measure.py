"""Cost of a mixture of three sources: per batch, to resume at sample 1,000,000, and in the memory of a worker.

Sources are arrays in memory or `datasets.Dataset`s. Only rows of the same storage can be compared. Two rows have no exact mixture
and are floors: plain torch mixes nothing, and `interleave_datasets` draws sources at random, so its shares are not exact. Grain
is left out if it is not installed (`pip install grain`). MosaicML Streaming needs an older NumPy, so it runs in a separate
process with the Python of HEADWAY_STREAMING_PYTHON, whose environment has `mosaicml-streaming`. It is left out without that
variable. It reads the arrays from files in its own format.

`python benchmarks/run.py mixture` runs it, and rewrites the table in benchmarks/README.md.
"""

import importlib.util
import json
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy
import psutil
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler

from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway import Accelerator, Mixture

LENGTHS = {"web": 60_000, "code": 30_000, "books": 10_000}
WEIGHTS = [0.5, 0.3, 0.2]
# Round weights repeat the order of the sources after a few samples. With these, the period is too long for that shortcut.
LONG_WEIGHTS = [0.5123456, 0.2987654, 0.188889]
BATCH_SIZE, NUM_BATCHES, NUM_TOKENS = 32, 100, 64
FAR = 1_000_000
NUM_SAMPLES = FAR + 200_000


class Rows(Dataset[Any]):
    """Map-style dataset of the rows of an array."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.array = torch.from_numpy(array)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.array[index]}


ARRAYS = {name: numpy.random.default_rng(0).integers(0, 1000, (length, NUM_TOKENS)) for name, length in LENGTHS.items()}
ROWS = {name: Rows(array) for name, array in ARRAYS.items()}


def build_tables() -> dict[str, Any]:
    """Build a `datasets.Dataset` of each array."""
    return {name: datasets.Dataset.from_dict({"x": array}).with_format("torch") for name, array in ARRAYS.items()}


def mix(sources: dict[str, Any], weights: list[float] = WEIGHTS) -> Mixture:
    """Build Headway's mixture of the sources."""
    return Mixture(sources, weights=weights, seed=1, num_samples=NUM_SAMPLES)


def prepare(dataset: Any, num_workers: int = 0) -> Any:
    """Build a loader of `dataset` and prepare it with Headway."""
    return Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers))


def shuffle(dataset: Any, num_workers: int = 0) -> DataLoader[Any]:
    """Build a plain loader that draws from `dataset` at random."""
    sampler = RandomSampler(dataset, replacement=True, num_samples=NUM_SAMPLES)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def read_on(iterator: Iterator[Any]) -> Callable[[], None]:
    """Return a function that reads the next NUM_BATCHES batches of an iterator, as in the middle of a training."""

    def read() -> None:
        for _ in islice(iterator, NUM_BATCHES):
            pass

    return read


def build_grain() -> Any:
    """Build Grain's mixture of the arrays."""
    import grain

    sources = [grain.MapDataset.source(rows).shuffle(seed=1).repeat() for rows in ROWS.values()]
    # No threads: they would read ahead while other rows are measured.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.mix(sources, weights=WEIGHTS).batch(BATCH_SIZE).to_iter_dataset(options)


class StreamingReader:
    """Process that reads the same mixture with MosaicML Streaming.

    Args:
        python: Python interpreter of an environment with mosaicml-streaming.
        folder: Folder for the files that the process reads.

    Attributes:
        cpu_seconds: CPU time that the process has used for its answers.
    """

    def __init__(self, python: str, folder: Path) -> None:
        for name, array in ARRAYS.items():
            numpy.save(folder / f"{name}.npy", array)
        settings = {
            "weights": dict(zip(LENGTHS, WEIGHTS)),
            "batch_size": BATCH_SIZE,
            "num_batches": NUM_BATCHES,
            "num_samples": NUM_SAMPLES,
            "far": FAR,
        }
        script = Path(__file__).with_name("streaming_reader.py")
        self.cpu_seconds = 0.0
        self._process = subprocess.Popen(
            [python, str(script), str(folder), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: str) -> dict[str, float]:
        """Return the answer to "read", "resume" or "memory"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        self.cpu_seconds += answer["cpu"]
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_once(action: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def find_worker_memory(build: Callable[[], DataLoader[Any]]) -> float:
    """Return the MiB that a loader's worker process does not share, after 50 batches."""
    earlier = {process.pid for process in psutil.Process().children(recursive=True)}
    iterator = iter(build())
    for _ in range(50):
        next(iterator)
    workers = [process for process in psutil.Process().children() if process.pid not in earlier]
    memory = max(worker.memory_full_info().uss for worker in workers) / 2**20
    del iterator
    return memory


def main() -> None:
    """Measure all readers and write result.json; with MosaicML Streaming if HEADWAY_STREAMING_PYTHON is set."""
    with tempfile.TemporaryDirectory() as folder:
        python = os.environ.get("HEADWAY_STREAMING_PYTHON")
        streaming = StreamingReader(python, Path(folder)) if python else None
        measure(streaming)
        if streaming is not None:
            streaming.close()


def measure(streaming: StreamingReader | None) -> None:
    """Measure all readers and write result.json.

    Args:
        streaming: Process with MosaicML Streaming, or None to leave it out.
    """
    repeats = get_num_repeats(20)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    tables = build_tables()
    interleaved = datasets.interleave_datasets(
        list(tables.values()), probabilities=WEIGHTS, seed=1, stopping_strategy="all_exhausted"
    )
    loaders: dict[str, Callable[[int], Any]] = {
        "arrays: torch, no mixture": lambda workers: shuffle(ConcatDataset(list(ROWS.values())), workers),
        "arrays: headway": lambda workers: prepare(mix(ROWS), workers),
        "arrays: headway, weights of 7 digits": lambda workers: prepare(mix(ROWS, LONG_WEIGHTS), workers),
        "tables: torch, no mixture": lambda workers: shuffle(
            datasets.concatenate_datasets(list(tables.values())), workers
        ),
        "tables: headway": lambda workers: prepare(mix(tables), workers),
        "tables: datasets.interleave_datasets": lambda workers: shuffle(interleaved, workers),
    }

    def resume(loader: Any) -> None:
        loader.load_state_dict({"epoch": 0, "consumed": FAR})
        next(iter(loader))

    def skip(loader: Any) -> None:
        for _ in islice(iter(loader.sampler), FAR):
            pass

    resumes: dict[str, Callable[[], Any]] = {
        "arrays: torch, no mixture": lambda: skip(shuffle(ConcatDataset(list(ROWS.values())))),
        "arrays: headway": lambda: resume(prepare(mix(ROWS))),
        "arrays: headway, weights of 7 digits": lambda: resume(prepare(mix(ROWS, LONG_WEIGHTS))),
        "tables: headway": lambda: resume(prepare(mix(tables))),
        "tables: datasets.interleave_datasets": lambda: skip(shuffle(interleaved)),
    }
    passes = {name: read_on(iter(build(0))) for name, build in loaders.items()}
    if importlib.util.find_spec("grain"):
        passes["arrays: grain"] = read_on(iter(build_grain()))

        def resume_grain() -> None:
            iterator = iter(build_grain())
            state = iterator.get_state()
            iterator.set_state({**state, "next_index": FAR // BATCH_SIZE})
            next(iterator)

        resumes["arrays: grain"] = resume_grain
    if streaming is not None:
        passes["arrays: mosaicml-streaming"] = lambda: streaming.ask("read")
        resumes["arrays: mosaicml-streaming"] = lambda: streaming.ask("resume")
    get_streaming_cpu = (lambda: streaming.cpu_seconds) if streaming is not None else (lambda: 0.0)
    times = time_interleaved(passes, repeats, lambda: time.process_time() + get_streaming_cpu())
    rows: dict[str, Any] = {}
    for storage in ("arrays", "tables"):  # each compared with its own floor, plain torch
        rows |= make_rows({name: times[name] for name in times if name.startswith(storage)}, 1e6 / NUM_BATCHES)
    seconds = {name: min(measure_once(action) for _ in range(3)) for name, action in resumes.items()}
    memory = {name: find_worker_memory(lambda build=build: build(1)) for name, build in loaders.items()}  # type: ignore[misc]
    if streaming is not None:
        memory["arrays: mosaicml-streaming"] = streaming.ask("memory")["memory"]
    note = (
        f"Batches of {BATCH_SIZE} samples of {NUM_TOKENS} numbers. Time to the first batch after sample {FAR:,}: "
        + "; ".join(f"{name} {1000 * value:.1f} ms" for name, value in seconds.items())
        + ". Unshared memory of one worker: "
        + "; ".join(f"{name} {value:.1f} MiB" for name, value in memory.items())
    )
    save_result("mixture", "us per batch", rows, note)


if __name__ == "__main__":
    main()
