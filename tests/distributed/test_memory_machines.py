"""Checkpoints in the memory of three machines with one rank each: what each holds, and recovery of machines that lost theirs."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.common import env
from headway.core.checkpoint import folders
from headway.core.runtime import process
from tests.distributed.ranks import run_ranks


def prepare_training(root: str, layout: str) -> Any:
    rank = int(os.environ["RANK"])
    os.environ[env.MEMORY] = f"{root}/machine{rank}"
    Path(os.environ[env.MEMORY]).mkdir(exist_ok=True)
    set_seed(0)
    project = ProjectConfiguration(f"{root}/run", automatic_checkpoint_naming=True, keep_in_memory=1)
    accelerator = Accelerator(cpu=True, strategy=layout, project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 3))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))


def train(accelerator: Any, model: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        with accelerator.accumulate(model):
            loss = model(torch.randn(2, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def list_own_files(root: str) -> list[str]:
    (folder,) = Path(f"{root}/machine{os.environ['RANK']}").iterdir()
    return sorted(path.name for path in folders.list_committed(folder)[0].iterdir() if path.suffix == ".safetensors")


def lose_and_resume(root: str, layout: str, lost: tuple[int, ...]) -> dict[str, Any]:
    parts = prepare_training(root, layout)
    losses = train(*parts, 5)
    parts[0]._checkpoints._memory.finish_save()
    parts[0].wait_for_everyone()
    results: dict[str, Any] = {"held": list_own_files(root)}
    rank = parts[0].process_index
    parts[0].wait_for_everyone()
    if rank in lost:
        shutil.rmtree(f"{root}/machine{rank}")
    parts[0].wait_for_everyone()
    again = prepare_training(root, layout)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headway").addHandler(handler)
    restored = again[0].resume("latest")
    results["updates"] = restored and restored.about["num_updates"]
    results["lines"] = lines
    if restored is not None:
        results["given"] = list_own_files(root)
        results["equal"] = train(*again, 1) == losses[4:]
    process.reset()
    return results


def test_each_machine_holds_a_whole_ddp_model(tmp_path):
    results = run_ranks(lose_and_resume, 3, str(tmp_path), "ddp", (0, 2), timeout=300)
    for each in results:
        assert each["held"] == ["model-00000.safetensors", "optimizer-00000.safetensors", "streams-00000.safetensors"]
        assert each["updates"] == 4
        assert each["equal"]


@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,)])
def test_each_machine_holds_its_neighbors_shards(lost, tmp_path):
    results = run_ranks(lose_and_resume, 3, str(tmp_path), "fsdp", lost, timeout=300)
    for rank, each in enumerate(results):
        held = {name[-17:-12] for name in each["held"] if name.startswith("optimizer")}
        assert held == {f"{number:05d}" for number in (rank, (rank - 1) % 3)}
        assert each["updates"] == 4
        assert {name[-17:-12] for name in each["given"] if name.startswith("optimizer")} == {"00000", "00001", "00002"}
        assert each["equal"]


def test_losing_two_neighbors_loses_the_checkpoint(tmp_path):
    results = run_ranks(lose_and_resume, 3, str(tmp_path), "fsdp", (0, 1), timeout=300)
    for each in results:
        assert each["updates"] is None
    assert any("no machine has" in line for each in results for line in each["lines"])
