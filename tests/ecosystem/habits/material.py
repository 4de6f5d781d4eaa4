"""What habits train: a small model, its data, and loops as scripts write them."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def model(inputs=3, outputs=1):
    """The same on all ranks."""
    torch.manual_seed(1)
    return torch.nn.Linear(inputs, outputs)


def rows(count=12):
    """Distinct rows [count, 3] and their targets."""
    return torch.arange(count * 3.0).reshape(count, 3) / 10, torch.arange(count * 1.0).reshape(count, 1)


def loader(count=12, batch_size=2, **options):
    """Over `rows`."""
    return DataLoader(TensorDataset(*rows(count)), batch_size=batch_size, **options)


class Stream(torch.utils.data.IterableDataset):
    """Numbers one after the other."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(float(each) for each in range(self.count))


class ShardedByWorker(Stream):
    """The same, each worker its part, as torch's documentation has it."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(float(each) for each in range(first, self.count, step))


def prepared(count=12, batch_size=2, schedule=None, **options):
    """(accelerator, model, optimizer, loader, schedule or None), prepared."""
    accelerator = Accelerator(cpu=True, **options)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    parts = [net, optimizer, loader(count, batch_size)]
    if schedule is not None:
        parts.append(schedule(optimizer))
    made = accelerator.prepare(*parts)
    return accelerator, *made, *(() if schedule is not None else (None,))


def rate(optimizer):
    """Of the first group."""
    return optimizer.param_groups[0]["lr"]


def decaying(optimizer):
    """A schedule: nine tenths each tick."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def loss_of(net, batch):
    """The mean square."""
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])


def weights(net):
    """All of them."""
    return [each.detach().flatten().tolist() for each in net.parameters()]
