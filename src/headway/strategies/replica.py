"""Data parallelism without an engine: replicas compute alone, and gradients are summed once, in fixed buckets.

For automatic micro-batching: nothing travels while pieces are computed, so that a rank which runs out of memory leaves
nobody waiting inside a collective. What DDP hides behind backward is not hidden here; `benchmarks/microbatching` has
the price.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from headway.config.engines import DDPCommunicationHookType, DistributedDataParallelKwargs
from headway.errors import PrepareError, UnsupportedError
from headway.precision.mixed import Precision
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import Capabilities, Engine, Strategy, Transform

_DIRECT_BYTES = 1 << 20
"""Tensors of this size travel where they lie; smaller ones are packed."""
_BUCKET_BYTES = 25 << 20


class ReplicaStrategy(Strategy):
    """A replica per process, whose gradients are reduced after the whole batch."""

    name = "ddp"
    capabilities = Capabilities(local_training=False)

    def __init__(self, collectives: Collectives, options: DistributedDataParallelKwargs) -> None:
        super().__init__(collectives)
        self.gradient_divisor = collectives.world_size
        self._broadcasts = options.broadcast_buffers
        self._buckets: dict[str, tuple[list[tuple[torch.Size, torch.dtype]], GradientBuckets]] = {}
        self._models: list[torch.nn.Module] = []
        self._flags: list[bool] = []
        chosen = (options.comm_hook, options.comm_wrapper)
        if any(hook is not DDPCommunicationHookType.NO for hook in chosen):
            raise UnsupportedError(
                "a communication hook belongs to DDP's reducer, which microbatching='auto' does not use; leave comm_hook "
                "and comm_wrapper out, or microbatching off"
            )

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Give all ranks rank 0's values.

        Raises:
            PrepareError: SyncBatchNorm, whose forward is a collective of its own.
            CollectiveError: ranks hold models of different shapes.
        """
        super().setup(model, transforms)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise PrepareError(
                    f"{type(model).__name__} holds SyncBatchNorm at {name!r}: its forward is a collective, and a rank that ran "
                    "out of memory would leave the others waiting in it. Use BatchNorm, or leave microbatching off"
                )
        with torch.no_grad():
            # Where they lie: a second copy of the model may not fit.
            self.everyone.broadcast_into([*model.parameters(), *model.buffers()])
        self._models.append(model)
        return None

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Add the gradient of this rank's part of the average."""
        super().backward(loss, factor / self.data_shard.count, precision, **kwargs)

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All parameters."""
        return (pair for model in self._models for pair in model.named_parameters())

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate all that `reduce_gradients` will need; returns how many parameters had no gradient."""
        self._flags = [parameter.grad is not None for parameter in parameters]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"a gradient of shape {tuple(parameter.shape)} is sparse, which cannot be reduced in buckets; build its layer "
                    "with sparse=False, or leave microbatching off"
                )
        for name, tensors in (
            ("gradients", [p.grad for p in parameters if p.grad is not None]),
            ("buffers", self._buffers()),
        ):
            self._plan(name, tensors).reserve(tensors)
        return self._flags.count(False)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Sum gradients over the ranks; give all ranks rank 0's buffers (e.g. running statistics).

        A parameter that has a gradient on no rank has none afterwards.
        """
        with torch.no_grad():
            absent: list[torch.nn.Parameter] = []
            if has_gaps:
                flags = torch.tensor(self._flags, dtype=torch.float32)
                self.everyone.sum_in_place([flags])
                absent = [parameter for parameter, flag in zip(parameters, flags.tolist()) if not flag]
            # In the plan that `ready` made: another one would be allocated here, after the vote.
            grads = [p.grad for p in parameters if p.grad is not None]
            self._travel("gradients", grads, self.everyone.sum_in_place, {id(p.grad) for p in absent})
            for parameter in absent:
                parameter.grad = None
            self._travel("buffers", self._buffers(), self.everyone.broadcast_in_place)

    def _buffers(self) -> list[torch.Tensor]:
        if not self._broadcasts:
            return []
        return [buffer for model in self._models if model.training for buffer in model.buffers() if buffer.numel()]

    def _plan(self, name: str, tensors: list[torch.Tensor]) -> "GradientBuckets":
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        known = self._buckets.get(name)
        if known is None or known[0] != shapes:
            known = self._buckets[name] = shapes, GradientBuckets(tensors)
        return known[1]

    def _travel(
        self,
        name: str,
        tensors: list[torch.Tensor],
        exchange: Callable[[list[torch.Tensor]], None],
        absent: Container[int] = (),
    ) -> None:
        if tensors:
            buckets = self._plan(name, tensors)
            exchange(buckets.pack(tensors, absent))
            buckets.unpack(tensors)

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Forget a model, or all, and the buckets."""
        super().release()
        self._models = [] if model is None else [each for each in self._models if each is not model]
        self._buckets.clear()


