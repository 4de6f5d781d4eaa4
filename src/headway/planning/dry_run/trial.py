"""One update of one rank: a model without memory prepared, called, and stepped on fake tensors; what it held and sent.

The ranks along a pipeline have their dry runs one after the other, until each has heard what it needs from the others. What all ranks
hold follows from how one rank's tensors were cut: arithmetic on placements.

Where a model's blocks repeat, a few of them are run, checked to be alike, and extrapolated to all: what a rank holds, sends and
computes must grow by as much with the fifth repetition as with the fourth; its peak is that of the events of all of them
(`headway.forecasting.tracing.repeats`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from headway.config.engines import EngineOptions
from headway.config.mesh import Layout
from headway.config.parallelism import PipelineOptions
from headway.errors import StateError, UnsupportedError
from headway.forecasting.device.allocator import told_apart
from headway.forecasting.device.devices import Device, find
from headway.forecasting.device.kernels import substituted
from headway.forecasting.tracing.fake import fill
from headway.forecasting.tracing.repeats import TRACED, find_blocks, trace_repeated
from headway.forecasting.tracing.step import MakeOptimizer, as_on_cuda, mark_model
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning.dry_run.drive import CutSequences, Forward, Pipeline, Step, StepDriver
from headway.planning.dry_run.fake_group import AnswerNotReady, PeerAnswer, RealStaysReal, as_rank
from headway.planning.dry_run.meter import SHARED, ActivationMeter, MeteredCollective, PlanEvent, StepMeter, Volume
from headway.strategies.base import Strategy
from headway.strategies.fully_sharded.dtensors import local

_SHARDED = frozenset({"shard", "cp", *SHARED.values()})
"""Axes along which fully_shard pads: every rank of them keeps as many elements as the first."""


@dataclass(frozen=True)
class TensorShare:
    """A tensor of the model, whole, and how it is cut.

    Attributes:
        name: in the bare model.
        shape: of the whole tensor.
        itemsize: bytes of an element.
        learns: has it a gradient?
        cuts: {dimension: the axes that cut it, the first cut first}.
        stages: places along "pp" that hold it; None: all.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    learns: bool
    cuts: dict[int, tuple[str, ...]]
    stages: frozenset[int] | None = None

    @property
    def axes(self) -> set[str]:
        """All axes that cut it."""
        found = {axis for axes in self.cuts.values() for axis in axes}
        return {single for axis in found for single in axis.split("_")}


def pieces(named: Iterable[tuple[str, torch.Tensor]]) -> list[TensorShare]:
    """The cut of each tensor, sharded or not."""
    return [
        TensorShare(name, tuple(tensor.shape), tensor.element_size(), tensor.requires_grad, _cuts(tensor))
        for name, tensor in named
    ]


def _cuts(tensor: torch.Tensor) -> dict[int, tuple[str, ...]]:
    if not isinstance(tensor, DTensor):
        return {}
    names: Sequence[str] = tensor.device_mesh.mesh_dim_names or ()
    found: dict[int, list[str]] = {}
    is_strided = any(
        not isinstance(placement, Shard) and hasattr(placement, "split_factor") for placement in tensor.placements
    )
    placed: list[tuple[str, Placement]] = list(zip(names, tensor.placements))
    # fully_shard cuts what tensor parallelism has cut before it, and marks that by a stride.
    for name, placement in reversed(placed) if is_strided else placed:
        if placement.is_shard() or hasattr(placement, "split_factor"):
            found.setdefault(placement.dim, []).append(name)  # type: ignore[attr-defined]
    return {dim: tuple(axes) for dim, axes in found.items()}


