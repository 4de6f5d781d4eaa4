"""Data parallelism without DDP: replicas compute independently, and gradients are reduced once, in fixed buckets.

This strategy serves automatic micro-batching. Ranks do not communicate while micro-batches are computed, so a rank that
runs out of memory leaves no peer waiting in a collective. Unlike DDP, this strategy does not overlap reductions with
backward; `benchmarks/microbatching` measures the cost.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from headway.core.config.torch_kwargs import DDPCommunicationHookType, DistributedDataParallelKwargs
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.transferable import make_transferable
from headway.core.strategies._torch import foreach_copy_, foreach_div_
from headway.core.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.errors import PrepareError, UnsupportedError

_DIRECT_BYTES = 1 << 20
"""Size in bytes from which a tensor is reduced directly. Smaller tensors are copied into buckets."""
_BUCKET_BYTES = 25 << 20


class ReplicaStrategy(Strategy):
    """Strategy with a full replica of the model on each rank.

    Gradients are reduced after the last micro-batch of a batch.

    Args:
        collectives: Collectives over all ranks.
        options: Options of DDP. Only `broadcast_buffers` is used.

    Raises:
        UnsupportedError: If the options request a communication hook.
    """

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

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Apply the transforms, and broadcast rank 0's values to all ranks.

        Raises:
            PrepareError: If the model contains SyncBatchNorm, whose forward is a collective.
            CollectiveError: If ranks hold models of different shapes.
        """
        super().setup_model(model, transforms)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise PrepareError(
                    f"{type(model).__name__} contains SyncBatchNorm at {name!r}: its forward is a collective, and a rank that ran "
                    "out of memory would leave the others waiting in it. Use BatchNorm, or leave microbatching off"
                )
        with torch.no_grad():
            # Broadcast in place: a second copy of the model may not fit.
            self.everyone.broadcast_into([*model.parameters(), *model.buffers()])
        self._models.append(model)
        return None

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward. Gradients are scaled so that their sum over the ranks is the average."""
        super().backward(loss, factor / self.data_shard.count, precision, **kwargs)

    def list_replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield pairs of (name, parameter) for all parameters of the models."""
        return (pair for model in self._models for pair in model.named_parameters())

    def prepare_reduction(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate all memory that `reduce_gradients` needs. Parameters without a gradient get a zero gradient.

        Returns:
            Number of parameters without a gradient on this rank.

        Raises:
            UnsupportedError: If a gradient is sparse.
        """
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
            ("buffers", self._list_buffers()),
        ):
            self._get_buckets(name, tensors).reserve(tensors)
        return self._flags.count(False)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Sum gradients over the ranks, and broadcast rank 0's buffers (such as running statistics).

        Call `prepare_reduction` first. If no rank had a gradient for a parameter then, its `grad` is None afterwards.
        Buffers of models in evaluation mode are not broadcast.
        """
        with torch.no_grad():
            absent: list[torch.nn.Parameter] = []
            if has_gaps:
                flags = torch.tensor(self._flags, dtype=torch.float32)
                self.everyone.sum_in_place([flags])
                absent = [parameter for parameter, flag in zip(parameters, flags.tolist()) if not flag]
            # Use the buckets that `prepare_reduction` allocated. Allocating new ones here, after the vote, might fail.
            grads = [p.grad for p in parameters if p.grad is not None]
            self._exchange_buckets("gradients", grads, self.everyone.sum_in_place, {id(p.grad) for p in absent})
            for parameter in absent:
                parameter.grad = None
            self._exchange_buckets("buffers", self._list_buffers(), self.everyone.broadcast_in_place)

    def _list_buffers(self) -> list[torch.Tensor]:
        if not self._broadcasts:
            return []
        models = (model for model in self._models if model.training)
        return make_transferable(buffer for model in models for buffer in model.buffers() if buffer.numel())

    def _get_buckets(self, name: str, tensors: list[torch.Tensor]) -> "GradientBuckets":
        """Return the buckets for tensors of these shapes and dtypes. They are kept for later calls with this `name`."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        known = self._buckets.get(name)
        if known is None or known[0] != shapes:
            known = self._buckets[name] = shapes, GradientBuckets(tensors)
        return known[1]

    def _exchange_buckets(
        self,
        name: str,
        tensors: list[torch.Tensor],
        exchange: Callable[[list[torch.Tensor]], None],
        absent: Container[int] = (),
    ) -> None:
        if tensors:
            buckets = self._get_buckets(name, tensors)
            exchange(buckets.pack(tensors, absent))
            buckets.unpack(tensors)

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release one model, or all models if `model` is None. The gradient buckets are freed, too."""
        super().release_model()
        self._models = [] if model is None else [each for each in self._models if each is not model]
        self._buckets.clear()


class GradientBuckets:
    """Flat buffers into which small tensors of one dtype and device are packed. Large tensors are sent directly.

    The layout depends only on sizes, dtypes and order of the tensors, so it is equal on all ranks.

    Args:
        like: Tensors with the shapes, dtypes and devices of the tensors that will be sent.
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
            for part in _divide_into_buckets(members, like):
                flat = torch.empty(sum(like[i].numel() for i in part), dtype=dtype, device=device)
                pieces = torch.split(flat, [like[i].numel() for i in part])
                self._packed.append((flat, part, [piece.view(like[i].shape) for piece, i in zip(pieces, part)]))

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate the memory that `pack` needs in addition to the flat buffers. `unpack` frees it.

        Args:
            tensors: Tensors that will be packed.
        """
        for i in self._direct:
            # A tensor whose memory order differs from the peers' would mix up elements, so it is copied.
            if not tensors[i].is_contiguous() and i not in self._copies:
                self._copies[i] = torch.empty_like(tensors[i], memory_format=torch.contiguous_format)

    def pack(self, tensors: Sequence[torch.Tensor], absent: Container[int] = ()) -> list[torch.Tensor]:
        """Copy tensors into the buckets, and return the tensors to send.

        Args:
            tensors: Tensors whose shapes equal those passed to the constructor.
            absent: IDs of tensors that no rank needs. Large ones among them are not sent.
        """
        for _, part, views in self._packed:
            foreach_copy_(views, [tensors[i] for i in part])
        self.reserve(tensors)
        self._copies = {i: self._copies[i].copy_(tensors[i]) for i in self._direct if not tensors[i].is_contiguous()}
        needed = [i for i in self._direct if id(tensors[i]) not in absent]
        return [flat for flat, _, _ in self._packed] + [self._copies.get(i, tensors[i]).view(-1) for i in needed]

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy received values from the buckets back into the tensors."""
        for _, part, views in self._packed:
            foreach_copy_([tensors[i] for i in part], views)
        for index, copy in self._copies.items():
            tensors[index].copy_(copy)
        self._copies = {}


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.nn.Parameter], group: Collectives) -> None:
    """Average gradients over the ranks of a group. If no rank has a gradient for a parameter, its `grad` stays None."""
    flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    group.sum_in_place([flags])
    learning = [parameter for parameter, flag in zip(parameters, flags.tolist()) if flag]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in learning if parameter.grad is not None]
    if grads:
        foreach_div_(grads, group.world_size)
        buckets = GradientBuckets(grads)
        group.sum_in_place(buckets.pack(grads))
        buckets.unpack(grads)


def _divide_into_buckets(members: list[int], like: Sequence[torch.Tensor]) -> list[list[int]]:
    """Divide indices of tensors into one list for each bucket of at most 25 MiB.

    Args:
        members: Indices of the tensors to divide.
        like: All tensors.
    """
    portions: list[list[int]] = [[]]
    size = 0
    for index in members:
        if portions[-1] and size + like[index].nbytes > _BUCKET_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(index)
        size += like[index].nbytes
    return portions
