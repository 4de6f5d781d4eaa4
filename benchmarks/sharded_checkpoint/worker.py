"""One rank of the measurement: the same sharded model and optimizer, saved and loaded by either library in turn."""

import json
import logging
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import headway
from benchmarks.timing import interleave, rows_of

WIDTH, NUM_LAYERS = 1531, 8  # 18.8 million parameters: 75 MB, and twice that in AdamW

Passes = dict[str, Callable[[], Any]]


def by_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Any]:
    """(save, load) as torch's tutorials write them; files are forced to the disk, as its writer does by default."""

    def save() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def load() -> None:
        weights, state = get_state_dict(model, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    return save, load


def passes(folder: Path) -> Passes:
    """What is measured."""
    accelerator = headway.Accelerator(cpu=True, strategy="fsdp")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, WIDTH)).mean())
    optimizer.step()
    optimizer.zero_grad()
    save, load = by_torch(model, optimizer.optimizer, folder / "torch")
    ours = str(folder / "headway")

    def behind() -> None:
        accelerator.save_state(ours, blocking=False)
        accelerator.wait_for_save()

    return {
        "save: torch.distributed.checkpoint": save,
        "save: torch.distributed.checkpoint, again (A/A)": save,
        "save: headway": lambda: accelerator.save_state(ours),
        "save: headway, blocking=False, and waited for": behind,
        "load: torch.distributed.checkpoint": load,
        "load: torch.distributed.checkpoint, again (A/A)": load,
        "load: headway": lambda: accelerator.load_state(ours),
    }


def together(run: Callable[[], Any]) -> Callable[[], None]:
    """Begun and ended by both ranks."""

    def both() -> None:
        dist.barrier()
        run()
        dist.barrier()

    return both


def main() -> None:
    """Measure; rank 0 writes."""
    logging.disable(logging.WARNING)
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    accelerator = headway.Accelerator(cpu=True, strategy="fsdp")
    box = [tempfile.mkdtemp()] if accelerator.is_main_process else [""]
    dist.broadcast_object_list(box, 0)
    folder = Path(box[0])
    found = interleave({name: together(run) for name, run in passes(folder).items()}, repeats)
    if accelerator.is_main_process:
        rows: dict[str, Any] = {}
        for kind in ("save", "load"):
            part = {name: spent for name, spent in found.items() if name.startswith(kind)}
            rows |= rows_of(part, 1e3)  # the first one is the floor
        walls = {name: statistics.median(wall for wall, _ in spent) for name, spent in found.items()}
        ratios = {
            name: round(walls[name] / walls[f"{name.split(':')[0]}: torch.distributed.checkpoint"], 2) for name in found
        }
        path.write_text(json.dumps([rows, f"Wall time as a multiple of torch's: {json.dumps(ratios)}"]))
        shutil.rmtree(folder, ignore_errors=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
