"""A classifier with a custom sampler that shuffles and gives each rank every n-th row.

Fault: each rank shuffles with a seed that contains its rank, so the parts overlap: some rows come twice, others never.
Expect: every sample once: duplicates and gaps on two processes; the order must be drawn from one seed on all ranks.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class EveryNth(Sampler):
    def __init__(self, num_rows, rank, num_ranks, seed):
        self.num_rows, self.rank, self.num_ranks, self.seed = num_rows, rank, num_ranks, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_rows // self.num_ranks

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.epoch + self.seed)
        return iter(torch.randperm(self.num_rows, generator=generator)[self.rank :: self.num_ranks].tolist())


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/every_nth", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(24, 4)
    y = (x.sum(1) > 0).long()
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    sampler = EveryNth(24, rank, num_ranks, seed=42 + rank)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // num_ranks, sampler=sampler)  # not prepared: rows are split
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.resume()

    for epoch in accelerator.epochs(4):
        sampler.set_epoch(epoch)
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
