"""Runs under Ray Train, in one session of Ray: `python ray_runs.py FOLDER`; test_ray.py starts it and reads what it prints.

Any further argument: the run with a kill alone.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pyarrow.fs
import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def prepared(accelerator):
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def step(accelerator, model, optimizer, x, y):
    with accelerator.accumulate(model):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def tell(config, accelerator, **what):
    """Of all attempts of a run, in one file for each rank."""
    with Path(config["told"]).with_suffix(f".{accelerator.process_index}").open("a") as file:
        file.write(json.dumps(what) + "\n")


def kill(config, accelerator):
    """This worker, once."""
    once = Path(config["told"]).with_suffix(".killed")
    if config["kill"] == accelerator.num_updates and accelerator.process_index == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def by_the_adapter(config):
    """Two lines of Headway's adapter."""
    from headway import Accelerator, set_seed
    from headway.integrations import ray as adapter

    set_seed(3)
    accelerator = Accelerator(cpu=True, strategy=config["strategy"], project_config=adapter.project())
    model, optimizer, loader = prepared(accelerator)
    adapter.resume(accelerator)
    tell(config, accelerator, begun=accelerator.num_updates)
    for epoch in accelerator.epochs(config["epochs"]):
        for x, y in loader:
            loss = step(accelerator, model, optimizer, x, y)
            tell(config, accelerator, update=accelerator.num_updates, loss=loss.hex())
            kill(config, accelerator)
            if accelerator.num_updates % 4 == 0:
                saved = accelerator.save_state(blocking=accelerator.num_updates % 8 == 0)
                adapter.report(accelerator, {"loss": torch.tensor(loss), "epoch": epoch}, saved)
    accelerator.end_training()


def as_for_accelerate(config):
    """What scripts do that were written for Accelerate: a temporary folder on each rank, and rank 0 reports its own."""
    from headway import Accelerator, set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=True, strategy=config["strategy"])
    model, optimizer, loader = prepared(accelerator)
    begin = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
        begin = accelerator.num_updates // len(loader)
    tell(config, accelerator, begun=accelerator.num_updates)
    for epoch in range(begin, config["epochs"]):
        for x, y in loader:
            loss = step(accelerator, model, optimizer, x, y)
            tell(config, accelerator, update=accelerator.num_updates, loss=loss.hex())
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            reported = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
            ray.train.report({"epoch": epoch, "loss": loss}, checkpoint=reported)


def fit(folder, name, function, kill=0, epochs=3, filesystem=None, strategy="fsdp"):
    told = folder / f"{name}.json"
    trainer = TorchTrainer(
        function,
        train_loop_config={"told": str(told), "kill": kill, "epochs": epochs, "strategy": strategy},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "storage") if filesystem is None else "bucket",
            storage_filesystem=filesystem, failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )  # fmt: skip
    result = trainer.fit()
    lines = [[json.loads(line) for line in told.with_suffix(f".{rank}").read_text().splitlines()] for rank in (0, 1)]
    kept = sorted(path.name for path in Path(result.path).glob("headway/checkpoints/*")) if filesystem is None else []
    found = {
        "name": name,
        "lines": lines,
        "metrics": result.metrics,
        "checkpoint": result.checkpoint.path,
        "kept": kept,
    }
    print(json.dumps(found, default=str), flush=True)


def main():
    folder = Path(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    if len(sys.argv) < 3:
        fit(folder, "whole", by_the_adapter)
    fit(folder, "killed", by_the_adapter, kill=7)
    if len(sys.argv) > 2:
        return
    fit(folder, "script", as_for_accelerate, epochs=1)
    fit(folder, "script", as_for_accelerate, epochs=2)  # started again under its name
    store = folder / "store"
    store.mkdir()
    distant = pyarrow.fs.SubTreeFileSystem(str(store), pyarrow.fs.LocalFileSystem())
    fit(folder, "distant", by_the_adapter, epochs=1, filesystem=distant, strategy="ddp")
    fit(folder, "distant", by_the_adapter, epochs=2, filesystem=distant, strategy="ddp")


if __name__ == "__main__":
    main()
