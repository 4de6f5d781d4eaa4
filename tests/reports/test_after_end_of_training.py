"""Tests of calls after `end_training()`: replicated weights are still saved, and calls that need other ranks raise an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import run_ranks

ALONE = ("end_training", "print", "log", "unwrap_model", "free_memory", "save", "trackers")
TOGETHER = (
    "wait_for_everyone",
    "gather",
    "reduce",
    "pad_across_processes",
    "gather_for_metrics",
    "check_trigger",
    "save_state",
    "load_state",
    "prepare",
)


def train_and_end(folder: str, kind: str, layout: str | None) -> dict[str, Any]:
    """Train for one step, call `end_training()`, then make many calls. Return their errors, the weights and the files."""
    from headway import Accelerator
    from headway.compat.accelerate.accelerator import AccelerateAccelerator

    make = AccelerateAccelerator if kind == "accelerate" else Accelerator
    options = {"strategy": layout} if layout else {}
    accelerator: Any = make(cpu=True, project_dir=folder, **options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    expected = {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}
    accelerator.end_training()

    x = torch.ones(2)
    calls = {
        "end_training": accelerator.end_training,
        "print": accelerator.print,
        "log": lambda: accelerator.log({"loss": 1.0}),
        "unwrap_model": lambda: accelerator.unwrap_model(model),
        "trackers": lambda: accelerator.trackers,
        "save": lambda: accelerator.save({"x": x}, f"{folder}/x.pt"),
        "save_model": lambda: accelerator.save_model(model, f"{folder}/whole"),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "gather": lambda: accelerator.gather(x),
        "reduce": lambda: accelerator.reduce(x),
        "pad_across_processes": lambda: accelerator.pad_across_processes(x),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(x),
        "check_trigger": accelerator.check_trigger,
        "save_state": lambda: accelerator.save_state(f"{folder}/state"),
        "load_state": lambda: accelerator.load_state(f"{folder}/state"),
        "prepare": lambda: accelerator.prepare(torch.nn.Linear(2, 2)),
        "free_memory": accelerator.free_memory,
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = ""
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return {"errors": errors, "expected": expected, "files": sorted(each.name for each in Path(folder).glob("whole/*"))}


@pytest.mark.parametrize("kind", ["native", "accelerate"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_replicated_weights_are_saved_after_end_training(world_size, kind, tmp_path):
    ranks = run_ranks(train_and_end, world_size, str(tmp_path), kind, None)
    for rank in ranks:
        for name in (*ALONE, "save_model", "get_state_dict"):
            assert rank["errors"][name] == "", name
        for name in TOGETHER:
            raised = rank["errors"][name]
            if world_size == 1:
                assert raised == "", name
            elif (kind, name) != ("accelerate", "load_state"):  # no checkpoint exists
                assert raised.startswith("StateError: the process group has ended"), (name, raised)
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == ranks[0]["expected"].keys()
    assert all(torch.equal(written[name], each) for name, each in ranks[0]["expected"].items())


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_saving_sharded_weights_after_end_training_raises(layout, tmp_path):
    for rank in run_ranks(train_and_end, 2, str(tmp_path), "native", layout):
        for name in ALONE:
            assert rank["errors"][name] == "", name
        for name in (*TOGETHER, "save_model", "get_state_dict"):
            if (layout, name) == (
                "tp",
                "gather_for_metrics",
            ):  # Both ranks read the same rows, so nothing is exchanged.
                continue
            assert rank["errors"][name].startswith("StateError: the process group has ended"), (
                name,
                rank["errors"][name],
            )
        assert rank["files"] == []
