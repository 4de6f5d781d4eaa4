"""Habits that docs/accelerate_name_reference.md lists as different, and former differences that now agree."""

import logging
import os

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    PartialState,
    cpu_offload,
    dispatch_model,
    skip_first_batches,
)
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.data_loader import IterableDatasetShard
from accelerate.local_sgd import LocalSGD
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProfileKwargs, ProjectConfiguration
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tests.ecosystem.habits.material import Stream, loader, loss_of, prepared, weights


def _numbers(count):
    return TensorDataset(torch.arange(count * 1.0))


def _loaded(data, **config):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config)).prepare(data)


def _seen(data):
    return [(batch[0] if isinstance(batch, list | tuple) else batch).tolist() for batch in data]


def _gathered(data, **config):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    found = accelerator.prepare(data)
    return accelerator, found, lambda batch: accelerator.gather_for_metrics(batch).tolist()


def _layers():
    return torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))


def dispatched_draws():
    """Draw a random number after a shuffled loader that dispatches."""
    torch.manual_seed(3)
    data = _loaded(DataLoader(_numbers(8), batch_size=2, shuffle=True), dispatch_batches=True)
    return _seen(data), torch.rand(1).item()


def own_order_by_seed():
    """Read the rows of a loader with a subclass of RandomSampler and use_seedable_sampler=True."""

    class Backwards(RandomSampler):
        def __iter__(self):
            return iter(range(len(self.data_source) - 1, -1, -1))

    data = _numbers(8)
    return _seen(_loaded(DataLoader(data, batch_size=2, sampler=Backwards(data)), use_seedable_sampler=True))


def uneven_lengths():
    """Use even_batches=False when ranks get different numbers of batches."""
    return _seen(_loaded(DataLoader(_numbers(10), batch_size=2), even_batches=False))


def joined_unevenly():
    """Use join_uneven_inputs(even_batches=False) on CPUs."""
    accelerator, net, _, data, _ = prepared(10, 2)
    with accelerator.join_uneven_inputs([net], even_batches=False):
        return [batch[1].flatten().tolist() for batch in data], len(data)


def skipping_what_is_dispatched():
    """Call skip_first_batches for a loader that dispatches."""
    return _seen(skip_first_batches(_loaded(DataLoader(_numbers(16), batch_size=2), dispatch_batches=True), 1))


def metrics_of_a_stream():
    """Call gather_for_metrics for a stream of which each rank reads its part."""
    _, data, gather = _gathered(DataLoader(Stream(7), batch_size=2), dispatch_batches=False)
    return [gather(batch) for batch in data]


def metrics_of_a_dispatched_stream():
    """Call gather_for_metrics for a stream that one process reads for all."""
    _, data, gather = _gathered(DataLoader(Stream(7), batch_size=2))
    return [gather(batch) for batch in data]


def metrics_after_skipping():
    """Call gather_for_metrics after skip_first_batches."""
    accelerator, data, gather = _gathered(DataLoader(_numbers(7), batch_size=2))
    return [gather(batch[0]) for batch in accelerator.skip_first_batches(data, 1)]


def metrics_after_dropping():
    """Call gather_for_metrics with a batch sampler that has drop_last."""
    data = _numbers(11)
    _, data, gather = _gathered(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, True)))
    return [gather(batch[0]) for batch in data]


def wrapped():
    """Read the class names of a prepared model and of the unwrapped one."""
    accelerator, net, *_ = prepared()
    return type(net).__name__, type(accelerator.unwrap_model(net)).__name__


