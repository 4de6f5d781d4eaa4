"""Objects that libraries build, copy and pickle themselves."""

import copy
import pickle

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SkipBatchSampler,
    SkipDataLoader,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from tests.ecosystem.habits.material import Stream, decaying, loader, prepared, rate


def _numbers(count):
    return TensorDataset(torch.arange(count * 1.0))


def a_loader_shard():
    """Build a DataLoaderShard."""
    Accelerator(cpu=True)
    data = DataLoaderShard(_numbers(5), batch_size=2)
    return [batch[0].tolist() for batch in data], len(data), data.end_of_dataloader


def a_loader_shard_with_a_device():
    """Build a DataLoaderShard with a device and skipped batches."""
    made = Accelerator(cpu=True)
    data = DataLoaderShard(_numbers(5), device=made.device, rng_types=None, skip_batches=1, batch_size=2)
    return [batch[0].tolist() for batch in data], str(data.device.type)


def a_dispatcher():
    """Build a DataLoaderDispatcher."""
    Accelerator(cpu=True)
    data = DataLoaderDispatcher(_numbers(8), batch_size=2)
    return [batch[0].tolist() for batch in data]


def a_skipping_loader():
    """Build a SkipDataLoader."""
    Accelerator(cpu=True)
    data = SkipDataLoader(_numbers(6), skip_batches=1, batch_size=2)
    return [batch[0].tolist() for batch in data], len(data), data.skip_batches


def a_stateful_skipping_loader():
    """Build a SkipDataLoader with use_stateful_dataloader=True."""
    Accelerator(cpu=True)
    data = SkipDataLoader(_numbers(6), skip_batches=1, batch_size=2, use_stateful_dataloader=True)
    return [batch[0].tolist() for batch in data]


def a_batch_sampler_shard():
    """Build BatchSamplerShards and read their attributes."""
    sampler = BatchSampler(SequentialSampler(range(7)), 2, False)
    shares = [BatchSamplerShard(sampler, 2, index) for index in range(2)]
    one = shares[0]
    return (
        [list(each) for each in shares],
        len(one),
        one.total_length,
        one.num_processes,
        one.process_index,
        one.batch_size,
        one.drop_last,
        one.split_batches,
        one.even_batches,
    )


def a_batch_sampler_shard_set_afterwards():
    """Assign even_batches of a BatchSamplerShard, like libraries."""
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(7)), 2, False), 2, 1)
    shard.even_batches = False
    return list(shard), len(shard)


def a_stream_shard():
    """Build IterableDatasetShards."""
    shares = [IterableDatasetShard(Stream(7), 2, num_processes=2, process_index=index) for index in range(2)]
    return [list(each) for each in shares]


def a_skipping_batch_sampler():
    """Build a SkipBatchSampler."""
    sampler = SkipBatchSampler(BatchSampler(SequentialSampler(range(7)), 2, False), 2)
    return list(sampler), len(sampler), sampler.total_length


def pickling_an_accelerator():
    """Pickle an Accelerator, like ray and joblib."""
    made = Accelerator(cpu=True)
    again = pickle.loads(pickle.dumps(made))
    return again.num_processes == made.num_processes, str(again.device.type)


def copying_an_accelerator():
    """Copy an Accelerator with copy.deepcopy."""
    made = Accelerator(cpu=True, gradient_accumulation_steps=2)
    again = copy.deepcopy(made)
    return again.gradient_accumulation_steps, again.is_main_process == made.is_main_process


def pickling_a_loader():
    """Pickle a prepared loader."""
    data = Accelerator(cpu=True).prepare(loader(4))
    again = pickle.loads(pickle.dumps(data))
    return [batch[1].flatten().tolist() for batch in again]


def copying_a_loader():
    """Copy a prepared loader with copy.deepcopy."""
    data = Accelerator(cpu=True).prepare(loader(4))
    return [batch[1].flatten().tolist() for batch in copy.deepcopy(data)]


def copying_a_scheduler():
    """Copy a prepared scheduler. A step of the copy does not change the optimizer."""
    _accelerator, _net, optimizer, _data, ticks = prepared(schedule=decaying)
    again = copy.deepcopy(ticks)
    again.step()
    return rate(optimizer), again.get_last_lr()


def pickling_a_scheduler():
    """Pickle a prepared scheduler."""
    _accelerator, _net, _optimizer, _data, ticks = prepared(schedule=decaying)
    return pickle.loads(pickle.dumps(ticks)).get_last_lr()


def pickling_an_optimizer():
    """Pickle a prepared optimizer."""
    _accelerator, _net, optimizer, _data, _ticks = prepared(schedule=decaying)
    return pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"]


def copying_a_model():
    """Copy the unwrapped model, like an EMA."""
    accelerator, net, *_ = prepared()
    return copy.deepcopy(accelerator.unwrap_model(net)).weight.tolist()


def pickling_a_state():
    """Pickle an AcceleratorState."""
    made = Accelerator(cpu=True)
    return pickle.loads(pickle.dumps(made.state)).num_processes == made.num_processes


def an_optimizer_by_hand():
    """Build an AcceleratedOptimizer."""
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    parameter = torch.nn.Parameter(torch.ones(1))
    made = AcceleratedOptimizer(torch.optim.SGD([parameter], 0.1))
    parameter.grad = torch.ones(1)
    made.step()
    return parameter.tolist(), made.step_was_skipped


def a_scheduler_by_hand():
    """Build an AcceleratedScheduler."""
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    ticks = AcceleratedScheduler(decaying(optimizer), AcceleratedOptimizer(optimizer))
    ticks.step()
    return rate(optimizer)


def kinds_of_what_is_prepared():
    """Check isinstance of prepared objects with Accelerate's and torch's classes."""
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    _accelerator, _net, optimizer, data, ticks = prepared(schedule=decaying)
    return (
        isinstance(optimizer, AcceleratedOptimizer),
        isinstance(optimizer, torch.optim.Optimizer),
        isinstance(ticks, AcceleratedScheduler),
        isinstance(data, DataLoader),
    )


def settings_that_change():
    """Assign fields of handlers."""
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradScalerKwargs

    one, other, third = DataLoaderConfiguration(), DistributedDataParallelKwargs(), GradScalerKwargs()
    one.split_batches = True
    other.find_unused_parameters = True
    third.init_scale = 4.0
    return other.to_kwargs(), third.to_kwargs(), one.split_batches
