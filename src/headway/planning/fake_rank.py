"""Trace a training step as one rank of a layout, for a memory forecast.

The model is prepared as in a run, but on a process group that sends nothing. Activations that are offloaded to host
memory do not count as memory of the traced device, except for the one that is being copied.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout, parse_layout
from headway.core.config.torch_kwargs import DDPCommunicationHookType
from headway.core.config.values import check_count
from headway.core.strategies.base import Strategy
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.errors import UnsupportedError
from headway.forecasting.tracing.buckets import make_replica
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.engine import StepEngine
from headway.planning.dry_run.fake_group import distribute_model, refuse_parameter_offload, run_as_rank
from headway.planning.dry_run.tensor_modes import RealTensorMode
from headway.planning.dry_run.updates import DryRunUpdates
from headway.planning.traced_offload import offloads_activations, trace_offloading

_OFFLOAD_CAVEAT = (
    "activations in host memory: one copy under way is counted; if copies are slower than the computation, more of them are on the "
    "device at once"
)
"""Caveat of forecasts with activations that are offloaded to host memory."""


class ShardedEngine(StepEngine):
    """Engine that traces the steps of a model whose parameters are sharded over ranks.

    Args:
        model: Prepared model.
        strategy: Strategy that has prepared the model.
        options: Options of the engines.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, options: EngineOptions) -> None:
        super().__init__(model)
        self._strategy = strategy
        self._updates = DryRunUpdates(strategy, options)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def make_modes(self) -> Iterable[AbstractContextManager[Any]]:
        """Return a list with the dispatch mode in which real tensors, such as a mesh's ranks, keep their values."""
        return [RealTensorMode()]  # type: ignore[no-untyped-call]

    def run_micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the strategy's context for a micro-batch.

        Gradients stay unsharded on each rank in all micro-batches of an accumulation window except the last.

        Args:
            is_last: Whether the micro-batch is the last of its accumulation window.
        """
        return self._strategy.micro_batch_context(self.model, is_last)

    def list_gradients(self) -> list[torch.Tensor]:
        """Return the local shards of the reduced gradients, and the gradients that are not reduced yet.

        Gradients stay unsharded until they are reduced at the end of the accumulation window.
        """
        grads = [parameter.grad for parameter in self._parameters]
        for record in fsdp_state.iterate_records(self.model):
            grads.append(record.unsharded_accumulated_grad)
            gathered = fsdp_state.get_gathered_parameter(record)
            if gathered is not None:
                grads.append(gathered.grad)
        return [get_local_shard(grad) for grad in grads if grad is not None]

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the strategy check an optimizer, and decide how the optimizer updates parameters, as `prepare` does.

        Raises:
            UnsupportedError: If the optimizer cannot train a sharded model.
        """
        self._updates.adopt_optimizer(optimizer)

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Make an update with the strategy's own code, which gathers parameters for optimizers that read whole ones.

        Args:
            optimizer: Optimizer to step.
            closure: Closure of the step, or None. Default: None.
        """
        self._updates.step_optimizer(optimizer, closure)

    def clip_gradients(self, max_norm: float) -> None:
        """Clip the gradients by their total L2 norm over all ranks."""
        self._strategy.clip_gradients(self._parameters, max_norm, 2.0)


@dataclass(frozen=True)
class FakeRank:
    """Rank of a layout on which a step is traced for a forecast.

    No other rank needs more memory. If the optimizer reads whole parameters, this is the rank that needs the most memory
    for updates. Otherwise it is rank 0, because uneven sharding gives the last ranks smaller shards.

    Attributes:
        strategy: Name of the layout as the user gave it.
        layout: Layout of all ranks.
        options: Options of the engines.
        precision: "no", "bf16" or "fp16".
        machine_ranks: Ranks per machine.
        device_type: Type of the device to forecast for: "cuda" or "cpu".
        rank: Number of the rank.
    """

    strategy: str
    layout: Layout
    options: EngineOptions
    precision: str
    machine_ranks: int
    device_type: str
    rank: int = 0

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[StepEngine]:
        """Return a context in which the model is distributed over the ranks.

        The context yields the engine that runs the model's steps.

        Raises:
            PrepareError: If the model cannot be sharded.
            StateError: If the layout shards the model and this process has joined a process group.
            UnsupportedError: If there are several ranks and `torch.compile` has compiled the model or a submodule.
        """
        if self.layout.num_ranks > 1:
            refuse_compiled(model)
        with trace_offloading(self.options), self._distribute_model(model) as engine:
            yield engine

    @contextmanager
    def _distribute_model(self, model: nn.Module) -> Iterator[StepEngine]:
        """Return a context in which a model is distributed as on this rank. It yields the engine that runs the model.

        Args:
            model: Model without values, which is changed in place.
        """
        if self.layout.is_replicas_only:
            distribute_model(model, None, self.options, self.device_type)
            yield StepEngine(model) if self.layout.num_ranks == 1 else make_replica(model, self.options.ddp)
            return
        with run_as_rank(
            model,
            self.layout,
            rank=self.rank,
            machine_ranks=self.machine_ranks,
            precision=self.precision,
            options=self.options,
            device_type=self.device_type,
        ) as strategy:
            assert strategy is not None
            yield ShardedEngine(model, strategy, self.options)

    def list_caveats(self) -> list[str]:
        """Return the assumptions of a forecast for this layout, as sentences."""
        caveats = [_OFFLOAD_CAVEAT] if offloads_activations(self.options) else []
        if self.layout.num_ranks == 1:
            return caveats
        caveats += [
            f"for rank {self.rank:,} of {self.layout.num_ranks:,} ({self.strategy}); other ranks use as much or less"
        ]
        if self.layout.ep > 1:
            caveats.append(
                "ep: tokens are spread evenly over the experts here; in a run, a rank that is sent more of them takes more"
            )
        if self.device_type != "cpu":
            caveats.append("NCCL's own buffers are not counted")
        hooks = (self.options.ddp.comm_hook, self.options.ddp.comm_wrapper)
        if self.layout.is_replicas_only and any(hook is not DDPCommunicationHookType.NO for hook in hooks):
            caveats.append("what DDP's communication hook needs besides the buckets is not counted")
        return caveats


def make_fake_rank(
    strategy: str, num_ranks: int, options: EngineOptions, precision: str, machine_ranks: int, device_type: str
) -> FakeRank:
    """Return rank 0 of a layout, on which a step is traced for a forecast. No process group is created yet.

    Args:
        strategy: Layout, such as "fsdp" or "hsdp=8".
        num_ranks: World size.
        options: Options of the engines.
        precision: "no", "bf16" or "fp16".
        machine_ranks: Ranks per machine.
        device_type: Type of the device to forecast for: "cuda" or "cpu".

    Raises:
        ConfigError: If the layout's sizes do not divide the ranks, or a number is invalid.
        UnsupportedError: If the layout is DeepSpeed's, splits the model into pipeline stages or splits sequences
            (context parallelism). Also if parameters are offloaded to host memory.
    """
    check_count(ranks=num_ranks, machine_ranks=machine_ranks)
    requested = parse_layout(strategy)
    if requested.is_deepspeed:
        raise UnsupportedError(
            f"strategy={strategy!r} is DeepSpeed's engine, which cannot be forecast; fsdp shards what zero3 does, and can be"
        )
    layout = requested.resolve(num_ranks, min(machine_ranks, num_ranks))
    for axis, what in (("pp", "pipeline stages"), ("cp", "parts of a sequence")):
        if getattr(layout, axis) > 1:
            raise UnsupportedError(
                f"strategy={strategy!r}: {what} cannot be forecast yet; leave {axis} out, or use `headway plan`"
            )
    refuse_parameter_offload(options)
    return FakeRank(strategy, layout, options, precision, machine_ranks, device_type)
