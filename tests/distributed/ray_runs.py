"""Run trainings under Ray Train in one Ray session: `python ray_runs.py FOLDER`. test_ray.py starts it and reads its output.

With any further argument, only the run with a kill is executed.
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


def prepare_training(accelerator):
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def train_step(accelerator, model, optimizer, x, y):
    with accelerator.accumulate(model):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def append_record(config, accelerator, **what):
    """Append a record to this rank's file, which all attempts of a run share."""
    with Path(config["told"]).with_suffix(f".{accelerator.process_index}").open("a") as file:
        file.write(json.dumps(what) + "\n")


def kill_once(config, accelerator):
    """Kill rank 1 at the configured update, unless an earlier attempt has done so."""
    once = Path(config["told"]).with_suffix(".killed")
    if config["kill"] == accelerator.num_updates and accelerator.process_index == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train_with_adapter(config):
    """Train with the functions of Headway's Ray adapter."""
    from headway import Accelerator, set_seed
    from headway.integrations import ray as adapter

    set_seed(3)
    accelerator = Accelerator(cpu=True, strategy=config["strategy"], project_config=adapter.project())
    model, optimizer, loader = prepare_training(accelerator)
    adapter.resume(accelerator)
    append_record(config, accelerator, begun=accelerator.num_updates)
    for epoch in accelerator.epochs(config["epochs"]):
        for x, y in loader:
            loss = train_step(accelerator, model, optimizer, x, y)
            append_record(config, accelerator, update=accelerator.num_updates, loss=loss.hex())
            kill_once(config, accelerator)
            if accelerator.num_updates % 4 == 0:
                saved = accelerator.save_state(blocking=accelerator.num_updates % 8 == 0)
                adapter.report(accelerator, {"loss": torch.tensor(loss), "epoch": epoch}, saved)
    accelerator.end_training()


def train_like_accelerate_script(config):
    """Train as scripts written for Accelerate do: each rank saves into a temporary folder, and rank 0 reports its folder."""
    from headway import Accelerator, set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=True, strategy=config["strategy"])
    model, optimizer, loader = prepare_training(accelerator)
    begin = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
        begin = accelerator.num_updates // len(loader)
    append_record(config, accelerator, begun=accelerator.num_updates)
    for epoch in range(begin, config["epochs"]):
        for x, y in loader:
            loss = train_step(accelerator, model, optimizer, x, y)
            append_record(config, accelerator, update=accelerator.num_updates, loss=loss.hex())
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            reported = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
            ray.train.report({"epoch": epoch, "loss": loss}, checkpoint=reported)


def run_trainer(folder, name, function, kill=0, epochs=3, filesystem=None, strategy="fsdp"):
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
        run_trainer(folder, "whole", train_with_adapter)
    run_trainer(folder, "killed", train_with_adapter, kill=7)
    if len(sys.argv) > 2:
        return
    run_trainer(folder, "script", train_like_accelerate_script, epochs=1)
    run_trainer(
        folder, "script", train_like_accelerate_script, epochs=2
    )  # the same name again, so that this run resumes
    store = folder / "store"
    store.mkdir()
    distant = pyarrow.fs.SubTreeFileSystem(str(store), pyarrow.fs.LocalFileSystem())
    run_trainer(folder, "distant", train_with_adapter, epochs=1, filesystem=distant, strategy="ddp")
    run_trainer(folder, "distant", train_with_adapter, epochs=2, filesystem=distant, strategy="ddp")


if __name__ == "__main__":
    main()
