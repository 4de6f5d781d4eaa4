"""One rank: updates of about 100 ms over a state of 100 MB, alone and with each way to save the state, in turn."""

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.timing import summarize, summarize_added
from headway import Accelerator, ProjectConfiguration

WIDTH, DEPTH = 1024, 8  # 8.4 million parameters: 33.6 MB, and twice that in Adam's state
UPDATES = 4
MODES = (
    "update",
    "update, again (A/A)",
    "keep_in_memory=1",
    "save, blocking=False",
    "save, overlap_saves",
    "save, torch async_save",
)


def main() -> None:
    """Measure all modes; rank 0 writes its rows to the path in sys.argv[1]."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(os.environ["BENCHMARK_RUN"])
    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=1, keep_in_memory=1, overlap_saves=True
    )
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-4))
    rows = find_rows(model)

    def update() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    jobs = Jobs(accelerator, model, optimizer, folder)
    times: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for mode in MODES[repeat % len(MODES) :] + MODES[: repeat % len(MODES)]:
            before, afterwards = jobs.get_actions(mode)
            accelerator.wait_for_everyone()
            wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            before()
            for _ in range(UPDATES):
                update()
            spent = time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - process
            afterwards()
            if repeat:
                times[mode].append(spent)
    if accelerator.is_main_process:
        path.write_text(json.dumps({mode: make_row(spent, times[MODES[0]], mode) for mode, spent in times.items()}))
    accelerator.end_training()


def find_rows(model: torch.nn.Module) -> torch.Tensor:
    """Return an input with which an update takes about 100 ms of CPU time."""
    size = 8
    while True:
        rows, start = torch.randn(size, WIDTH), time.thread_time()
        model(rows).square().mean().backward()
        if time.thread_time() - start > 0.08:
            model.zero_grad()
            return rows
        size = int(size * 1.3) + 1


class Jobs:
    """Actions before and after the updates of each mode."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, folder: Path) -> None:
        self._accelerator = accelerator
        self._model, self._optimizer = accelerator.unwrap_model(model), optimizer.optimizer
        self._folder = folder
        self._group = dist.new_group(backend="gloo")  # the saving thread's collectives must not mix with the loop's
        self._memory: Any = accelerator._checkpoints._memory
        self._memory._is_disabled = True

    def get_actions(self, mode: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return (action before the updates, action after them). Only the first is timed, together with the updates."""
        accelerator = self._accelerator
        if mode == "keep_in_memory=1":
            return lambda: self._switch(False), lambda: self._switch(True)
        if mode == "save, torch async_save":
            return self._async_save, self._end_async_save
        if mode.startswith("save"):
            checkpoint_folder = accelerator._checkpoints.checkpoint_folder
            checkpoint_folder.project = replace(checkpoint_folder.project, overlap_saves=mode == "save, overlap_saves")
            return lambda: accelerator.save_state(blocking=False), accelerator.wait_for_save
        return lambda: None, lambda: None

    def _switch(self, is_off: bool) -> None:
        self._memory.finish_save()
        self._memory._is_disabled = is_off

    def _async_save(self) -> None:
        weights, moments = get_state_dict(self._model, self._optimizer)
        self._pending = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=str(self._folder / "torch"),
            process_group=self._group,
        )

    def _end_async_save(self) -> None:
        self._pending.result()
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            shutil.rmtree(self._folder / "torch")
        self._accelerator.wait_for_everyone()


def make_row(
    spent: list[tuple[float, float, float]], floor: list[tuple[float, float, float]], mode: str
) -> dict[str, Any]:
    """Return milliseconds per update, and what a save adds to its block of updates, or to each update kept in memory.

    Args:
        spent: (wall, thread CPU, process CPU) seconds of each block of UPDATES updates.
        floor: The same without saves.
        mode: One of `MODES`.
    """
    num_saves = UPDATES if mode.startswith("keep") else 1
    row: dict[str, Any] = {}
    for index, name in enumerate(("wall", "cpu", "process cpu")):
        values, base = [block[index] for block in spent], [block[index] for block in floor]
        row[name] = summarize(values, 1e3 / UPDATES)
        row[f"added {name}"] = summarize_added(values, base, 1e3 / num_saves)
        row[f"added {name}, of an update"] = round(
            row[f"added {name}"]["median"] / summarize(base, 1e3 / UPDATES)["median"], 3
        )
    return row


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_folder:
        os.environ.setdefault("HEADWAY_MEMORY", memory_folder)  # without a launcher, no agent sets it
        main()
