"""Data loading: which rows each rank gets, in which order, and the attributes of prepared loaders."""

import random

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.ecosystem.habits.material import ShardedByWorker, Stream, loader, loss_of, model, prepared, weights


def _numbers(count):
    return TensorDataset(torch.arange(count * 1.0))


def _seen(data, epochs=1):
    return [
        [batch[0].tolist() if isinstance(batch, list | tuple) else batch.tolist() for batch in data]
        for _ in range(epochs)
    ]


def _loaded(data, accelerator=None, **config):
    accelerator = accelerator or Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    return accelerator.prepare(data)


def ragged():
    """Load seven rows in batches of two."""
    return _seen(_loaded(DataLoader(_numbers(7), batch_size=2)))


def ragged_by_three():
    """Load eleven rows in batches of three."""
    data = _loaded(DataLoader(_numbers(11), batch_size=3))
    return len(data), _seen(data)


def uneven():
    """Load with even_batches=False."""
    data = _loaded(DataLoader(_numbers(7), batch_size=2), even_batches=False)
    return len(data), _seen(data)


def dropping_the_last():
    """Load with drop_last=True."""
    data = _loaded(DataLoader(_numbers(7), batch_size=2, drop_last=True))
    return len(data), _seen(data)


def split():
    """Load with split_batches=True."""
    data = _loaded(DataLoader(_numbers(10), batch_size=4), split_batches=True)
    return len(data), _seen(data)


def dispatched():
    """Load with dispatch_batches=True."""
    return _seen(_loaded(DataLoader(_numbers(10), batch_size=2), dispatch_batches=True))


def shuffled():
    """Load with shuffle=True for three epochs."""
    torch.manual_seed(3)
    return _seen(_loaded(DataLoader(_numbers(10), batch_size=2, shuffle=True)), 3)


def shuffled_with_a_generator():
    """Shuffle with the script's own generator."""
    generator = torch.Generator().manual_seed(5)
    return _seen(_loaded(DataLoader(_numbers(10), batch_size=2, shuffle=True, generator=generator)), 3)


def shuffled_by_seed():
    """Shuffle with use_seedable_sampler=True."""
    torch.manual_seed(3)
    return _seen(_loaded(DataLoader(_numbers(10), batch_size=2, shuffle=True), use_seedable_sampler=True), 3)


def shuffled_by_data_seed():
    """Shuffle with data_seed=7."""
    data = DataLoader(_numbers(10), batch_size=2, shuffle=True)
    return _seen(_loaded(data, use_seedable_sampler=True, data_seed=7), 2)


def shuffled_for_an_epoch():
    """Shuffle after set_epoch(4)."""
    torch.manual_seed(3)
    data = _loaded(DataLoader(_numbers(10), batch_size=2, shuffle=True), use_seedable_sampler=True)
    data.set_epoch(4)
    return _seen(data, 2)


def shuffled_and_left(count=20):
    """Break out of the loop in each epoch."""
    torch.manual_seed(3)
    data = _loaded(DataLoader(_numbers(count), batch_size=2, shuffle=True))
    seen = []
    for _ in range(3):
        for index, batch in enumerate(data):
            seen.append(batch[0].tolist())
            if index == 1:
                break
    return seen


def shuffled_and_left_before_its_last_batch():
    """Break in each epoch; on two processes, only one more batch would follow."""
    return shuffled_and_left(12)


def shuffled_and_left_with_accumulation():
    """Break in each epoch, with windows of three batches."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = model()
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader(24, 2, shuffle=True))
    seen = []
    for _ in range(3):
        for index, batch in enumerate(data):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                seen.append([batch[1].flatten().tolist(), accelerator.sync_gradients])
                optimizer.step()
                optimizer.zero_grad()
            if index == 3:
                break
    return seen, weights(net)


def shuffled_by_seed_and_left():
    """Break in each epoch, with a seedable sampler."""
    torch.manual_seed(3)
    data = _loaded(DataLoader(_numbers(12), batch_size=2, shuffle=True), use_seedable_sampler=True)
    seen = []
    for _ in range(3):
        for index, batch in enumerate(data):
            seen.append(batch[0].tolist())
            if index == 1:
                break
    return seen


def weighted():
    """Load with a WeightedRandomSampler."""
    torch.manual_seed(3)
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0, 1.0, 1.0], 8)
    return _seen(_loaded(DataLoader(_numbers(6), batch_size=2, sampler=sampler)), 2)


def by_a_batch_sampler():
    """Load with torch's BatchSampler."""
    sampler = BatchSampler(SequentialSampler(range(9)), 2, False)
    return _seen(_loaded(DataLoader(_numbers(9), batch_sampler=sampler)))