def buffers():
    """Read BatchNorm's running means after one epoch of training."""
    accelerator = Accelerator(cpu=True)
    net = torch.nn.BatchNorm1d(3)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader(8, 2))
    for batch in data:
        accelerator.backward(net(batch[0]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(net).running_mean.tolist()


def entries_of_checkpoints():
    """List the folder of checkpoints with automatic naming."""
    accelerator, *_ = prepared(project_config=ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True))
    accelerator.save_state()
    accelerator.wait_for_everyone()
    return sorted(os.listdir("run/checkpoints"))


def half_on_a_cpu():
    """Read accelerator.scaler.is_enabled() with mixed_precision="fp16" on a CPU."""
    return Accelerator(cpu=True, mixed_precision="fp16").scaler.is_enabled()


def overlapping_map():
    """Dispatch with a map that has a module on disk and one of its submodules elsewhere."""
    made = dispatch_model(_layers(), {"0": "disk", "0.0": "cpu", "1": "cpu"}, offload_dir=f"off{os.getpid()}")
    return list(made(torch.ones(1, 2)).shape)


def moving_a_dispatched_model():
    """Call to() on a dispatched model."""
    return list(
        dispatch_model(_layers(), {"0": "cpu", "1": "disk"}, offload_dir=f"off{os.getpid()}")
        .to("cpu")(torch.ones(1, 2))
        .shape
    )


def offloading_to_the_cpu():
    """Call cpu_offload with the CPU as the execution device."""
    return list(cpu_offload(_layers(), "cpu")(torch.ones(1, 2)).shape)


def casting_by_layers():
    """Read the dtypes of gradients with layerwise casting to bfloat16."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    attach_layerwise_casting_hooks(net, torch.bfloat16, torch.float32)
    net(torch.ones(1, 2)).sum().backward()
    return [str(each.grad.dtype) for each in net.parameters()]


def where_it_is():
    """Read accelerator.device."""
    return str(Accelerator(cpu=True).device)


def after_a_reset():
    """Read whether the process group exists after _reset_state(reset_partial_state=True)."""
    Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    return torch.distributed.is_initialized()


def a_missing_tracker():
    """Read the number of trackers if log_with names one whose package is not installed."""
    accelerator = Accelerator(cpu=True, log_with=["clearml"])
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    return len(accelerator.trackers)


def _tracked(log):
    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False
        tracker = None

        def store_init_configuration(self, values):
            pass

    Own.log = log
    PartialState(cpu=True)
    accelerator = Accelerator(cpu=True, log_with=Own())
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    return accelerator


def a_tracker_that_fails():
    """Use a tracker that raises an error in log."""

    def fail(self, values, step=None):
        raise OSError("no space")

    return type(_tracked(fail)).__name__.replace("Accelerate", "", 1).endswith("Accelerator")


def a_step_that_was_not_given():
    """Read the steps that a tracker receives from accelerator.log without and with step=."""
    seen = []
    _tracked(lambda self, values, step=None: seen.append(step)).log({"loss": 1.0}, step=5)
    return seen


def scaled():
    """Call reduce with scale=0.5."""
    return Accelerator(cpu=True).reduce(torch.ones(2), "sum", scale=0.5).tolist()


def epoch_of_a_shard():
    """Read IterableDatasetShard.epoch."""
    return IterableDatasetShard(Stream(4), 2).epoch


def lines_of_a_log():
    """Read the message of logger.info."""
    Accelerator(cpu=True)
    seen = []
    log = get_logger("lines", log_level="INFO")
    log.logger.addHandler(logging.Handler())
    log.logger.handlers[-1].emit = lambda record: seen.append(record.getMessage())
    log.info("hello", main_process_only=False)
    return seen


def files_of_a_profile():
    """List the files in output_trace_dir."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir="traces")])
    with accelerator.profile():
        torch.ones(2).add(1)
    accelerator.wait_for_everyone()
    return sorted(os.listdir("traces"))


def state_of_a_stateful_loader():
    """Read whether a stateful loader's state dict has the key "consumed"."""
    data = _loaded(DataLoader(_numbers(8), batch_size=2), use_stateful_dataloader=True)
    next(iter(data))
    return "consumed" in data.state_dict()


def a_ragged_last_round():
    """Use LocalSGD with accumulation and five batches for two ranks."""
    accelerator, net, optimizer, data, _ = prepared(10, 2, gradient_accumulation_steps=2)
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2, enabled=True) as local:
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch) / 100)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    return weights(net)


def fetched_ahead():
    """Use a dataset that draws from the global generator in a loop that also draws."""

    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.rand(1)

    return [[batch.flatten().tolist(), torch.rand(1).item()] for batch in _loaded(DataLoader(Drawing(), batch_size=2))]
