"""Script that trains on token files with workers, saves every third update, and appends each update's tokens to a log.

Arguments: folder of the run, kind of the data ("blocks", "packed" or "mixture"), number of workers, global batch size.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy
import torch

from headway import Accelerator, Mixture, PackedDataset, PackingCollator, ProjectConfiguration, TokenDataset

EPOCHS = 2
LENGTH = 8
NUM_BLOCKS = 100
LENGTHS = [1 + 5 * number % 7 for number in range(150)]
"""Number of tokens of each document."""


def write_files(folder: Path) -> None:
    """Write two files of blocks whose first tokens are multiples of `LENGTH`, and documents that end with token 1."""
    tokens = numpy.arange(NUM_BLOCKS * LENGTH, dtype=numpy.uint16)
    tokens[: 60 * LENGTH].tofile(folder / "blocks-0.bin")
    numpy.save(folder / "blocks-1.npy", tokens[60 * LENGTH :])
    documents = [[10 + number] * (length - 1) + [1] for number, length in enumerate(LENGTHS)]
    numpy.array([token for document in documents for token in document], numpy.uint32).tofile(folder / "documents.bin")


def open_blocks(folder: str) -> TokenDataset:
    """Return the blocks of both files."""
    files = [f"{folder}/blocks-0.bin", f"{folder}/blocks-1.npy"]
    return TokenDataset(files, LENGTH, dtype="uint16", vocab_size=NUM_BLOCKS * LENGTH)


def open_data(folder: str, kind: str) -> object:
    """Return the dataset of a kind."""
    if kind == "blocks":
        return open_blocks(folder)
    documents = TokenDataset(f"{folder}/documents.bin", dtype="uint32", eos_token_id=1, cache_dir=f"{folder}/cache")
    if kind == "packed":
        return PackedDataset(documents, LENGTH, seed=2)
    sources = {"blocks": open_blocks(folder), "same": open_blocks(folder)}
    return Mixture(sources, weights=[0.7, 0.3], num_samples=96, seed=2)


def main(folder: str, kind: str, num_workers: int, batch: int) -> None:
    """Train for two epochs, starting from the last checkpoint."""
    project = ProjectConfiguration(project_dir=f"{folder}/run", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=project)
    loader = torch.utils.data.DataLoader(
        open_data(folder, kind),
        batch_size=batch // accelerator.num_processes,
        num_workers=num_workers,
        shuffle=kind != "mixture",
        collate_fn=PackingCollator(check_model=False) if kind == "packed" else None,
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(LENGTH, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-8), loader)
    accelerator.resume()
    with open(f"{folder}/log.jsonl", "a") as log:
        for epoch in accelerator.epochs(EPOCHS):
            for rows in loader:
                tokens = rows["input_ids"]
                with accelerator.accumulate(model):
                    accelerator.backward(model(tokens.float()).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                gathered = accelerator.gather_for_metrics(tokens)
                if accelerator.is_main_process:
                    log.write(json.dumps([epoch, accelerator.num_updates, gathered.tolist()]) + "\n")
                    log.flush()
                if accelerator.num_updates % 3 == 0:
                    accelerator.save_state()
                time.sleep(0.02)
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).weight.tolist()
        Path(folder, "weights").write_text(json.dumps(weights))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