def by_batches_of_the_scripts_own():
    """Load with a list of lists as the batch sampler."""
    return _seen(_loaded(DataLoader(_numbers(9), batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7], [8]])))


def with_replacement():
    """Load with RandomSampler(replacement=True)."""
    torch.manual_seed(3)
    sampler = RandomSampler(range(6), replacement=True, num_samples=8)
    return _seen(_loaded(DataLoader(_numbers(6), batch_size=2, sampler=sampler)))


def one_by_one():
    """Load with batch_size=None."""
    return _seen(_loaded(DataLoader(_numbers(6), batch_size=None), even_batches=False))


def streamed():
    """Load an IterableDataset."""
    return _seen(_loaded(DataLoader(Stream(7), batch_size=2)), 2)


def streamed_and_read_by_all():
    """Load an IterableDataset with dispatch_batches=False."""
    return _seen(_loaded(DataLoader(Stream(7), batch_size=2), dispatch_batches=False), 2)


def streamed_by_workers():
    """Load a stream that two workers share."""
    return _seen(_loaded(DataLoader(ShardedByWorker(13), batch_size=2, num_workers=2)))


def streamed_by_workers_and_read_by_all():
    """Load a stream that two workers share, with dispatch_batches=False."""
    data = DataLoader(ShardedByWorker(13), batch_size=2, num_workers=2)
    return _seen(_loaded(data, dispatch_batches=False))


def streamed_by_workers_evenly():
    """Load 16 rows from a stream that two workers share."""
    return _seen(_loaded(DataLoader(ShardedByWorker(16), batch_size=2, num_workers=2), dispatch_batches=False))


def skipping():
    """Call skip_first_batches."""
    data = _loaded(DataLoader(_numbers(12), batch_size=2))
    rest = skip_first_batches(data, 1)
    return _seen(rest), len(rest), _seen(data)


def skipping_by_the_accelerator():
    """Call accelerator.skip_first_batches for a shuffled loader."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    data = accelerator.prepare(DataLoader(_numbers(12), batch_size=2, shuffle=True))
    return _seen(accelerator.skip_first_batches(data, 2)), _seen(data)


def skipping_in_a_plain_loader():
    """Call skip_first_batches for an unprepared DataLoader."""
    return _seen(skip_first_batches(DataLoader(_numbers(6), batch_size=2), 1))


def skipping_in_a_stream():
    """Call skip_first_batches for an IterableDataset."""
    return _seen(skip_first_batches(_loaded(DataLoader(Stream(12), batch_size=2)), 1))


def sizes():
    """Read len(), total_batch_size, total_dataset_length and batch_size of a prepared loader."""
    data = _loaded(DataLoader(_numbers(10), batch_size=2))
    return (
        len(data),
        data.total_batch_size,
        data.total_dataset_length,
        data.batch_size if hasattr(data, "batch_size") else None,
    )


def end_and_remainder():
    """Read end_of_dataloader and remainder before, during and after an epoch."""
    data = _loaded(DataLoader(_numbers(7), batch_size=2))
    seen = [data.end_of_dataloader, data.remainder]
    for _ in data:
        seen.append([data.end_of_dataloader, data.remainder])
    return [*seen, data.end_of_dataloader]


def attributes():
    """Read the attributes of a prepared loader that libraries use."""
    data = _loaded(DataLoader(_numbers(8), batch_size=2))
    return [
        data.base_dataloader.batch_size,
        data.iteration,
        data.gradient_state.sync_gradients,
        data.skip_batches,
        data.use_stateful_dataloader,
        str(data.device),
        isinstance(data, DataLoader),
        data.rng_types,
        type(data.dataset).__name__,
    ]


def iterations():
    """Read loader.iteration, which counts epochs."""
    data = _loaded(DataLoader(_numbers(8), batch_size=2))
    seen = [data.iteration]
    for _ in range(2):
        for _ in data:
            pass
        seen.append(data.iteration)
    return seen


def nested():
    """Run an evaluation inside a training loop."""
    accelerator = Accelerator(cpu=True)
    one, other = accelerator.prepare(loader(8, 2), loader(4, 2))
    state = accelerator.gradient_state
    seen = []
    for _ in one:
        for _ in other:
            seen.append(["inner", state.end_of_dataloader])
        seen.append(["outer", state.end_of_dataloader])
    return seen


def metrics():
    """Call gather_for_metrics with a short last batch."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_numbers(7), batch_size=2))
    return [accelerator.gather_for_metrics(batch[0]).tolist() for batch in data]