class RankGroups:
    """All ranks of a layout, by number."""

    def __init__(self, layout: Layout) -> None:
        self.num_ranks = layout.num_ranks
        self.sizes = layout.sizes
        stride, ranks = self.num_ranks, torch.arange(self.num_ranks)
        self.coordinates = {"pp": torch.zeros_like(ranks)}
        for axis, size in self.sizes.items():
            stride //= size
            self.coordinates[axis] = ranks // stride % size
        self._cuts = dict(self.sizes)
        for inner, both in SHARED.items():
            if inner in self.sizes:
                self._cuts[both] = layout.num_shards
                outer = self.coordinates.get("shard", torch.zeros_like(ranks))
                self.coordinates[both] = outer * self.sizes[inner] + self.coordinates[inner]

    def elements(self, piece: TensorShare) -> tuple[torch.Tensor, torch.Tensor]:
        """How many elements of it each rank holds, and for how many it has memory: (num_ranks,) each."""
        held = stored = torch.ones(self.num_ranks, dtype=torch.long)
        for dim, size in enumerate(piece.shape):
            length = room = torch.full((self.num_ranks,), size)
            for axis in piece.cuts.get(dim, ()):
                if axis not in self._cuts:
                    continue
                chunk = -(-length // self._cuts[axis])
                length = (length - chunk * self.coordinates[axis]).clamp(min=0).minimum(chunk)
                room = chunk if axis in _SHARDED else length
            held, stored = held * length, stored * room
        if piece.stages is not None:
            is_here = self.is_on(piece.stages)
            held, stored = held * is_here, stored * is_here
        return held, stored

    def by_stage(self, values: Sequence[int]) -> torch.Tensor:
        """What each rank has, of what each place along "pp" has: (num_ranks,)."""
        return torch.tensor(values, dtype=torch.long)[self.coordinates["pp"]]

    def is_on(self, stages: frozenset[int]) -> torch.Tensor:
        """Which ranks stand at these places along "pp": (num_ranks,)."""
        return torch.isin(self.coordinates["pp"], torch.tensor(sorted(stages)))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind these tensors here, each storage once; padding counts."""
    found = {storage._cdata: storage.nbytes() for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(found.values())


@dataclass(frozen=True)
class StateOf:
    """What an optimizer keeps for one parameter.

    Attributes:
        per_element: bytes for each element that a rank holds.
        fixed: bytes beside that, such as a count of steps.
    """

    per_element: int
    fixed: int


@dataclass(frozen=True)
class StepDryRun:
    """What one rank held and sent.

    Attributes:
        pieces: the model's parameters.
        buffers: bytes.
        weights: bytes of memory behind the parameters.
        gradients: bytes of memory behind the gradients; None: no step was given.
        optimizer_state: bytes of the optimizer's state; None: no step, or no optimizer.
        states: by parameter.
        volumes: what was sent.
        flops: by phase.
        activations: the most bytes that autograd kept at once.
        events: what was computed, sent and received, in order.
        trace: of the memory that tensors took.
        buckets: bytes that DDP's reducer holds on top.
    """

    pieces: tuple[TensorShare, ...]
    buffers: int
    weights: int
    gradients: int | None = None
    optimizer_state: int | None = None
    states: tuple[StateOf, ...] = ()
    volumes: dict[MeteredCollective, Volume] | None = None
    flops: dict[str, int] | None = None
    activations: int | None = None
    events: tuple[PlanEvent, ...] = field(default=(), compare=False, repr=False)
    # On real tensors a kernel may ask for what fake ones do not, so trials are alike without it.
    trace: Trace | None = field(default=None, compare=False, repr=False)
    buckets: int = 0

    @property
    def peak(self) -> int | None:
        """The most bytes that tensors take at once, temporaries included, in an update that is not the first: what the optimizer
        makes at the end of the first is there from the beginning."""
        if self.trace is None:
            return None
        held = most = 0
        for index, event in enumerate(told_apart(self.trace.events)[0]):
            held += event.num_bytes
            later = self.optimizer_state or 0 if index < self.trace.phases["update"] else 0
            most = max(most, held + later)
        return most + self.buckets


def dry_run_rank(
    make: Callable[[], nn.Module],
    layout: Layout,
    rank: int,
    step: Step | None,
    make_optimizer: MakeOptimizer | None,
    precision: str = "no",
    options: EngineOptions | None = None,
    machine_ranks: int = 8,
    told: PeerAnswer | None = None,
    device: Device | None = None,
) -> StepDryRun:
    """Prepare a model without memory as one rank of the layout, and run one update of it in which nothing is computed.

    Args:
        make: makes the model; called where parameters take no memory.
        layout: of the whole run.
        rank: which of its ranks.
        step: None: the model is prepared only.
        make_optimizer: None: no update, gradients only.
        precision: "no", "bf16" or "fp16".
        options: of the engines.
        machine_ranks: ranks on one machine.
        told: by the other ranks of a pipeline.
        device: whose kernels are counted; None: a CPU's.
    """
    device = device or find("cpu")
    with init_empty_weights(include_buffers=True):
        model = make()
    options, fake = options or EngineOptions(), FakeTensorMode(allow_non_fake_inputs=True)
    fill(model, fake)
    # Outside of the mode, in which the numbers of a mesh would have no values either.
    with as_rank(model, layout, rank, machine_ranks, precision, options, told) as strategy:
        drive = _drive(strategy, model, layout, options, step)
        modes: list[AbstractContextManager[Any]] = [substituted(device, precision), fake]
        modes.append(RealStaysReal())  # type: ignore[no-untyped-call]
        return run(model, layout, step, make_optimizer, precision, modes, drive, device)


def _drive(
    strategy: Strategy | None, model: nn.Module, layout: Layout, options: EngineOptions, step: Step | None
) -> StepDriver:
    if strategy is not None and layout.pp > 1:
        return Pipeline(strategy, (options.pipeline or PipelineOptions()).schedule, step)
    return CutSequences(strategy, model) if strategy is not None and layout.cp > 1 else StepDriver()


def run(
    model: nn.Module,
    layout: Layout,
    step: Step | None,
    make_optimizer: MakeOptimizer | None,
    precision: str = "no",
    within: Iterable[AbstractContextManager[Any]] = (),
    drive: StepDriver | None = None,
    device: Device | None = None,
) -> StepDryRun:
    """One update of a model that is prepared, and what it held and sent; real tensors give what fake ones do.

    Args:
        within: modes in which to run.
        drive: how the layout's strategy is driven; None: the model's own calls do everything.
        device: whose kernels are counted; None: a CPU's.
    """
    device = device or find("cpu")
    # What is on other stages of a pipeline is without memory.
    named = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    buffers = storage_bytes(buffer for buffer in model.buffers() if not buffer.is_meta)
    own = [*model.parameters(), *model.buffers()]
    cut, weights = tuple(pieces(named)), storage_bytes(parameter for _, parameter in named)
    if step is None:
        return StepDryRun(cut, buffers, weights)
    meter = StepMeter(layout)
    memory = StorageTracker(device)
    saved = ActivationMeter(meter, own, memory)
    optimizer, drive = None, drive or StepDriver()
    with ExitStack() as stack:
        for mode in within:
            stack.enter_context(mode)
        if make_optimizer is not None:
            optimizer = make_optimizer([parameter for _, parameter in named if parameter.requires_grad])
            if device.is_cuda:
                as_on_cuda(optimizer)
        forward = Forward(step, model, precision, saved)
        drive.warm_up(forward)
        saved.forget()
        with meter, memory:  # the inner one sees parts first: DTensors compute shapes on whole tensors
            memory.enter("forward")
            mark_model(model, memory)
            drive.update(forward, meter)
            meter.phase = "update"
            memory.enter("update")
            reduced = _reduced_by_ddp(model, layout)
            if reduced is not None:  # DDP's engine is C++ and runs on no fake tensors: it sends all gradients, once
                exchange = MeteredCollective("backward", "all_reduce", "replicate", layout.replicate)
                meter.volumes[exchange] = Volume(1, reduced, reduced)
            if optimizer is not None:
                _step(optimizer)
    gradients = storage_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    states = tuple(_state_of(parameter, optimizer) for _, parameter in named)
    held = zip((local(parameter).numel() for _, parameter in named), states)
    state = sum(size * kept.per_element + kept.fixed for size, kept in held)
    sent = meter.volumes, dict(meter.flops), saved.peak, tuple(meter.events)
    buckets = _reduced_by_ddp(model, layout) or 0  # DDP's reducer holds all gradients once more
    return StepDryRun(cut, buffers, weights, gradients, state, states, *sent, memory.trace(), buckets)


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot step in a plan of this layout: {said}. Plan with optimizer='adamw', or give a "
            "function that makes another optimizer"
        ) from error


def _reduced_by_ddp(model: nn.Module, layout: Layout) -> int | None:
    """Bytes of all gradients; None where there is no DDP."""
    if not layout.is_replicas_only or layout.replicate == 1:
        return None
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def _state_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> StateOf:
    held = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    tensors = [local(value) for value in held.values() if isinstance(value, torch.Tensor)]
    shape = local(parameter).shape
    alike = [tensor for tensor in tensors if tensor.shape == shape]
    return StateOf(
        sum(tensor.element_size() for tensor in alike),
        sum(tensor.nbytes for tensor in tensors if tensor.shape != shape),
    )


def dry_run_stages(layout: Layout, dry_run_rank: Callable[[int, PeerAnswer], StepDryRun]) -> tuple[StepDryRun, ...]:
    """Dry runs of the first replica's ranks along the pipeline, by their places.

    Args:
        layout: of the run.
        dry_run_rank: one rank, by its number in the run.

    Raises:
        StateError: ranks wait for each other for ever.
    """
    told, found = PeerAnswer(), dict[int, StepDryRun]()
    ranks = layout.groups("pp")[0]
    while len(found) < len(ranks):
        before = len(found), sum(map(len, told.answers))
        for place, rank in enumerate(ranks):
            if place not in found:
                try:
                    found[place] = dry_run_rank(rank, told)
                except AnswerNotReady:
                    continue
        if (len(found), sum(map(len, told.answers))) == before:
            raise StateError(f"the stages of a pipeline of {len(ranks)} ranks wait for each other in their dry runs")
    return tuple(found[place] for place in range(len(ranks)))


_COUNTS = ("buffers", "weights", "gradients", "optimizer_state", "activations", "buckets")


def treats_blocks_alike(options: EngineOptions) -> bool:
    """Do these options treat a block in the same way, however many there are?"""
    sharding, checkpointing = options.sharding, options.checkpointing
    if checkpointing is not None and checkpointing.every > 1:
        return False
    return sharding is None or (
        not sharding.min_num_params and sharding.forward_prefetch <= 1 and sharding.backward_prefetch <= 1
    )


def dry_run_repeated(
    make: Callable[[], nn.Module], dry_run: Callable[[Callable[[], nn.Module]], StepDryRun]
) -> StepDryRun | None:
    """The dry run of a whole model from those with a few of its blocks; None where none repeat, or these do not prove to be alike.

    Args:
        make: makes the model, where parameters take no memory.
        dry_run: of a model that is made so; it treats blocks alike.
    """
    with init_empty_weights(include_buffers=True):
        model = make()
    blocks = find_blocks(model)
    if blocks is None:
        return None
    found: dict[int, StepDryRun] = {}

    def trace(count: int) -> Trace:
        def shortened() -> nn.Module:
            model = make()
            blocks.shorten(model, count)
            return model

        found[count] = dry_run(shortened)
        made = found[count].trace
        assert made is not None
        return made

    traced = trace_repeated(trace, blocks.count)
    in_order = [_counts(found[count]) for count in sorted(found)]
    counts = None if traced is None else _carried_on(in_order, blocks.count - TRACED)
    first = found[min(found)]
    places = {piece.name: index for index, piece in enumerate(first.pieces)}
    names = [name for name, _ in model.named_parameters()]
    if counts is None or not all(blocks.first_alike(name) in places for name in names):
        return None
    from_places = [places[blocks.first_alike(name)] for name in names]
    assert first.volumes is not None
    assert first.flops is not None
    numbers: dict[str, Any] = {name: counts[name] for name in _COUNTS}
    return replace(
        first,
        pieces=tuple(replace(first.pieces[place], name=name) for name, place in zip(names, from_places)),
        states=tuple(first.states[place] for place in from_places) if first.states else (),
        volumes={key: Volume(*(counts[key, name] for name in asdict(Volume()))) for key in first.volumes},
        flops={phase: counts["flops", phase] for phase in first.flops},
        trace=traced,
        **numbers,
    )


def _counts(run: StepDryRun) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {name: getattr(run, name) for name in _COUNTS}
    found |= {("flops", phase): number for phase, number in (run.flops or {}).items()}
    for key, volume in (run.volumes or {}).items():
        found |= {(key, name): number for name, number in asdict(volume).items()}
    return found


def _carried_on(runs: Sequence[dict[Hashable, int]], ahead: int) -> dict[Hashable, int] | None:
    """All numbers so many steps after the first; None where one of the two known steps is another than the other."""
    first, second, third = runs
    if not first.keys() == second.keys() == third.keys():
        return None
    if any(third[key] - second[key] != second[key] - first[key] for key in first):
        return None
    return {key: first[key] + ahead * (second[key] - first[key]) for key in first}
