"""Material of the habits: a small model, its data, and common parts of loops."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def model(inputs=3, outputs=1):
    """Build a linear model with the same weights on all ranks."""
    torch.manual_seed(1)
    return torch.nn.Linear(inputs, outputs)


def rows(count=12):
    """Return `count` distinct rows with shape [count, 3], and their targets with shape [count, 1]."""
    return torch.arange(count * 3.0).reshape(count, 3) / 10, torch.arange(count * 1.0).reshape(count, 1)


def loader(count=12, batch_size=2, **options):
    """Return a DataLoader over `rows`."""
    return DataLoader(TensorDataset(*rows(count)), batch_size=batch_size, **options)


class Stream(torch.utils.data.IterableDataset):
    """An iterable dataset of consecutive numbers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(float(each) for each in range(self.count))


class ShardedByWorker(Stream):
    """A stream that its workers share, as in torch's documentation."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(float(each) for each in range(first, self.count, step))


def prepared(count=12, batch_size=2, schedule=None, **options):
    """Return (accelerator, model, optimizer, loader, schedule or None), all prepared."""
    accelerator = Accelerator(cpu=True, **options)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    parts = [net, optimizer, loader(count, batch_size)]
    if schedule is not None:
        parts.append(schedule(optimizer))
    made = accelerator.prepare(*parts)
    return accelerator, *made, *(() if schedule is not None else (None,))


def rate(optimizer):
    """Return the learning rate of the first parameter group."""
    return optimizer.param_groups[0]["lr"]


def decaying(optimizer):
    """Return a schedule that multiplies the rate by 0.9 at each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def loss_of(net, batch):
    """Return the mean squared error of a batch."""
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])


def weights(net):
    """Return all parameters as flat lists."""
    return [each.detach().flatten().tolist() for each in net.parameters()]
