"""Ray Train starts the workers, and restarts them if one dies. The loop is an ordinary one, with three lines for Ray.

    pip install 'ray[train]'
    python examples/ray_train.py                                  two workers, sharded over both
    python examples/ray_train.py --kill --name killed             kills one of them in the second epoch; the losses are the same
    python examples/ray_train.py --workers 4 --strategy hsdp=2

Prints the last epoch's loss and the path of its checkpoint.

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
    """Train on one worker."""
    set_seed(0)
    accelerator = Accelerator(strategy=config["strategy"], cpu=config["cpu"], project_config=ray.project())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    restored = ray.resume(accelerator)
    accelerator.print(f"starting after {accelerator.num_updates} updates; {restored or 'no checkpoint to resume'}")
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
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp", help="ddp, fsdp, hsdp=2, ...")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="use a GPU for each worker")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="folder that all machines can access")
    parser.add_argument("--name", default="example", help="name of the run; an existing run is continued")
    parser.add_argument("--kill", action="store_true", help="kill a worker in the second epoch")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "strategy": args.strategy,
            "epochs": args.epochs,
            "cpu": not args.gpu,
            "kill": args.kill,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            storage_path=str(args.storage.absolute()),
            name=args.name,
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
