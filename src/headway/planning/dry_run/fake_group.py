"""Run one rank of any layout in this process alone, on a process group that sends nothing.

In most layouts, all ranks pass equal objects to a collective. Pipeline stages do not, because each sends the shapes of
its outputs to the next. So each pipeline rank has its own dry run, and reads the objects that earlier dry runs of other
ranks have stored. If an object is missing, the dry run is aborted, and repeated after the dry runs of the other ranks.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout
from headway.core.precision.mixed import halve_embeddings
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import CPU
from headway.core.runtime.group import MARGIN, create_group
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.build import build_strategy
from headway.core.training.prepared.model import attach_engine
from headway.errors import StateError
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device.kernels import make_grouped_product
from headway.layouts.whole_updates.transfers import Box
from headway.planning._torch import TorchDispatchMode, is_fake, tree_leaves, unset_fake_temporarily
from headway.planning.dry_run.boxes import RankBoxes


def require_no_group() -> None:
    """Raise StateError if this process has joined a process group, because no dry run is possible then."""
    if dist.is_initialized():
        raise StateError(
            "a plan, or a forecast of a layout, needs a process that has not joined a process group; call headway.plan() or "
            "headway.forecast() before you create an Accelerator, or run `headway plan` or `headway estimate`"
        )


@contextmanager
def join_fake_group(num_ranks: int, rank: int) -> Iterator[None]:
    """Return a context in which this process acts as rank `rank` of `num_ranks`.

    Within the context, collectives return immediately and transfer no data.

    Raises:
        StateError: If this process has already joined a process group. That group is not changed.
    """
    require_no_group()
    # This import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class SharedChunks(TorchFunctionMode):
    """Torch function mode that makes `torch.chunk` fast for any number of chunks if a tensor has no values.

    `fully_shard` splits each parameter twice into one chunk per rank, and uses only the chunk of this rank. With 16,384
    ranks, this takes nine tenths of the preparation time. Chunks of equal shape cannot be distinguished without values,
    so all of them are one shared tensor. The list still has one entry per rank, because `fully_shard` pads it with
    empty chunks.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.chunk and _has_no_values(args):
            return _make_chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class RealTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode for use within a fake mode. An operation whose inputs are all real returns real tensors.

    A fake mode alone would remove the values of all tensors, even of those whose values are needed, such as RNG states.
    All other operations run in the fake mode, including those without input tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(map(is_fake, tensors)):
            product = make_grouped_product(func, args)
            return func(*args, **kwargs) if product is None else product
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _has_no_values(args: tuple[Any, ...]) -> bool:
    return (
        bool(args) and isinstance(args[0], torch.Tensor) and (is_fake(args[0]) or args[0].is_meta) and args[0].dim() > 0
    )


