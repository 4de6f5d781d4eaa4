"""`ShardedDataset` on real ranks: the order does not depend on ranks and workers, and resumes are exact on other numbers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway import ShardedDataset
from tests.distributed.killed_data_script import EPOCHS
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_data_ranks import read_chunks, read_passes, read_with_own_cache
from tests.distributed.slow_server import SlowServer
from tests.unit.language_data.shards.shard_files import make_records, write_shard

BATCH = 12
COUNT = 12 * 12 + 5


def write_shards(folder: Path) -> tuple[str, dict[str, Any]]:
    """Write shards of several formats and lengths, and return their pattern and the dataset's options."""
    records = make_records(COUNT)
    ends = [0, 40, 41, 77, 90, 140, COUNT]
    for number, suffix in enumerate(["jsonl", "parquet", "tar", "jsonl.gz", "arrow", "mds"]):
        write_shard(folder / f"shard-{number}.{suffix}", records[ends[number] : ends[number + 1]], rows_per_block=7)
    options = {
        "shuffle": True,
        "seed": 5,
        "shuffle_buffer": 32,
        "cache_dir": str(folder / "cache"),
        "memory_bytes": 4000,
    }
    return f"{folder}/shard-*", options


def list_order(pattern: str, options: dict[str, Any], epoch: int) -> list[int]:
    """Return an epoch's record numbers in the order in which a plain loop over the dataset reads them."""
    dataset = ShardedDataset(pattern, **options)
    dataset.set_epoch(epoch)
    order = [int(record["id"]) for record in dataset]
    assert sorted(order) == list(range(COUNT))
    return order


def join_ranks(results: list[list[list[int]]]) -> list[int]:
    """Return the record numbers of all ranks' batches in data order."""
    return [number for step in zip(*results) for batch in step for number in batch]


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (2, 0), pytest.param(4, 3, marks=pytest.mark.matrix)])
def test_order_does_not_depend_on_ranks_or_workers(tmp_path: Path, world_size: int, num_workers: int) -> None:
    pattern, options = write_shards(tmp_path)
    epochs = [list_order(pattern, options, epoch) for epoch in range(2)]
    assert epochs[0] != epochs[1]
    chunks = [
        {"state": None, "steps": None, "workers": num_workers, "batch": BATCH, "epoch": epoch} for epoch in range(2)
    ]
    found = run_ranks(read_chunks, world_size, pattern, options, chunks, timeout=300)
    for epoch, expected in enumerate(epochs):
        assert join_ranks([rank[epoch][0] for rank in found]) == expected


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_epoch_has_its_own_order_even_in_persistent_workers(tmp_path: Path, num_workers: int) -> None:
    pattern, options = write_shards(tmp_path)
    (found,) = run_ranks(read_passes, 1, pattern, options, num_workers)
    assert found == [list_order(pattern, options, epoch) for epoch in range(3)]


def check_resumes(folder: Path, num_points: int, worlds: list[int], workers: list[int], seed: int) -> None:
    """Stop at random points and continue with other numbers of ranks and workers, twice in each run."""
    pattern, options = write_shards(folder)
    expected = list_order(pattern, options, epoch=1)
    generator = random.Random(seed)
    runs: list[dict[str, Any]] = [{"state": None, "read": [], "at": 0} for _ in range(num_points)]
    num_rounds = -(-COUNT // BATCH)
    for leg in range(3):
        plans: dict[int, list[int]] = {}
        for number, run in enumerate(runs):
            run["world"] = generator.choice([each for each in worlds if each != run.get("world") or len(worlds) == 1])
            left = num_rounds - run["at"]
            run["steps"] = None if leg == 2 else generator.randint(1, max(1, left - 2 + leg))
            run["workers"] = generator.choice(workers)
            plans.setdefault(run["world"], []).append(number)
        for world, numbers in plans.items():
            chunks = [
                {
                    "state": runs[n]["state"],
                    "steps": runs[n]["steps"],
                    "workers": runs[n]["workers"],
                    "batch": BATCH,
                    "epoch": 1,
                }
                for n in numbers
            ]
            found = run_ranks(read_chunks, world, pattern, options, chunks, timeout=600)
            for place, number in enumerate(numbers):
                run = runs[number]
                run["read"] += join_ranks([rank[place][0] for rank in found])
                run["state"] = found[0][place][1]
                run["at"] += run["steps"] or 0
    for run in runs:
        assert run["read"] == expected


def test_resumes_on_other_numbers_of_ranks_and_workers(tmp_path: Path) -> None:
    check_resumes(tmp_path, 4, [1, 2], [0, 1], seed=1)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(2, 12))
