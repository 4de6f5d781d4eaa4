"""One update of one rank: a model without memory prepared, called, and stepped on fake tensors; what it held and sent."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.config.engines import EngineOptions
from headway.config.mesh import Layout
from headway.config.parallelism import PipelineOptions
from headway.errors import UnsupportedError
from headway.forecasting.device.devices import Device, find
from headway.forecasting.device.kernels import substituted
from headway.forecasting.tracing.events import told_apart
from headway.forecasting.tracing.fake import fill
from headway.forecasting.tracing.step import MakeOptimizer, as_on_cuda, mark_model
from headway.forecasting.tracing.trace import StorageTracker, Trace
from headway.offload.placement.skeleton import init_empty_weights
from headway.planning.dry_run.drive import CutSequences, Forward, Pipeline, Step, StepDriver
from headway.planning.dry_run.fake_collectives import PeerAnswer
from headway.planning.dry_run.fake_group import RealStaysReal
from headway.planning.dry_run.meter import ActivationMeter, MeteredCollective, PlanEvent, StepMeter, Volume
from headway.planning.dry_run.preparation import as_rank
from headway.planning.shares import TensorShare, pieces, storage_bytes
from headway.strategies.base import Strategy
from headway.strategies.fully_sharded.dtensors import local


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
        peak: the most bytes that tensors took at once, temporaries included, in an update that is not the first.
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
    peak: int | None = field(default=None, compare=False)


def rehearse(
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
            _replicas(model, layout, meter)
            if optimizer is not None:
                _step(optimizer)
    gradients = storage_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    states = tuple(_state_of(parameter, optimizer) for _, parameter in named)
    state = sum(_state_bytes(parameter, held) for (_, parameter), held in zip(named, states))
    return StepDryRun(
        cut,
        buffers,
        weights,
        gradients,
        state,
        states,
        meter.volumes,
        dict(meter.flops),
        saved.peak,
        tuple(meter.events),
        _peak(memory.trace(), state) + _buckets(model, layout),
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot step in a plan of this layout: {said}. Plan with optimizer='adamw', or give a "
            "function that makes another optimizer"
        ) from error


def _peak(traced: Trace, state: int) -> int:
    """Of a later update: what the optimizer makes at the end of the first one is there from the beginning."""
    held = most = 0
    for index, event in enumerate(told_apart(traced.events)[0]):
        held += event.num_bytes
        most = max(most, held + (state if index < traced.phases["update"] else 0))
    return most


def _buckets(model: nn.Module, layout: Layout) -> int:
    """What DDP's reducer holds: all gradients once more."""
    if not layout.is_replicas_only or layout.replicate == 1:
        return 0
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def _replicas(model: nn.Module, layout: Layout, meter: StepMeter) -> None:
    """DDP's engine is C++ and runs on no fake tensors: what it sends is all gradients, once."""
    if not layout.is_replicas_only or layout.replicate == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    size = sum(gradient.nbytes for gradient in gradients)
    meter.volumes[MeteredCollective("backward", "all_reduce", "replicate", layout.replicate)] = Volume(1, size, size)


def _state_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> StateOf:
    held = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    tensors = [local(value) for value in held.values() if isinstance(value, torch.Tensor)]
    shape = local(parameter).shape
    alike = [tensor for tensor in tensors if tensor.shape == shape]
    return StateOf(
        sum(tensor.element_size() for tensor in alike),
        sum(tensor.nbytes for tensor in tensors if tensor.shape != shape),
    )


def _state_bytes(parameter: nn.Parameter, state: StateOf) -> int:
    return local(parameter).numel() * state.per_element + state.fixed