def _make_chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    """Return the chunks that `torch.chunk` returns, followed by empty chunks up to the requested number.

    All chunks of equal shape are the same tensor object.
    """
    size = tensor.size(dim)
    length = -(-size // chunks)
    num_full, rest = divmod(size, length) if length else (0, 0)
    all_chunks = [tensor.narrow(dim, 0, length)] * num_full
    if rest:
        all_chunks.append(tensor.narrow(dim, size - rest, rest))
    return all_chunks + [tensor.narrow(dim, 0, 0)] * (chunks - len(all_chunks))


class FakeCollectives(Collectives):
    """Collectives of a dry run, in which only one rank exists.

    All other ranks are assumed to send the same data as this rank. Tensors have no values and stay unchanged.

    Attributes:
        boxes: Boxes of tensors on each rank of the layout. None in a subgroup.
    """

    boxes: RankBoxes | None = None

    def predict_boxes(self, tensors: Sequence[torch.Tensor]) -> list[list[list[Box]]]:
        """Return which parts of each tensor each rank holds.

        `result[rank][index]` lists the boxes of `tensors[index]` on a rank. A box is a pair of (first index, length),
        each a tuple with one number per dim.
        """
        assert self.boxes is not None
        return [list(each) for each in zip(*map(self.boxes.list_boxes, tensors))]

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return collectives over a group that contains only this rank.

        A group with other ranks is not needed, because preparing a model communicates nothing within a subgroup.
        """
        return FakeCollectives(self.runtime, is_alone=True)

    def gather_numbers(self, values: Sequence[float], operation: str = "numbers") -> list[list[float]]:
        """Return a list with a copy of this rank's values for every rank."""
        return [list(values)] * self.world_size

    def barrier(self) -> None:
        """Return immediately, because there are no other ranks."""

    def broadcast_into(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Do nothing, because tensors have no values."""

    def broadcast_in_place(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Do nothing, because tensors have no values."""

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing, because tensors have no values."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return a list with this rank's object for every rank."""
        return [obj] * self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return this rank's object. The object of rank `src` is assumed to be equal."""
        return obj


class ObjectNotReady(BaseException):
    """Raised to abort a dry run that needs an object which another pipeline rank has not stored yet.

    It is not an error. It derives from `BaseException` so that error handlers do not catch it.
    """


class PeerObjects:
    """Store of the objects that pipeline ranks pass to object collectives, shared by the dry runs of these ranks.

    Attributes:
        objects: For each collective in order, a dict with the object of each rank. All ranks call the collectives in
            the same order.
    """

    def __init__(self) -> None:
        self.objects: list[dict[int, Any]] = []

    @property
    def num_stored(self) -> int:
        """Number of objects that are stored, over all collectives and ranks."""
        return sum(map(len, self.objects))

    def share_object(self, number: int, rank: int, obj: Any, num_ranks: int) -> list[Any]:
        """Store this rank's object for a collective, and return the list of all ranks' objects.

        Reading an object from the list raises ObjectNotReady if its rank has not stored it yet.

        Args:
            number: 0-based index of the collective among those that each rank calls.
            rank: This rank.
            obj: Object to store.
            num_ranks: Number of ranks in the collective.
        """
        if number == len(self.objects):
            self.objects.append({})
        by_rank = self.objects[number]
        by_rank[rank] = obj
        return _GatheredObjects(by_rank.get(each, _NOT_STORED) for each in range(num_ranks))


_NOT_STORED = object()
"""Placeholder for the object of a rank that has not stored one yet. None is an object that a rank can store."""


class _GatheredObjects(list[Any]):
    """List of the objects that the ranks have passed to one collective.

    Reading the object of a rank that has not stored one yet raises ObjectNotReady.
    """

    def __getitem__(self, rank: Any) -> Any:
        obj = super().__getitem__(rank)
        if obj is _NOT_STORED:
            raise ObjectNotReady
        return obj

    def __iter__(self) -> Any:
        return (self[rank] for rank in range(len(self)))


class FakeStageGroup(FakeCollectives):
    """Collectives over all ranks, for the dry run of one pipeline stage.

    Collectives over a subgroup use a process group that sends nothing.

    Args:
        runtime: Runtime of the rank.
        peer_objects: Objects stored by earlier dry runs.
    """

    def __init__(self, runtime: ProcessRuntime, peer_objects: PeerObjects) -> None:
        super().__init__(runtime)
        self._peer_objects = peer_objects

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return the collectives of the subgroup that contains this rank.

        Process groups are not created for the other subgroups.
        """
        own = next(list(ranks) for ranks in groups if self.runtime.rank in ranks)
        if len(own) == 1:
            return FakeCollectives(self.runtime, is_alone=True)
        group = create_group(own, self.runtime.timeout + MARGIN) if len(own) < self.world_size else None
        return StageLink(self.runtime, group, self._peer_objects)


class StageLink(FakeCollectives):
    """Collectives over a subgroup of the ranks, for the dry run of one pipeline stage.

    Tensors are passed to the process group, so that their bytes are counted. Objects are read from earlier dry runs.

    Args:
        runtime: Runtime of the rank.
        group: Process group of the subgroup, or None for all ranks.
        peer_objects: Objects stored by earlier dry runs.
    """

    def __init__(self, runtime: ProcessRuntime, group: dist.ProcessGroup | None, peer_objects: PeerObjects) -> None:
        super().__init__(runtime, group)
        self._peer_objects = peer_objects
        self._num_collectives = 0

    sum_in_place = Collectives.sum_in_place
    broadcast_in_place = Collectives.broadcast_in_place

    def broadcast_into(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Broadcast tensors in place from rank `src`, without the handshake that checks their shapes."""
        self.broadcast_in_place(tensors, src)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Store this rank's object, and return a list of all ranks' objects for this collective.

        Reading an object from the list raises ObjectNotReady if its rank has not stored it yet.
        """
        number = self._num_collectives
        self._num_collectives += 1
        return self._peer_objects.share_object(number, self.rank, obj, self.world_size)


@contextmanager
def run_as_rank(
    model: nn.Module,
    layout: Layout,
    rank: int,
    machine_ranks: int,
    precision: str,
    options: EngineOptions,
    peer_objects: PeerObjects | None = None,
    device_type: str = "cpu",
) -> Iterator[Strategy | None]:
    """Return a context in which this process is one rank of a run, and the model is distributed over all ranks.

    The context yields the layout's strategy, or None for replicas. Replicas have no strategy, because DDP's engine
    would read tensor values.

    Args:
        model: Model of fake tensors.
        layout: Layout of the run.
        rank: Rank to run as.
        machine_ranks: Ranks per machine.
        precision: "no", "bf16" or "fp16".
        options: Options of the engines.
        peer_objects: Objects stored by the dry runs of other pipeline ranks, or None for a layout without pipeline
            stages.
        device_type: Device type of the ranks in the real run.

    Raises:
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout is not supported.
    """
    num_ranks, strategy = layout.num_ranks, None
    with join_fake_group(num_ranks, rank):
        if not layout.is_replicas_only:
            machine = rank % machine_ranks, min(machine_ranks, num_ranks)
            here = ProcessRuntime(rank, num_ranks, *machine, CPU, torch.device("cpu"), owns_group=False)
            everyone = FakeCollectives(here) if peer_objects is None else FakeStageGroup(here, peer_objects)
            everyone.boxes = RankBoxes(layout)
            strategy = build_strategy(everyone, options, layout, precision, device_type=device_type)
        spread_model(model, strategy, options, device_type)
        try:
            yield strategy
        finally:
            if strategy is not None:
                strategy.release_model()
            del strategy
            gc.collect()  # engines and models form reference cycles, which would stay in memory with the next model


def spread_model(model: nn.Module, strategy: Strategy | None, options: EngineOptions, device_type: str = "cpu") -> None:
    """Transform and shard the model in place, in the same way as `prepare`.

    Args:
        model: Model of fake tensors.
        strategy: Strategy that shards the model, or None to leave it unsharded.
        options: Options of the engines.
        device_type: Device type of the ranks in the real run.

    Raises:
        PrepareError: If the model cannot be sharded.
    """
    transforms: list[Callable[[nn.Module], Any]] = [halve_embeddings] if options.autocast.half_residual else []
    if options.checkpointing is not None:
        device = torch.device(device_type)
        transforms.append(partial(checkpoint_activations, plan=options.checkpointing, device=device))
    if strategy is None:
        for transform in transforms:
            transform(model)
        return
    with SharedChunks():
        engine = strategy.setup_model(model, transforms)
    attach_engine(model, engine, None)
