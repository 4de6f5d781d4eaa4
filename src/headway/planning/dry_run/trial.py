"""Run one update of one rank on fake tensors, and record its memory, communication and computation.

The dry runs of the pipeline ranks take turns until each has received the objects that it needs from the others. The
memory of all ranks is then computed from the memory of one rank and from how its tensors are sharded.

If a model has repeated blocks, only a few of them are run, and the results are extrapolated. This requires that the
fifth repetition adds as much communication and computation as the fourth. The peak memory is computed from the
extrapolated allocation events (`headway.forecasting.tracing.repeats`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions
from headway.core.strategies.base import Strategy
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.forecast_types import MakeOptimizer
from headway.errors import HeadwayError, StateError, UnsupportedError
from headway.forecasting.device.allocator import separate_unsure
from headway.forecasting.device.devices import Device, find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.fake import fill_model
from headway.forecasting.tracing.repeats import TRACED, find_blocks, trace_repeated
from headway.forecasting.tracing.step import choose_cuda_kernels, mark_model
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning._torch import FakeTensorMode
from headway.planning.dry_run.drive import ContextParallelDriver, MeasuredForward, PipelineDriver, Step, StepDriver
from headway.planning.dry_run.fake_group import ObjectNotReady, PeerObjects, RealTensorMode, run_as_rank
from headway.planning.dry_run.meter import SHARED, ActivationMeter, MeteredCollective, PlanEvent, StepMeter, Volume
from headway.planning.dry_run.states import StateBytes, count_state_bytes, describe_states
from headway.planning.dry_run.updates import DryRunUpdates

_PADDED_AXES = frozenset({"shard", "cp", *SHARED.values()})
"""Axes along which `fully_shard` pads tensors, so that every rank allocates as many elements as the first."""

_COUNTS = ("buffers", "weights", "gradients", "optimizer_state", "activations", "buckets")
"""Fields of `StepDryRun` that are extrapolated linearly with the number of repeated blocks."""


@dataclass(frozen=True)
class TensorSharding:
    """Description of a parameter: its shape, and how it is sharded.

    Attributes:
        name: Name of the parameter in the unwrapped model.
        shape: Shape of the full parameter.
        itemsize: Bytes per element.
        requires_grad: Whether the parameter gets a gradient.
        sharding_axes: Axes of the layout that shard a dimension, in the order of sharding, by index of the dimension.
            Dimensions that are not sharded have no entry.
        stages: Indices of the pipeline stages that have the parameter, or None for all.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    requires_grad: bool
    sharding_axes: dict[int, tuple[str, ...]]
    stages: frozenset[int] | None = None

    @property
    def axes(self) -> set[str]:
        """Names of the layout's axes that shard the parameter along any dimension.

        A joint axis, such as "shard_cp", is replaced by its single axes.
        """
        all_axes = {axis for axes in self.sharding_axes.values() for axis in axes}
        return {single for axis in all_axes for single in axis.split("_")}


def describe_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSharding]:
    """Return a description of each tensor: its shape, and how it is sharded.

    Args:
        named: Pairs of a name and a tensor. A tensor that is not a DTensor counts as unsharded.
    """
    return [
        TensorSharding(
            name, tuple(tensor.shape), tensor.element_size(), tensor.requires_grad, _find_sharding_axes(tensor)
        )
        for name, tensor in named
    ]


