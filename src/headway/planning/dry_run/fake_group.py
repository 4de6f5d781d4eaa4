"""One rank of a run of any size, in this process alone: a model spread over a process group in which nothing is sent.

In most layouts every rank would say what this one says. The stages of a pipeline tell each other what they hand on: each rank
has its dry run by itself, and hears what the others have told before. Where it needs to know what has not been told yet, its dry run
is broken off, and comes again after the others.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config.engines import EngineOptions
from headway.config.mesh import Layout
from headway.errors import StateError
from headway.precision.mixed import halve_embeddings
from headway.runtime.collectives.checked import Collectives
from headway.runtime.device import CPU
from headway.runtime.group import MARGIN, part
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.strategies.build import build_strategy
from headway.training.prepared.model import attach
from headway.training.transforms.activation_checkpointing import checkpoint_activations


@contextmanager
def pretend(num_ranks: int, rank: int) -> Iterator[None]:
    """A block in which this process is one rank of so many; collectives return at once, with nothing in them.

    Raises:
        StateError: this process has a group of its own, which is not touched.
    """
    if dist.is_initialized():
        raise StateError(
            "a plan, or a forecast of a layout, needs a process that has not joined a process group; call headway.plan() or "
            "headway.forecast() before you create an Accelerator, or run `headway plan` or `headway estimate`"
        )
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OneOfEach(TorchFunctionMode):
    """torch.chunk of a tensor without values, in a time that does not grow with the number of chunks.

    `fully_shard` cuts each parameter into one chunk for each rank, twice, and takes the chunk of this rank: with 16,384 ranks that
    is nine tenths of a preparation. Chunks of one shape have nothing else to tell them apart on the meta device, so one tensor
    stands for all of them (nor do fake ones). The list is as long as there are ranks, as `fully_shard` makes it by adding empty ones.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.chunk and _has_no_values(args):
            return _chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class RealStaysReal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within a fake mode: what is made of real tensors alone is real.

    A fake mode alone takes the values of all tensors, also of those that are no part of the model and whose values are read, such as
    the state of random streams.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(map(is_fake, tensors)):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _has_no_values(args: tuple[Any, ...]) -> bool:
    return (
        bool(args) and isinstance(args[0], torch.Tensor) and (is_fake(args[0]) or args[0].is_meta) and args[0].dim() > 0
    )


