"""A step on one rank of a layout, for a forecast: the real preparation on a process group in which nothing is sent.

Activations that go to host memory are gone from the traced device, but for the copy under way.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from headway.config.engines import DDPCommunicationHookType, EngineOptions
from headway.config.mesh import Layout, parse
from headway.config.values import check_count
from headway.errors import UnsupportedError
from headway.forecasting.tracing.buckets import replica
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.step import StepEngine
from headway.planning.dry_run.fake_group import RealStaysReal, as_rank, spread
from headway.strategies.base import Strategy
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.strategies.fully_sharded.dtensors import local
from headway.training.transforms.activation_offload import CopyLane, Host, Names, Ways, pretending


class TracedLane(CopyLane):
    """Copies of tensors without values; those on the host are made where no trace sees them.

    The tensor that is being copied stays on the device until the next one is, or until something is fetched.

    Args:
        device: the one that stands for the card.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, has_stream=False)
        self._under_way: torch.Tensor | None = None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """A tensor of the same shape that takes nothing of the device."""
        assert isinstance(tensor, FakeTensor)
        with _disable_current_modes(), tensor.fake_mode:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._under_way = tensor
        return host, None

    def to_device(self, host: torch.Tensor | Host, ready: Any) -> torch.Tensor:
        """A tensor on the device again."""
        self._under_way = None
        assert isinstance(host, torch.Tensor)
        return host.clone()


class Numbers(Names):
    """Numbers of storages, each given once: where an address were held, a trace would not see the storage go."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._next = count()

    def of(self, storage: torch.UntypedStorage) -> int:
        """The storage's own number."""
        found = self._known.get(storage._cdata)
        if found is None or found[0]() is not storage:
            found = self._known[storage._cdata] = weakref.ref(storage), next(self._next)
        return found[1]

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Nothing: no number is given twice."""


def moved_to_host() -> AbstractContextManager[None]:
    """A block in which activations that are to be offloaded leave the traced device."""
    return pretending(Ways(TracedLane, FakeTensor, Numbers(), from_host=True))


_OFFLOADED = (
    "activations in host memory: one copy under way is counted; if copies are slower than the computation, more of them are on the "
    "device at once"
)


class ShardedEngine(StepEngine):
    """A model whose parameters are cut among ranks.

    Args:
        model: prepared.
        strategy: has prepared it.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        super().__init__(model)
        self._strategy = strategy
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def modes(self) -> Iterable[AbstractContextManager[Any]]:
        """The numbers of a mesh keep their values."""
        return [RealStaysReal()]  # type: ignore[no-untyped-call]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Where gradients stay local, each rank keeps all of them, whole."""
        return self._strategy.accumulate(self.model, is_last)

    def gradients(self) -> list[torch.Tensor]:
        """Parts, and what waits whole for the window's end."""
        found = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for record in gathered.records(self.model):
            whole = gathered.whole_parameter(record)
            for grad in (record.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if grad is not None:
                    found.append(local(grad))
        return found

    def clip(self, max_norm: float) -> None:
        """By the norm over all ranks."""
        self._strategy.clip(self._parameters, max_norm, 2.0)


@dataclass(frozen=True)
class FakeRank:
    """Rank 0 of a layout: no rank holds more, as uneven cuts leave the last ranks less.

    Attributes:
        text: as it was asked for.
        layout: of all ranks.
        options: of the engines.
        precision: "no", "bf16" or "fp16".
        machine_ranks: ranks on one machine.
        computes_on: the type of the device that the forecast is for.
    """

    text: str
    layout: Layout
    options: EngineOptions
    precision: str
    machine_ranks: int
    computes_on: str

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[StepEngine]:
        """A block in which the model is spread."""
        if self.layout.num_ranks > 1:
            refuse_compiled(model)
        with moved_to_host() if self._offloads else nullcontext(), self._spread(model) as engine:
            yield engine

    @contextmanager
    def _spread(self, model: nn.Module) -> Iterator[StepEngine]:
        if self.layout.is_replicas_only:
            spread(model, None, self.options, self.computes_on)
            yield StepEngine(model) if self.layout.num_ranks == 1 else replica(model, self.options.ddp)
            return
        parts = self.layout, 0, self.machine_ranks, self.precision, self.options
        with as_rank(model, *parts, computes_on=self.computes_on) as strategy:
            assert strategy is not None
            yield ShardedEngine(model, strategy)

    @property
    def _offloads(self) -> bool:
        """Do activations go to host memory?"""
        return self.options.checkpointing is not None and self.options.checkpointing.offload

    def caveats(self) -> list[str]:
        """What a forecast of this layout cannot vouch for."""
        found = [_OFFLOADED] if self._offloads else []
        if self.layout.num_ranks == 1:
            return found
        found += [f"for rank 0 of {self.layout.num_ranks:,} ({self.text}); other ranks hold as much or less"]
        if self.layout.ep > 1:
            found.append(
                "ep: tokens are spread evenly over the experts here; in a run, a rank that is sent more of them takes more"
            )
        if self.computes_on != "cpu":
            found.append("NCCL's own buffers are not counted")
        hooks = (self.options.ddp.comm_hook, self.options.ddp.comm_wrapper)
        if self.layout.is_replicas_only and any(hook is not DDPCommunicationHookType.NO for hook in hooks):
            found.append("what DDP's communication hook needs besides the buckets is not counted")
        return found


def placed(
    strategy: str, num_ranks: int, options: EngineOptions, precision: str, machine_ranks: int, computes_on: str
) -> FakeRank:
    """The place of a rank under a layout.

    Raises:
        ConfigError: the layout does not divide the ranks, or a number is wrong.
        UnsupportedError: a layout that cannot be forecast.
    """
    check_count(ranks=num_ranks, machine_ranks=machine_ranks)
    asked = parse(strategy)
    if asked.is_deepspeed:
        raise UnsupportedError(
            f"strategy={strategy!r} is DeepSpeed's engine, which cannot be forecast; fsdp shards what zero3 does, and can be"
        )
    layout = asked.resolve(num_ranks, min(machine_ranks, num_ranks))
    for axis, what in (("pp", "pipeline stages"), ("cp", "parts of a sequence")):
        if getattr(layout, axis) > 1:
            raise UnsupportedError(
                f"strategy={strategy!r}: {what} cannot be forecast yet; leave {axis} out, or use `headway plan`"
            )
    if options.sharding is not None and options.sharding.cpu_offload:
        raise UnsupportedError(
            "ShardingOptions(cpu_offload=True) cannot be forecast: a trace does not tell host memory from the device's; leave it out"
        )
    return FakeRank(strategy, layout, options, precision, machine_ranks, computes_on)