class GradientBuckets:
    """Packs small tensors of one kind into flat ones; large contiguous ones travel as they are.

    The plan depends on sizes, types and order alone, so it is the same on all ranks.

    Args:
        like: tensors of the shapes that will travel.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._packed: list[tuple[torch.Tensor, list[int], list[torch.Tensor]]] = []
        self._direct: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(like):
            if tensor.nbytes >= _DIRECT_BYTES:
                self._direct.append(index)
            else:
                kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in kinds.items():
            for part in _portions(members, like):
                flat = torch.empty(sum(like[i].numel() for i in part), dtype=dtype, device=device)
                pieces = torch.split(flat, [like[i].numel() for i in part])
                self._packed.append((flat, part, [piece.view(like[i].shape) for piece, i in zip(pieces, part)]))

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate what `pack` needs for these tensors beyond the flat ones; `unpack` gives it back."""
        for i in self._direct:
            # Another memory order than a peer's would mix elements up: such a tensor goes through a copy.
            if not tensors[i].is_contiguous() and i not in self._copies:
                self._copies[i] = torch.empty_like(tensors[i], memory_format=torch.contiguous_format)

    def pack(self, tensors: Sequence[torch.Tensor], absent: Container[int] = ()) -> list[torch.Tensor]:
        """What must travel.

        Args:
            tensors: of the shapes that were planned for.
            absent: ids of tensors that no rank needs; large ones among them stay here.
        """
        for _, part, views in self._packed:
            torch._foreach_copy_(views, [tensors[i] for i in part])
        self.reserve(tensors)
        self._copies = {i: self._copies[i].copy_(tensors[i]) for i in self._direct if not tensors[i].is_contiguous()}
        needed = [i for i in self._direct if id(tensors[i]) not in absent]
        return [flat for flat, _, _ in self._packed] + [self._copies.get(i, tensors[i]).view(-1) for i in needed]

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put what has travelled back."""
        for _, part, views in self._packed:
            torch._foreach_copy_([tensors[i] for i in part], views)
        for index, copy in self._copies.items():
            tensors[index].copy_(copy)
        self._copies = {}


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.nn.Parameter], group: Collectives) -> None:
    """Average gradients over a group's ranks; a parameter that has one on none of them gets none."""
    flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    group.sum_in_place([flags])
    learning = [parameter for parameter, flag in zip(parameters, flags.tolist()) if flag]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in learning if parameter.grad is not None]
    if grads:
        torch._foreach_div_(grads, group.world_size)
        buckets = GradientBuckets(grads)
        group.sum_in_place(buckets.pack(grads))
        buckets.unpack(grads)


def _portions(members: list[int], like: Sequence[torch.Tensor]) -> list[list[int]]:
    portions: list[list[int]] = [[]]
    size = 0
    for index in members:
        if portions[-1] and size + like[index].nbytes > _BUCKET_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(index)
        size += like[index].nbytes
    return portions