def _find_sharding_axes(tensor: torch.Tensor) -> dict[int, tuple[str, ...]]:
    """Return, for each sharded dimension of a tensor, the axes of the layout that shard it, in the order of sharding.

    The dict is empty if the tensor is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        return {}
    names: Sequence[str] = tensor.device_mesh.mesh_dim_names or ()
    axes_by_dim: dict[int, list[str]] = {}
    is_strided = any(
        not isinstance(placement, Shard) and hasattr(placement, "split_factor") for placement in tensor.placements
    )
    placed: list[tuple[str, Placement]] = list(zip(names, tensor.placements))
    # fully_shard splits shards of tensor parallelism further, although its axis comes first in the mesh. A strided
    # placement indicates this order.
    for name, placement in reversed(placed) if is_strided else placed:
        if placement.is_shard() or hasattr(placement, "split_factor"):
            axes_by_dim.setdefault(placement.dim, []).append(name)  # type: ignore[attr-defined]
    return {dim: tuple(axes) for dim, axes in axes_by_dim.items()}


class RankCoordinates:
    """Coordinates of all ranks along the axes of a layout, used to count the parameters' elements on each rank.

    Args:
        layout: Layout of the run.

    Attributes:
        num_ranks: World size.
        sizes: Sizes of the layout's axes, by name.
        coordinates: Coordinate of every rank along each axis, as tensors of shape (num_ranks,), by axis name.
    """

    def __init__(self, layout: Layout) -> None:
        self.num_ranks = layout.num_ranks
        self.sizes = layout.sizes
        stride, ranks = self.num_ranks, torch.arange(self.num_ranks)
        self.coordinates = {"pp": torch.zeros_like(ranks)}
        for axis, size in self.sizes.items():
            stride //= size
            self.coordinates[axis] = ranks // stride % size
        self._sizes_with_joint = dict(self.sizes)
        for inner, joint in SHARED.items():
            if all(axis in self.sizes for axis in inner):
                self._sizes_with_joint[joint] = layout.shard * prod(self.sizes[axis] for axis in inner)
                self.coordinates[joint] = self.coordinates.get("shard", torch.zeros_like(ranks))
                for axis in inner:
                    self.coordinates[joint] = self.coordinates[joint] * self.sizes[axis] + self.coordinates[axis]

    def count_elements(self, parameter: TensorSharding) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of a parameter's elements on each rank.

        Args:
            parameter: Description of the parameter and its sharding.

        Returns:
            Two tensors of shape (num_ranks,): the number of elements that each rank has, and the number of elements for
            which the rank allocates memory, including padding.
        """
        num_elements = num_allocated = torch.ones(self.num_ranks, dtype=torch.long)
        for dim, size in enumerate(parameter.shape):
            length = padded_length = torch.full((self.num_ranks,), size)
            for axis in parameter.sharding_axes.get(dim, ()):
                if axis not in self._sizes_with_joint:
                    continue
                chunk = -(-length // self._sizes_with_joint[axis])
                length = (length - chunk * self.coordinates[axis]).clamp(min=0).minimum(chunk)
                padded_length = chunk if axis in _PADDED_AXES else length
            num_elements, num_allocated = num_elements * length, num_allocated * padded_length
        if parameter.stages is not None:
            has_parameter = self.mask_stages(parameter.stages)
            num_elements, num_allocated = num_elements * has_parameter, num_allocated * has_parameter
        return num_elements, num_allocated

    def spread_by_stage(self, values: Sequence[int]) -> torch.Tensor:
        """Return a tensor of shape (num_ranks,) with the value of each rank's pipeline stage.

        Args:
            values: One value per stage.
        """
        return torch.tensor(values, dtype=torch.long)[self.coordinates["pp"]]

    def mask_stages(self, stages: frozenset[int]) -> torch.Tensor:
        """Return a boolean tensor of shape (num_ranks,) that is True for the ranks of the given pipeline stages."""
        return torch.isin(self.coordinates["pp"], torch.tensor(sorted(stages)))


def count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the storages of the tensors' local shards, including padding.

    A storage that several tensors share counts once.
    """
    bytes_by_address = {
        storage._cdata: storage.nbytes()
        for storage in (get_local_shard(tensor).untyped_storage() for tensor in tensors)
    }
    return sum(bytes_by_address.values())


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
        for index, event in enumerate(separate_unsure(self.trace.events)[0]):
            in_use += event.num_bytes
            missing_state = self.optimizer_state or 0 if index < self.trace.phases["update"] else 0
            peak = max(peak, in_use + missing_state)
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
        precision: "no", "bf16" or "fp16".
        options: Options of the engines.
        machine_ranks: Ranks per machine.
        peer_objects: Objects stored by the dry runs of other pipeline ranks, or None without pipeline stages.
        device: Device whose kernels' scratch memory is counted, or None for a CPU.

    Raises:
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout is not supported, or the step or the optimizer cannot run without values.
    """
    device = device or find_device("cpu")
    with init_empty_weights(include_buffers=True):
        model = make()
    options, fake = options or EngineOptions(), FakeTensorMode(allow_non_fake_inputs=True)
    fill_model(model, fake)
    # Entered outside of the fake mode, because tensors with the ranks of a device mesh must keep their values.
    with run_as_rank(model, layout, rank, machine_ranks, precision, options, peer_objects) as strategy:
        drive = _make_driver(strategy, model, layout, options, step)
        modes: list[AbstractContextManager[Any]] = [substitute_kernels(device, precision), fake]
        modes.append(RealTensorMode())  # type: ignore[no-untyped-call]
        updates = DryRunUpdates(None if layout.pp > 1 else strategy, options)
        return run_update(model, layout, step, make_optimizer, precision, modes, drive, device, updates)


def _make_driver(
    strategy: Strategy | None, model: nn.Module, layout: Layout, options: EngineOptions, step: Step | None
) -> StepDriver:
    if strategy is not None and layout.pp > 1:
        return PipelineDriver(strategy, (options.pipeline or PipelineOptions()).schedule, step)
    return ContextParallelDriver(strategy, model) if strategy is not None and layout.cp > 1 else StepDriver()


def run_update(
    model: nn.Module,
    layout: Layout,
    step: Step | None,
    make_optimizer: MakeOptimizer | None,
    precision: str = "no",
    within: Iterable[AbstractContextManager[Any]] = (),
    drive: StepDriver | None = None,
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
        precision: "no", "bf16" or "fp16".
        within: Context managers in which the update runs.
        drive: Driver of the layout's strategy, or None for a driver that only calls the model.
        device: Device whose kernels' scratch memory is counted, or None for a CPU.
        updates: Updates of the layout's strategy, or None for optimizers that step on the parameters directly.

    Raises:
        UnsupportedError: If the step or the optimizer cannot run without values.
    """
    device, updates = device or find_device("cpu"), updates or DryRunUpdates()
    # Parameters of other pipeline stages are on the meta device.
    named = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    buffers = count_storage_bytes(buffer for buffer in model.buffers() if not buffer.is_meta)
    described, weights = tuple(describe_tensors(named)), count_storage_bytes(parameter for _, parameter in named)
    if step is None:
        return StepDryRun(described, buffers, weights)
    meter = StepMeter(layout)
    tracker = StorageTracker(device)
    activations = ActivationMeter(meter, [*model.parameters(), *model.buffers()], tracker)
    optimizer, drive = None, drive or StepDriver()
    with ExitStack() as stack:
        for mode in within:
            stack.enter_context(mode)
        if make_optimizer is not None:
            optimizer = make_optimizer([parameter for _, parameter in named if parameter.requires_grad])
            updates.adopt_optimizer(optimizer)
            if device.is_cuda:
                choose_cuda_kernels(optimizer)
        forward = MeasuredForward(step, model, precision, activations)
        drive.warm_up(forward)
        activations.reset_peak()
        # The tracker is the inner mode. So it sees operations on local shards, but not those that DTensor runs on full
        # tensors to determine shapes.
        with meter, tracker:
            tracker.enter_phase("forward")
            mark_model(model, tracker)
            drive.run_update(forward, meter)
            meter.phase = "update"
            tracker.enter_phase("update")
            reduced = _count_ddp_bytes(model, layout)
            # DDP's C++ engine rejects fake tensors, so its all-reduce of all gradients is added here.
            if reduced is not None:
                exchange = MeteredCollective("backward", "all_reduce", "replicate", layout.replicate)
                meter.volumes[exchange] = Volume(1, reduced, reduced)
            if optimizer is not None:
                with _explain_update(optimizer):
                    updates.step_optimizer(optimizer)
    gradients = count_storage_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    parameters = [parameter for _, parameter in named]
    states: tuple[StateBytes, ...] = (StateBytes(0, 0),) * len(parameters)
    if optimizer is not None and make_optimizer is not None:
        with _explain_update(optimizer):
            states = describe_states(parameters, optimizer, make_optimizer, updates, layout.num_ranks)
    buckets = _count_ddp_bytes(model, layout) or 0  # DDP's buckets contain a second copy of all gradients
    return StepDryRun(
        parameters=described,
        buffers=buffers,
        weights=weights,
        gradients=gradients,
        optimizer_state=count_state_bytes(parameters, states),
        states=states,
        volumes=meter.volumes,
        flops=dict(meter.flops),
        activations=activations.peak,
        events=tuple(meter.events),
        trace=tracker.build_trace(),
        buckets=buckets,
    )


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


def dry_run_stages(layout: Layout, dry_run_rank: Callable[[int, PeerObjects], StepDryRun]) -> tuple[StepDryRun, ...]:
    """Run the dry runs of all pipeline ranks of the first replica, and return their results by stage.

    A dry run that needs objects from later ranks is repeated.

    Args:
        layout: Layout of the run.
        dry_run_rank: Function that runs the dry run of one rank. It takes the rank and the store of all ranks' objects.

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
                    dry_runs[stage] = dry_run_rank(rank, peer_objects)
                except ObjectNotReady:
                    continue
        if (len(dry_runs), peer_objects.num_stored) == progress:
            raise StateError(f"the stages of a pipeline of {len(ranks)} ranks wait for each other in their dry runs")
    return tuple(dry_runs[stage] for stage in range(len(ranks)))


def can_repeat_blocks(options: EngineOptions) -> bool:
    """Whether the engine options treat all repeated blocks of a model equally.

    If so, the dry run of a few blocks can be extrapolated to all of them.
    """
    sharding, checkpointing = options.sharding, options.checkpointing
    if checkpointing is not None and checkpointing.every > 1:
        return False
    return sharding is None or (
        not sharding.min_num_params and sharding.forward_prefetch <= 1 and sharding.backward_prefetch <= 1
    )


def dry_run_repeated(
    make: Callable[[], nn.Module], dry_run: Callable[[Callable[[], nn.Module]], StepDryRun]
) -> StepDryRun | None:
    """Return the dry run of a full model, extrapolated from dry runs with a few of its blocks.

    Return None if the model has too few repeated blocks, or if they differ in their dry runs.

    Args:
        make: Function that makes the model. It is called in a context in which parameters take no memory.
        dry_run: Function that takes a function that makes a model, and returns the model's dry run. It must treat all
            blocks equally.
    """
    with init_empty_weights(include_buffers=True):
        model = make()
    blocks = find_blocks(model)
    if blocks is None:
        return None
    dry_runs: dict[int, StepDryRun] = {}  # by number of repetitions

    def trace_repeats(count: int) -> Trace:
        def make_shortened() -> nn.Module:
            model = make()
            blocks.shorten(model, count)
            return model

        dry_runs[count] = dry_run(make_shortened)
        trace = dry_runs[count].trace
        assert trace is not None
        return trace

    traced = trace_repeated(trace_repeats, blocks.count)
    if traced is None:
        return None
    in_order = [_collect_counts(dry_runs[count]) for count in sorted(dry_runs)]
    counts = _extrapolate_counts(in_order, blocks.count - TRACED)
    first = dry_runs[min(dry_runs)]
    indices = {parameter.name: index for index, parameter in enumerate(first.parameters)}
    names = [name for name, _ in model.named_parameters()]
    if counts is None or not all(blocks.name_in_first(name) in indices for name in names):
        return None
    # Each parameter of the full model is described like the corresponding one of the shortened model.
    sources = [indices[blocks.name_in_first(name)] for name in names]
    assert first.volumes is not None
    assert first.flops is not None
    numbers: dict[str, Any] = {name: counts[name] for name in _COUNTS}
    return replace(
        first,
        parameters=tuple(replace(first.parameters[index], name=name) for name, index in zip(names, sources)),
        states=tuple(first.states[index] for index in sources) if first.states else (),
        volumes={key: Volume(*(counts[key, name] for name in asdict(Volume()))) for key in first.volumes},
        flops={phase: counts["flops", phase] for phase in first.flops},
        trace=traced,
        **numbers,
    )


def _collect_counts(run: StepDryRun) -> dict[Hashable, int]:
    """Return the counts of a dry run that grow with the number of repeated blocks.

    The key of a count is the name of its field. If the field is a dict, the key is a pair that identifies the entry.
    """
    counts: dict[Hashable, int] = {name: getattr(run, name) for name in _COUNTS}
    counts |= {("flops", phase): number for phase, number in (run.flops or {}).items()}
    for key, volume in (run.volumes or {}).items():
        counts |= {(key, name): number for name, number in asdict(volume).items()}
    return counts


def _extrapolate_counts(runs: Sequence[dict[Hashable, int]], ahead: int) -> dict[Hashable, int] | None:
    """Return all counts, extrapolated linearly to more repetitions of the blocks.

    Return None if a count does not grow by the same amount from each run to the next.

    Args:
        runs: Counts of three dry runs. Each has one more repetition of the blocks than the previous one.
        ahead: Number of repetitions to add to the first run.
    """
    first, second, third = runs
    if not first.keys() == second.keys() == third.keys():
        return None
    if any(third[key] - second[key] != second[key] - first[key] for key in first):
        return None
    return {key: first[key] + ahead * (second[key] - first[key]) for key in first}