def metrics_of_pairs():
    """Call gather_for_metrics with a tuple."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_numbers(7), batch_size=2))
    return [accelerator.gather_for_metrics((batch[0], batch[0] * 2)) for batch in data]


def metrics_of_objects():
    """Call gather_for_metrics with strings."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_numbers(7), batch_size=2))
    return [accelerator.gather_for_metrics([str(each) for each in batch[0].tolist()]) for batch in data]


def metrics_of_a_loss():
    """Call gather_for_metrics with a 0-d tensor."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_numbers(8), batch_size=2))
    return [accelerator.gather_for_metrics(batch[0].mean()).tolist() for batch in data]


def repeated_losses():
    """Call gather_for_metrics with loss.repeat(batch_size), like public scripts."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_numbers(7), batch_size=2))
    return [accelerator.gather_for_metrics(batch[0].mean().repeat(2)).tolist() for batch in data]


def metrics_outside_a_loop():
    """Call gather_for_metrics without a loader."""
    accelerator = Accelerator(cpu=True)
    return accelerator.gather_for_metrics(torch.arange(3))


def metrics_of_a_stream():
    """Call gather_for_metrics for data without a length."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(Stream(7), batch_size=2))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in data]


def joined():
    """Use join_uneven_inputs with prepared objects."""
    accelerator, net, _optimizer, data, _ = prepared(7)
    seen = 0
    with accelerator.join_uneven_inputs([net]):
        for batch in data:
            seen += len(batch[0])
    return seen


def joined_unprepared():
    """Use join_uneven_inputs with a model that is not prepared."""
    accelerator = Accelerator(cpu=True)
    with accelerator.join_uneven_inputs([model()]):
        return "done"


def placed():
    """Prepare a loader with device_placement=[False]."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(loader(), device_placement=[False])
    return str(data.device)


def dictionaries():
    """Load batches that are dicts of tensors and strings."""
    rows = [{"x": torch.tensor([float(each)]), "name": str(each)} for each in range(5)]
    data = _loaded(DataLoader(rows, batch_size=2))
    return [{"x": batch["x"].flatten().tolist(), "name": batch["name"]} for batch in data]


def random_numbers_in_the_dataset():
    """Load a dataset that draws from the global generator."""
    torch.manual_seed(3)

    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.rand(1)

    return [batch.flatten().tolist() for batch in _loaded(DataLoader(Noise(), batch_size=2))]


def python_random_afterwards():
    """Draw random numbers after an epoch."""
    torch.manual_seed(3)
    random.seed(3)
    for _ in _loaded(DataLoader(_numbers(6), batch_size=2, shuffle=True)):
        pass
    return torch.rand(1).item(), random.random()


def stateful():
    """Save and restore a stateful loader in the middle of an epoch."""
    data = _loaded(DataLoader(_numbers(8), batch_size=2), use_stateful_dataloader=True)
    for _ in data:
        state = data.state_dict()
        break
    again = _loaded(DataLoader(_numbers(8), batch_size=2), use_stateful_dataloader=True)
    again.load_state_dict(state)
    return _seen(again)


def zipped():
    """Read two loaders at the same time."""
    accelerator = Accelerator(cpu=True)
    one, other = accelerator.prepare(DataLoader(_numbers(6), batch_size=2), DataLoader(_numbers(8), batch_size=2))
    return [[a[0].tolist(), b[0].tolist()] for a, b in zip(one, other)]


def prepared_twice():
    """Prepare a loader twice; the second call returns the same object."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(loader())
    return accelerator.prepare(data) is data, data._is_accelerate_prepared


def class_names():
    """Check isinstance of prepared loaders with Accelerate's classes."""
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    one, other = _loaded(loader()), _loaded(DataLoader(Stream(4), batch_size=2))
    return [isinstance(each, kind) for each in (one, other) for kind in (DataLoaderShard, DataLoaderDispatcher)]
