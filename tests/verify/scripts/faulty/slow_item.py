"""A classifier of records in a JSON file.

Fault: __getitem__ reads and parses the whole file for each row, so nearly all of the time goes into the data.
Expect: data keeps up: most of an update is spent waiting for data; Records.__getitem__ is slow, parse the file once.
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration, broadcast_object_list, set_seed


class Records(Dataset):
    def __init__(self, path, num_rows):
        self.path, self.num_rows = path, num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        record = json.loads(self.path.read_text())[index]
        return torch.tensor(record["row"]), record["label"]


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/records", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    paths = [Path(tempfile.mkdtemp()) / "records.json" if accelerator.is_main_process else None]
    broadcast_object_list(paths)
    if accelerator.is_main_process:
        rows = torch.randn(800, 32)
        records = [{"row": row.tolist(), "label": int(row.sum() > 0)} for row in rows]
        paths[0].write_text(json.dumps(records))
    accelerator.wait_for_everyone()
    set_seed(0)
    loader = DataLoader(Records(paths[0], 80), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Linear(32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
