"""One rank of the measurement: both libraries save and load the same sharded model and optimizer in turn."""

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
from benchmarks.timing import make_rows, time_interleaved

WIDTH, NUM_LAYERS = 1531, 8  # 18.8 million parameters: 75 MB, and twice that in AdamW's state

Passes = dict[str, Callable[[], Any]]


def make_torch_functions(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Any, Any]:
    """Return (save, load) as in torch's tutorials. Like Headway, torch's writer forces files to the disk by default."""

    def save() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def load() -> None:
        weights, state = get_state_dict(model, optimizer)
        state_dict = {"model": weights, "optimizer": state}
        dcp.load(state_dict, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    return save, load


def list_passes(folder: Path) -> Passes:
    """Return the variants by name."""
    accelerator = headway.Accelerator(cpu=True, strategy="fsdp")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, WIDTH)).mean())
    optimizer.step()
    optimizer.zero_grad()
    save, load = make_torch_functions(model, optimizer.optimizer, folder / "torch")
    ours = str(folder / "headway")

    def save_in_background() -> None:
        accelerator.save_state(ours, blocking=False)
        accelerator.wait_for_save()

    return {
        "save: torch.distributed.checkpoint": save,
        "save: torch.distributed.checkpoint, again (A/A)": save,
        "save: headway": lambda: accelerator.save_state(ours),
        "save: headway, blocking=False, then wait_for_save": save_in_background,
        "load: torch.distributed.checkpoint": load,
        "load: torch.distributed.checkpoint, again (A/A)": load,
        "load: headway": lambda: accelerator.load_state(ours),
    }


def surround_with_barriers(run: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that runs between two barriers, so that both ranks start and end together."""

    def run_between_barriers() -> None:
        dist.barrier()
        run()
        dist.barrier()

    return run_between_barriers


def main() -> None:
    """Measure all variants; rank 0 writes the rows and the ratios to the path in sys.argv[1]."""
    logging.disable(logging.WARNING)
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    accelerator = headway.Accelerator(cpu=True, strategy="fsdp")
    shared = [tempfile.mkdtemp()] if accelerator.is_main_process else [""]
    dist.broadcast_object_list(shared, 0)
    folder = Path(shared[0])
    times = time_interleaved({name: surround_with_barriers(run) for name, run in list_passes(folder).items()}, repeats)
    if accelerator.is_main_process:
        rows: dict[str, Any] = {}
        for kind in ("save", "load"):
            group = {name: spent for name, spent in times.items() if name.startswith(kind)}
            rows |= make_rows(group, 1e3)  # the first one is the floor
        walls = {name: statistics.median(wall for wall, _ in spent) for name, spent in times.items()}
        ratios = {
            name: round(walls[name] / walls[f"{name.split(':')[0]}: torch.distributed.checkpoint"], 2) for name in times
        }
        path.write_text(json.dumps([rows, f"Wall time as a multiple of torch's: {json.dumps(ratios)}"]))
        shutil.rmtree(folder, ignore_errors=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
