"""Ray Train starts the workers, and starts them again when one dies: the loop of any script, with three lines for Ray.

    pip install 'ray[train]'
    python ray_train.py                                  two workers, sharded over both
    python ray_train.py --kill --name killed             kills one of them in the second epoch; the losses are the same
    python ray_train.py --workers 4 --strategy hsdp=2

The workers do not need `headway launch`: Ray sets their environment variables and creates the process group.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed
from headway.integrations import ray


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    set_seed(0)
    accelerator = Accelerator(strategy=config["strategy"], cpu=config["cpu"], project_config=ray.project())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    restored = ray.resume(accelerator)
    accelerator.print(f"epochs begin after {accelerator.num_updates} updates; {restored or 'nothing to resume'}")
    for epoch in accelerator.epochs(config["epochs"]):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
            if config["kill"] and epoch == 1 and restored is None and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        mean = accelerator.reduce(total, "mean") / len(loader)
        ray.report(accelerator, {"epoch": epoch, "loss": mean}, accelerator.save_state(blocking=False))
    accelerator.end_training()


def main() -> Result:
    """Read the command line and train."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--workers", type=int, default=2)
    reader.add_argument("--strategy", default="fsdp", help="ddp, fsdp, hsdp=2, ...")
    reader.add_argument("--epochs", type=int, default=3)
    reader.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    reader.add_argument(
        "--storage", type=Path, default=Path("runs/ray"), help="a folder that every machine has mounted"
    )
    reader.add_argument("--name", default="example", help="a run of that name goes on where it stopped")
    reader.add_argument("--kill", action="store_true", help="kill a worker in the second epoch")
    asked = reader.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "strategy": asked.strategy,
            "epochs": asked.epochs,
            "cpu": not asked.gpu,
            "kill": asked.kill,
        },
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=asked.gpu),
        run_config=RunConfig(
            storage_path=str(asked.storage.absolute()),
            name=asked.name,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"epoch {result.metrics['epoch']}, {result.metrics['updates']} updates, loss {result.metrics['loss']:.5f}")
    print(f"checkpoint: {result.checkpoint.path}")
    return result


if __name__ == "__main__":
    main()
