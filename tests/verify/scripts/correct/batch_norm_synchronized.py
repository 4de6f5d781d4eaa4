"""A small net whose batch norms use the mean and the variance of the whole global batch, on any number of processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class SumOverRanks(torch.autograd.Function):
    """A sum over all ranks whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(context, value):
        value = value.clone()
        torch.distributed.all_reduce(value)
        return value

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
        return gradient


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """A batch norm with the statistics of all ranks, which also runs on CPUs, where torch's SyncBatchNorm does not."""

    def forward(self, x):
        if not self.training or not torch.distributed.is_initialized():
            return super().forward(x)
        count = torch.tensor([float(len(x))])
        sums = SumOverRanks.apply(torch.cat((x.sum(0), x.square().sum(0), count)))
        total, squares, count = sums[: self.num_features], sums[self.num_features : -1], sums[-1]
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/batch_norm", automatic_checkpoint_naming=True, total_limit=2)
)
x = 3 * torch.randn(96, 5) + torch.arange(96)[:, None] % 7
y = (x.sum(1, keepdim=True) > 15).float()
loader = DataLoader(TensorDataset(x, y), batch_size=12 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(5, 12), SynchronizedBatchNorm(12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.binary_cross_entropy_with_logits(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
