"""Rank 1 runs out of memory and rank 0 is killed, but the run ends with the loss of an undisturbed run.

    headway launch --cpu -n 2 examples/nothing_is_lost.py
    headway launch --cpu -n 2 --max_restarts 1 examples/nothing_is_lost.py --trouble

Both commands end with the same line, `loss after 18 updates: ...`. The limit is set on the process's address space, so
`--trouble` needs Linux and the CPU.
"""

import argparse
import os
import resource
import shutil
import signal

import psutil
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

NUM_EPOCHS, WIDTH, FOLDER = 6, 49_152, "runs/nothing_is_lost"


def limit_memory(num_bytes: int | None) -> None:
    """Let this process allocate `num_bytes` more than it has now. None removes the limit."""
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard_limit if num_bytes is None else psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def main() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trouble", action="store_true", help="too little memory on rank 1, then a SIGKILL to rank 0")
    is_troubled = parser.parse_args().trouble and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    set_seed(0)
    project = ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    pixels, classes = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
    loader = DataLoader(digits, batch_size=256, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    accelerator.print(accelerator.resume("latest") or "starts from the beginning")
    for _ in accelerator.epochs(NUM_EPOCHS):
        for batch in loader:
            if is_troubled and accelerator.num_updates in (3, 4) and accelerator.process_index == 1:
                # A batch needs three times its hidden layer of 50 MB. One update later, the limit is removed.
                limit_memory(110_000_000 if accelerator.num_updates == 3 else None)
            if is_troubled and accelerator.num_updates == 13 and accelerator.process_index == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            batch_loss = torch.zeros((), device=accelerator.device)  # mean over the rows of this rank's batch
            for inputs, targets in accelerator.microbatches(batch):
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                batch_loss += loss.detach() * len(targets) / len(batch[1])
            if accelerator.num_updates % 5 == 0:
                accelerator.save_state()
    mean_loss = accelerator.reduce(batch_loss, "mean").item()
    accelerator.print(f"loss after {accelerator.num_updates} updates: {mean_loss:.5f}")

    accelerator.wait_for_save()
    if accelerator.is_main_process:
        shutil.rmtree(FOLDER)
    accelerator.end_training()
    return mean_loss


if __name__ == "__main__":
    main()
