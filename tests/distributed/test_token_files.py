"""Token files on real ranks: two ranks with workers that are killed in the middle of an epoch continue exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from tests.distributed.killed_tokens_script import EPOCHS, LENGTH, LENGTHS, NUM_BLOCKS, open_data, write_files
from tests.distributed.ranks import run_ranks

BATCH = 8


def draw_blocks() -> list[list[int]]:
    """Return the first token of each block in the order of a plain DataLoader on one process, for each epoch."""
    torch.manual_seed(0)
    torch.nn.Linear(LENGTH, 1)  # draws the initial weights, as the script does before its first epoch
    loader = DataLoader(torch.arange(NUM_BLOCKS) * LENGTH, batch_size=BATCH, shuffle=True)
    return [[first for batch in loader for first in batch.tolist()] for _ in range(EPOCHS)]


def read_epochs(folder: str, kind: str, num_workers: int) -> list[list[list[int]]]:
    """Return this rank's tokens of two epochs, one list per batch and epoch."""
    accelerator = Accelerator(cpu=True)
    size = BATCH // accelerator.num_processes
    torch.manual_seed(0)
    torch.nn.Linear(LENGTH, 1)
    loader = accelerator.prepare(
        DataLoader(open_data(folder, kind), batch_size=size, num_workers=num_workers, shuffle=True)
    )
    return [[batch["input_ids"][: loader.num_valid, 0].tolist() for batch in loader] for _ in range(EPOCHS)]


def test_order_is_that_of_plain_torch_on_one_process(tmp_path: Path) -> None:
    write_files(tmp_path)
    ranks = run_ranks(read_epochs, 2, str(tmp_path), "blocks", 2)
    for epoch, expected in enumerate(draw_blocks()):
        steps = zip(*(rank[epoch] for rank in ranks))
        assert [first for step in steps for batch in step for first in batch] == expected


def start_training(folder: Path, kind: str, world_size: int, num_workers: int) -> "subprocess.Popen[bytes]":
    """Start the training script on some ranks, in a new process group."""
    command = [sys.executable, "-m", "headway", "launch", "-n", str(world_size), "--cpu"]
    command += ["-m", "tests.distributed.killed_tokens_script", str(folder), kind, str(num_workers), str(BATCH)]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=(folder / "errors").open("ab")
    )


def read_log(folder: Path) -> dict[tuple[int, int], list[list[int]]]:
    """Return the rows of each update by (epoch, update), after checking that repeated updates had the same rows."""
    seen: dict[tuple[int, int], Any] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        epoch, update, rows = json.loads(line)
        assert seen.setdefault((epoch, update), rows) == rows, "a repeated update must have the same rows"
    assert [update for _, update in sorted(seen)] == list(range(1, 1 + len(seen)))
    return dict(sorted(seen.items()))


def train_with_kills(folder: Path, kind: str, kills: list[tuple[int, int, int]]) -> None:
    """Train to the end. Each of the runs before the last one is killed.

    Args:
        folder: Folder of the run, with the data.
        kind: Kind of the data.
        kills: For each run, the number of ranks, the number of workers, and the lines of the log after which it is
            killed; 0 for the last run.
    """
    log = folder / "log.jsonl"
    for world_size, num_workers, num_lines in kills:
        process = start_training(folder, kind, world_size, num_workers)
        if num_lines:
            while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < num_lines):
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(300) == (-signal.SIGKILL if num_lines else 0), (folder / "errors").read_text()


@pytest.mark.slow
def test_kill_in_the_middle_of_an_epoch_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Two ranks with two workers each are killed in the first and in the second epoch."""
    write_files(tmp_path)
    train_with_kills(tmp_path, "blocks", [(2, 2, 5), (2, 2, 20), (2, 2, 0)])
    updates = read_log(tmp_path)
    for epoch, expected in enumerate(draw_blocks()):
        rows = [row for (each, _), rows in updates.items() if each == epoch for row in rows]
        assert rows == [list(range(first, first + LENGTH)) for first in expected]
    killed = json.loads((tmp_path / "weights").read_text())
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    write_files(undisturbed)
    train_with_kills(undisturbed, "blocks", [(2, 2, 0)])
    assert json.loads((undisturbed / "weights").read_text()) == killed


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["packed", "mixture"])
def test_kills_on_other_ranks_and_workers(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path)
    train_with_kills(tmp_path, kind, [(2, 2, 5), (1, 1, 17), (2, 0, 0)])
    updates = read_log(tmp_path)
    for epoch in range(EPOCHS):
        rows = [row for (each, _), rows in updates.items() if each == epoch for row in rows]
        if kind == "packed":
            counts = {10 + number: length - 1 for number, length in enumerate(LENGTHS) if length > 1}
            found = [token for row in rows for token in row if token >= 10]
            assert {token: found.count(token) for token in set(found)} == counts
        else:
            dataset: Any = open_data(str(tmp_path), kind)
            dataset.set_epoch(epoch)
            assert rows == [dataset[position]["input_ids"].tolist() for position in range(96)]
            assert dataset.count_samples(96) in ({"blocks": 67, "same": 29}, {"blocks": 68, "same": 28})
