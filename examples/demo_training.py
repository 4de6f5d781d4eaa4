"""The training of the demo: a small byte-level GPT with checkpoints. `--trouble` causes an out-of-memory error and a kill.

    headway launch --cpu -n 2 examples/demo_training.py --folder runs/demo/undisturbed
    headway launch --cpu -n 2 --max_restarts 1 examples/demo_training.py --folder runs/demo/troubled --trouble

Both commands print the loss after 40 updates, which is the same up to rounding. examples/demo.py runs them one after the other.
"""

import argparse
import os
import resource
import signal

import psutil
import torch
from text import GPT, Chunks, cross_entropy, read_sources
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed

NUM_UPDATES, BATCH_SIZE, LENGTH = 40, 16, 128
OUT_OF_MEMORY_AT, KILL_AT, SAVE_EVERY = 8, 24, 10
SPARE_BYTES = 40_000_000
"""Bytes that rank 1 may still allocate for one batch. The batch needs several times as much."""


def limit_memory(num_bytes: int | None) -> None:
    """Let this process allocate `num_bytes` more than it has now. None removes the limit."""
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard_limit if num_bytes is None else psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def make_trouble(update: int, rank: int) -> None:
    """Limit the memory of rank 1 for one batch, and later kill rank 0."""
    if rank == 1 and update == OUT_OF_MEMORY_AT:
        limit_memory(SPARE_BYTES)
    if rank == 1 and update == OUT_OF_MEMORY_AT + 1:
        limit_memory(None)
    if rank == 0 and update == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="folder of checkpoints and log")
    parser.add_argument("--trouble", action="store_true", help="too little memory on rank 1, then a SIGKILL to rank 0")
    args = parser.parse_args()
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    set_seed(0)
    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    text, _ = read_sources(2_000_000)
    loader = DataLoader(Chunks(text, LENGTH), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("demo")

    checkpoint = accelerator.resume("latest")
    accelerator.print(f"resumed after {accelerator.num_updates} updates" if checkpoint else "starts from the beginning")
    for _ in accelerator.epochs(1):
        for batch in loader:
            if args.trouble and is_first_start:
                make_trouble(accelerator.num_updates, accelerator.process_index)
            batch_loss = torch.zeros(())  # mean over the rows of this rank's batch
            for inputs, targets in accelerator.microbatches(batch):
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                batch_loss += loss.detach() * len(targets) / len(batch[1])
            mean_loss = accelerator.reduce(batch_loss, "mean").item()
            accelerator.log({"loss": mean_loss}, step=accelerator.num_updates)
            if accelerator.num_updates % SAVE_EVERY == 0:
                accelerator.save_state()
            if accelerator.num_updates == NUM_UPDATES:
                break

    accelerator.print(f"loss after {accelerator.num_updates} updates: {mean_loss:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