def test_resumes_on_one_two_and_four_ranks(tmp_path: Path, seed: int) -> None:
    check_resumes(tmp_path, 3, [1, 2, 4], [0, 1, 3], seed)


def start_training(folder: Path, pattern: str, world_size: int, num_workers: int) -> "subprocess.Popen[bytes]":
    """Start the training script on some ranks, in a new process group."""
    command = [
        sys.executable,
        "-m",
        "headway",
        "launch",
        "-n",
        str(world_size),
        "--cpu",
        "-m",
        "tests.distributed.killed_data_script",
    ]
    return subprocess.Popen(
        [*command, pattern, str(folder), str(num_workers), str(BATCH)], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=(folder / "errors").open("ab"),
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_moments_neither_lose_nor_repeat_records(tmp_path: Path, seed: int) -> None:
    pattern, options = write_shards(tmp_path)
    expected = [list_order(pattern, options, epoch) for epoch in range(EPOCHS)]
    generator = random.Random(seed)
    log = tmp_path / "log.jsonl"
    for attempt in range(4):
        world_size, num_workers = [(2, 1), (1, 3), (2, 0), (1, 0)][attempt]
        count_before = len(log.read_text().splitlines()) if log.exists() else 0
        process = start_training(tmp_path, pattern, world_size, num_workers)
        if attempt < 3:
            num_lines = count_before + generator.randint(2, 9)
            while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < num_lines):
                time.sleep(0.01)
            time.sleep(generator.random() * 0.05)
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(300) == (0 if attempt == 3 else -signal.SIGKILL), (tmp_path / "errors").read_text()
    seen: dict[tuple[int, int], list[int]] = {}
    for line in log.read_text().splitlines():
        epoch, update, numbers = json.loads(line)
        assert seen.setdefault((epoch, update), numbers) == numbers, "a repeated update must have the same records"
    assert [update for _, update in sorted(seen)] == list(range(1, 1 + EPOCHS * -(-COUNT // BATCH)))
    for epoch in range(EPOCHS):
        found = [number for (each, _), numbers in sorted(seen.items()) if each == epoch for number in numbers]
        assert found == expected[epoch]


@pytest.mark.parametrize("num_stripes", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_each_machine_fetches_only_the_blocks_of_its_stripes(tmp_path: Path, num_stripes: int) -> None:
    records = make_records(400)
    for number in range(40):
        write_shard(tmp_path / f"part-{number:02d}.jsonl", records[10 * number : 10 * number + 10])
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "shuffle_buffer": 40}
    if num_stripes > 1:
        options |= {"num_stripes": num_stripes, "samples_per_step": 8}
    with SlowServer(tmp_path) as server:
        places = [f"{server.url}/part-{number:02d}.jsonl" for number in range(40)]
        found = run_ranks(read_with_own_cache, 2, places, options, str(tmp_path), 8)
    whole = ShardedDataset(f"{tmp_path}/part-*.jsonl", cache_dir=tmp_path / "cache", **options)
    assert join_ranks([rows for rows, _ in found]) == [record["id"] for record in whole]
    num_fetched = sum(count for _, count in found)
    assert num_fetched == 80 if num_stripes == 1 else num_fetched <= 46