def _chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    size = tensor.size(dim)
    length = -(-size // chunks)
    whole, rest = divmod(size, length) if length else (0, 0)
    found = [tensor.narrow(dim, 0, length)] * whole
    if rest:
        found.append(tensor.narrow(dim, size - rest, rest))
    return found + [tensor.narrow(dim, 0, 0)] * (chunks - len(found))


class FakeCollectives(Collectives):
    """Exchanges of a rank whose peers are not there: each of them would say what this one says, and values are nowhere."""

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """This rank alone: nobody asks its part anything in a preparation."""
        return FakeCollectives(self.runtime, is_alone=True)

    def gather_numbers(self, values: Sequence[float], operation: str = "numbers") -> list[list[float]]:
        """These, for every rank."""
        return [list(values)] * self.world_size

    def barrier(self) -> None:
        """Nobody is waited for."""

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def broadcast_in_place(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def sum_in_place(self, found: Sequence[torch.Tensor]) -> None:
        """Nothing travels."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """This one, for every rank."""
        return [obj] * self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """This one."""
        return obj


class AnswerNotReady(BaseException):
    """A rank waits for what another one has not told. No error: whoever handles errors must let it pass."""


class PeerAnswer:
    """What the ranks of a pipeline have told each other in their dry runs.

    Attributes:
        answers: by the number of the exchange, which is alike on all ranks, and the rank.
    """

    def __init__(self) -> None:
        self.answers: list[dict[int, Any]] = []

    def tell(self, number: int, rank: int, obj: Any, num_ranks: int) -> list[Any]:
        """Tell something, and hear what all ranks have told.

        Raises:
            NotYet: another rank, whose answer is read, has not come so far.
        """
        if number == len(self.answers):
            self.answers.append({})
        known = self.answers[number]
        known[rank] = obj
        return _Answers(known.get(each) for each in range(num_ranks))


class _Answers(list[Any]):
    """Answers by rank; one that is not there must not be read."""

    def __getitem__(self, rank: Any) -> Any:
        found = super().__getitem__(rank)
        if found is None:
            raise AnswerNotReady
        return found

    def __iter__(self) -> Any:
        return (self[rank] for rank in range(len(self)))


class FakeStageGroup(FakeCollectives):
    """All ranks, of which one has a dry run; the parts that it is in have groups, in which nothing is sent.

    Args:
        runtime: of the rank.
        told: by the ranks that had their dry runs before.
    """

    def __init__(self, runtime: ProcessRuntime, told: PeerAnswer) -> None:
        super().__init__(runtime)
        self._told = told

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """The part that this rank is in; no other group is made."""
        own = next(list(ranks) for ranks in groups if self.runtime.rank in ranks)
        if len(own) == 1:
            return FakeCollectives(self.runtime, is_alone=True)
        group = part(own, self.runtime.timeout + MARGIN) if len(own) < self.world_size else None
        return StageLink(self.runtime, group, self._told)


class StageLink(FakeCollectives):
    """A part of all ranks. Tensors are handed to its group, where they are counted; objects come from what was told.

    Args:
        runtime: of the rank.
        group: of the part; None: all ranks.
        told: by the ranks that had their dry runs before.
    """

    def __init__(self, runtime: ProcessRuntime, group: dist.ProcessGroup | None, told: PeerAnswer) -> None:
        super().__init__(runtime, group)
        self._told, self._number = told, 0

    sum_in_place = Collectives.sum_in_place
    broadcast_in_place = Collectives.broadcast_in_place

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Without a handshake."""
        self.broadcast_in_place(found, src)

    def gather_objects(self, obj: Any) -> list[Any]:
        """What the ranks have told at this place."""
        number, self._number = self._number, self._number + 1
        return self._told.tell(number, self.rank, obj, self.world_size)


@contextmanager
def as_rank(
    model: nn.Module,
    layout: Layout,
    rank: int,
    machine_ranks: int,
    precision: str,
    options: EngineOptions,
    told: PeerAnswer | None = None,
    computes_on: str = "cpu",
) -> Iterator[Strategy | None]:
    """A block in which this process is one rank of a run, and the model is spread over all of them.

    Gives the layout's strategy; None for replicas: DDP's engine reads values.

    Args:
        model: of fake tensors.
        layout: of the run.
        rank: which of its ranks.
        machine_ranks: ranks on one machine.
        precision: "no", "bf16" or "fp16".
        options: of the engines.
        told: by the other ranks of a pipeline.
        computes_on: the type of the device that the real ranks have.

    Raises:
        PrepareError: a model that cannot be sharded.
        StateError: this process has a group of its own.
        UnsupportedError: a layout that is not there yet.
    """
    num_ranks, strategy = layout.num_ranks, None
    with pretend(num_ranks, rank):
        if not layout.is_replicas_only:
            machine = rank % machine_ranks, min(machine_ranks, num_ranks)
            here = ProcessRuntime(rank, num_ranks, *machine, CPU, torch.device("cpu"), owns_group=False)
            everyone = FakeCollectives(here) if told is None else FakeStageGroup(here, told)
            strategy = build_strategy(everyone, options, layout, precision, computes_on=computes_on)
        spread(model, strategy, options, computes_on)
        try:
            yield strategy
        finally:
            if strategy is not None:
                strategy.release()
            del strategy
            gc.collect()  # engines hold their models in circles, and the next model would come on top


def spread(model: nn.Module, strategy: Strategy | None, options: EngineOptions, computes_on: str = "cpu") -> None:
    """Shard the model in place, as `prepare` does.

    Args:
        model: of fake tensors.
        strategy: None leaves it whole.
        options: of the engines.
        computes_on: the type of the device that the real ranks have.

    Raises:
        PrepareError: a model that cannot be sharded.
    """
    transforms: list[Callable[[nn.Module], Any]] = [halve_embeddings] if options.autocast.half_residual else []
    if options.checkpointing is not None:
        device = torch.device(computes_on)
        transforms.append(partial(checkpoint_activations, plan=options.checkpointing, device=device))
    if strategy is None:
        for transform in transforms:
            transform(model)
        return
    with OneOfEach():
        engine = strategy.setup(model, transforms)
    attach(model, engine, None)
