"""Script that trains on shards with workers, saves every third update, and appends each update's record numbers to a log.

Arguments: pattern of the shards, folder of the run, number of workers, global batch size.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from headway import Accelerator, ProjectConfiguration, ShardedDataset

EPOCHS = 2


def collate_ids(samples):
    """Return the record numbers as a column of shape (batch, 1)."""
    return torch.tensor([[float(sample["id"])] for sample in samples])


def main(pattern: str, folder: str, num_workers: int, batch: int) -> None:
    """Train for two epochs, starting from the last checkpoint."""
    project = ProjectConfiguration(project_dir=f"{folder}/run", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=project)
    dataset = ShardedDataset(
        pattern, shuffle=True, seed=5, shuffle_buffer=32, cache_dir=f"{folder}/cache", memory_bytes=4000
    )
    size = batch // accelerator.num_processes
    loader = torch.utils.data.DataLoader(dataset, batch_size=size, num_workers=num_workers, collate_fn=collate_ids)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-5), loader)
    accelerator.register_for_checkpointing(dataset)
    accelerator.resume()
    with open(f"{folder}/log.jsonl", "a") as log:
        for epoch in accelerator.epochs(EPOCHS):
            for rows in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                ids = accelerator.gather_for_metrics(rows)
                if accelerator.is_main_process:
                    numbers = [int(number) for number in ids.flatten().tolist()]
                    log.write(json.dumps([epoch, accelerator.num_updates, numbers]) + "\n")
                    log.flush()
                if accelerator.num_updates % 3 == 0:
                    accelerator.save_state()
                time.sleep(0.02)
    if accelerator.is_main_process:
        Path(folder, "weight").write_text(json.dumps(accelerator.unwrap_model(model).weight.item()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
