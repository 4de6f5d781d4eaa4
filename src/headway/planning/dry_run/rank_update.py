"""Run one update of one rank on fake tensors, and record its memory, communication and computation.

The dry runs of the pipeline ranks take turns until each has received the objects that it needs from the others. The
memory of all ranks is then computed from the memory of one rank and from how its tensors are sharded.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions
from headway.core.strategies.base import Strategy
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.forecast_types import MakeOptimizer
from headway.errors import HeadwayError, StateError, UnsupportedError
from headway.forecasting.device.devices import Device, find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.fake_model import fill_model
from headway.forecasting.tracing.reported_tensors import mark_model
from headway.forecasting.tracing.step import choose_cuda_kernels
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.forecasting.tracing.trace import Trace
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning._torch import FakeTensorMode
from headway.planning.dry_run.activation_meter import ActivationMeter
from headway.planning.dry_run.fake_collectives import ObjectNotReady, PeerObjects
from headway.planning.dry_run.fake_group import run_as_rank
from headway.planning.dry_run.meter import MeteredCollective, PlanEvent, StepMeter, Volume
from headway.planning.dry_run.states import StateBytes, count_state_bytes, describe_states
from headway.planning.dry_run.step_drivers import (
    ContextParallelDriver,
    MeasuredForward,
    PipelineDriver,
    Step,
    StepDriver,
)
from headway.planning.dry_run.tensor_modes import RealTensorMode
from headway.planning.dry_run.tensor_sharding import TensorSharding, describe_tensors
from headway.planning.dry_run.updates import DryRunUpdates
from headway.planning.traced_offload import offloads_activations, trace_offloading


@dataclass(frozen=True)
class StepDryRun:
    """Measurements of the dry run of one rank: memory, communication and computation.

    Attributes:
        parameters: Parameters of the model on this rank, and how they are sharded.
        buffers: Bytes of buffers.
        weights: Bytes of the parameters' storages.
        gradients: Bytes of the gradients' storages, or None without a step.
        optimizer_state: Bytes of the optimizer state, 0 without an optimizer, or None without a step.
        states: Optimizer state of each parameter. Empty without a step.
        volumes: Number of calls and bytes of each kind of collective, or None without a step.
        flops: Floating point operations by phase, or None without a step.
        activations: Peak bytes that autograd kept, or None without a step.
        events: Computation and communication in order. Empty without pipeline stages.
        trace: Trace of the memory of tensors, or None without a step.
        buckets: Bytes of DDP's gradient buckets, which `trace` does not include.
    """

    parameters: tuple[TensorSharding, ...]
    buffers: int
    weights: int
    gradients: int | None = None
    optimizer_state: int | None = None
    states: tuple[StateBytes, ...] = ()
    volumes: dict[MeteredCollective, Volume] | None = None
    flops: dict[str, int] | None = None
    activations: int | None = None
    events: tuple[PlanEvent, ...] = field(default=(), compare=False, repr=False)
    # Not compared, because kernels can request scratch memory for real tensors that they do not request for fake ones.
    trace: Trace | None = field(default=None, compare=False, repr=False)
    buckets: int = 0

    @property
    def peak(self) -> int | None:
        """Peak bytes of tensors, including temporaries, in any update after the first. None without a trace.

        The trace is of the first update, at the end of which the optimizer creates its state. In later updates the
        state exists from the start. Therefore its bytes are added to all events before the optimizer step.
        """
        if self.trace is None:
            return None
        in_use = peak = 0
        update_begin = self.trace.phases["update"]
        for index, event in enumerate(self.trace.events):
            in_use += event.num_bytes
            is_before_update = index < update_begin
            later_state = (self.optimizer_state or 0) if is_before_update else 0
            peak = max(peak, in_use + later_state)
        return peak + self.buckets


def dry_run_rank(
    make: Callable[[], nn.Module],
    layout: Layout,
    rank: int,
    step: Step | None,
    make_optimizer: MakeOptimizer | None,
    precision: str = "no",
    options: EngineOptions | None = None,
    machine_ranks: int = 8,
    peer_objects: PeerObjects | None = None,
    device: Device | None = None,
) -> StepDryRun:
    """Run one update as one rank of a layout, on a model whose tensors have no values and take no memory.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        layout: Layout of the run.
        rank: Rank to run as.
        step: Training step, or None to only prepare the model.
        make_optimizer: Function that makes the optimizer, or None to stop after the gradients.
        precision: "no" (the default), "bf16" or "fp16".
        options: Options of the engines. None (the default): the engines' defaults.
        machine_ranks: Ranks per machine. Default: 8.
        peer_objects: Objects stored by the dry runs of other pipeline ranks. None (the default) without pipeline
            stages.
        device: Device whose kernels' scratch memory is counted. Activations are offloaded only from a CUDA device. None
            (the default): a CPU.

    Raises:
        ObjectNotReady: If the rank needs an object that the dry run of another pipeline rank has not stored yet.
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout is not supported, or the step or the optimizer cannot run without values.
    """
    device = device or find_device("cpu")
    with init_empty_weights(include_buffers=True):
        model = make()
    options, fake = options or EngineOptions(), FakeTensorMode(allow_non_fake_inputs=True)
    fill_model(model, fake)
    # On a CPU, nothing would be offloaded. Without offloading, number formats stay those of a CPU, so that plans can be
    # compared with real ranks on CPUs. On a GPU, norm layers share the units of their blocks: fewer calls, equal bytes.
    device_type = "cuda" if device.is_cuda and offloads_activations(options) else "cpu"
    # Entered outside of the fake mode, because tensors with the ranks of a device mesh must keep their values.
    with (
        trace_offloading(options),
        run_as_rank(model, layout, rank, machine_ranks, precision, options, peer_objects, device_type) as strategy,
    ):
        driver = _make_driver(strategy, model, layout, options, step)
        modes: list[AbstractContextManager[Any]] = [substitute_kernels(device, precision), fake]
        modes.append(RealTensorMode())  # type: ignore[no-untyped-call]
        updates = DryRunUpdates(None if layout.pp > 1 else strategy, options)
        return run_update(model, layout, step, make_optimizer, precision, modes, driver, device, updates)


def run_update(
    model: nn.Module,
    layout: Layout,
    step: Step | None,
    make_optimizer: MakeOptimizer | None,
    precision: str = "no",
    modes: Iterable[AbstractContextManager[Any]] = (),
    driver: StepDriver | None = None,
    device: Device | None = None,
    updates: DryRunUpdates | None = None,
) -> StepDryRun:
    """Run one update of a prepared model, and measure the update's memory, communication and computation.

    The tensors of the model are fake or real.

    Args:
        model: Prepared model.
        layout: Layout of the run.
        step: Training step, or None to count only the model.
        make_optimizer: Function that makes the optimizer, or None to stop after the gradients.
        precision: "no" (the default), "bf16" or "fp16".
        modes: Context managers in which the optimizer is made and the update runs. Default: (), none.
        driver: Driver of the layout's strategy. None (the default): a driver that only calls the model.
        device: Device whose kernels' scratch memory is counted. None (the default): a CPU.
        updates: Updates of the layout's strategy. None (the default): for optimizers that step on the parameters
            directly.

    Raises:
        UnsupportedError: If the step or the optimizer cannot run without values.
    """
    device, updates, driver = device or find_device("cpu"), updates or DryRunUpdates(), driver or StepDriver()
    # Parameters of other pipeline stages are on the meta device.
    named_parameters = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    parameters = [parameter for _, parameter in named_parameters]
    model_only = StepDryRun(
        parameters=tuple(describe_tensors(named_parameters)),
        buffers=_count_storage_bytes(buffer for buffer in model.buffers() if not buffer.is_meta),
        weights=_count_storage_bytes(parameters),
    )
    if step is None:
        return model_only
    meter = StepMeter(layout)
    tracker = StorageTracker(device)
    activation_meter = ActivationMeter(meter, [*model.parameters(), *model.buffers()], tracker)
    optimizer = None
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        if make_optimizer is not None:
            optimizer = make_optimizer([parameter for parameter in parameters if parameter.requires_grad])
            updates.adopt_optimizer(optimizer)
            if device.is_cuda:
                choose_cuda_kernels(optimizer)
        forward = MeasuredForward(step, model, precision, activation_meter)
        driver.warm_up(forward)
        activation_meter.reset_peak()
        # The tracker is the inner mode. So it sees operations on local shards, but not those that DTensor runs on full
        # tensors to determine shapes.
        with meter, tracker:
            tracker.enter_phase("forward")
            mark_model(model, tracker)
            driver.run_update(forward, meter)
            meter.phase = "update"
            tracker.enter_phase("update")
            ddp_bytes = _count_ddp_bytes(model, layout)
            # DDP's C++ engine rejects fake tensors, so its all-reduce of all gradients is added here.
            if ddp_bytes is not None:
                exchange = MeteredCollective("backward", "all_reduce", "replicate", layout.replicate)
                meter.volumes[exchange] = Volume(calls=1, num_bytes=ddp_bytes, largest=ddp_bytes)
            if optimizer is not None:
                with _explain_update(optimizer):
                    updates.step_optimizer(optimizer)
    gradients = _count_storage_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    states: tuple[StateBytes, ...] = (StateBytes(0, 0),) * len(parameters)
    if optimizer is not None and make_optimizer is not None:
        with _explain_update(optimizer):
            states = describe_states(parameters, optimizer, make_optimizer, updates, layout.num_ranks)
    return replace(
        model_only,
        gradients=gradients,
        optimizer_state=count_state_bytes(parameters, states),
        states=states,
        volumes=meter.volumes,
        flops=dict(meter.flops),
        activations=activation_meter.peak,
        events=tuple(meter.events),
        trace=tracker.build_trace(),
        buckets=ddp_bytes or 0,  # DDP's buckets contain a second copy of all gradients
    )


def dry_run_stages(layout: Layout, run_rank: Callable[[int, PeerObjects], StepDryRun]) -> tuple[StepDryRun, ...]:
    """Run the dry runs of all pipeline ranks of the first replica, and return their results by stage.

    A dry run that needs objects from later ranks is repeated.

    Args:
        layout: Layout of the run.
        run_rank: Function that runs the dry run of one rank. It takes the rank and the store of all ranks' objects.

    Raises:
        StateError: If the ranks wait for each other forever.
    """
    peer_objects = PeerObjects()
    dry_runs: dict[int, StepDryRun] = {}  # by stage
    ranks = layout.list_groups("pp")[0]
    while len(dry_runs) < len(ranks):
        progress = len(dry_runs), peer_objects.num_stored
        for stage, rank in enumerate(ranks):
            if stage not in dry_runs:
                try:
                    dry_runs[stage] = run_rank(rank, peer_objects)
                except ObjectNotReady:
                    continue
        if (len(dry_runs), peer_objects.num_stored) == progress:
            raise StateError(f"the stages of a pipeline of {len(ranks)} ranks wait for each other in their dry runs")
    return tuple(dry_runs[stage] for stage in range(len(ranks)))


def _make_driver(
    strategy: Strategy | None, model: nn.Module, layout: Layout, options: EngineOptions, step: Step | None
) -> StepDriver:
    """Return the driver that runs an update as the layout's strategy does.

    Args:
        strategy: Strategy of the layout, or None for replicas.
        model: Prepared model.
        layout: Layout of the run.
        options: Options of the engines, which contain the pipeline schedule.
        step: Training step, or None to only prepare the model.
    """
    if strategy is not None and layout.pp > 1:
        schedule = (options.pipeline or PipelineOptions()).schedule
        return PipelineDriver(strategy, schedule, step)
    if strategy is not None and layout.cp > 1:
        return ContextParallelDriver(strategy, model)
    return StepDriver()


def _count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the storages of the tensors' local shards, including padding.

    A storage that several tensors share counts once.
    """
    bytes_by_address = {
        storage._cdata: storage.nbytes()
        for storage in (get_local_shard(tensor).untyped_storage() for tensor in tensors)
    }
    return sum(bytes_by_address.values())


@contextmanager
def _explain_update(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context that turns the errors of an optimizer's update into UnsupportedError.

    Headway's own errors are not changed.
    """
    try:
        yield
    except HeadwayError:
        raise
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot step in a plan of this layout: {message}. Plan with optimizer='adamw', or give a "
            "function that makes another optimizer"
        ) from error


def _count_ddp_bytes(model: nn.Module, layout: Layout) -> int | None:
    """Return the bytes of all gradients if DDP reduces them. Return None for other layouts and for one replica."""
    if not layout.is_replicas_only or layout.replicate == 1:
        return None
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
