"""Data parallelism without DDP: replicas compute independently, and gradients are reduced once, in fixed buckets.

This strategy serves automatic micro-batching. Ranks do not communicate while micro-batches are computed, so a rank that
runs out of memory leaves no peer waiting in a collective. Unlike DDP, this strategy does not overlap reductions with
backward; `benchmarks/microbatching` measures the cost.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from headway.core.config.torch_kwargs import DDPCommunicationHookType, DistributedDataParallelKwargs
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.transferable import make_transferable
from headway.core.strategies._torch import foreach_copy_, foreach_div_
from headway.core.strategies.base import Capabilities, Strategy, Transform
from headway.core.strategies.fully_sharded import dtensors
from headway.errors import PrepareError, UnsupportedError

_DIRECT_BYTES = 1 << 20
"""Size in bytes from which a tensor is reduced directly. Smaller tensors are copied into buckets."""
_BUCKET_BYTES = 25 << 20
"""Maximum size of a bucket in bytes. It is DDP's default."""


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
        self._broadcasts_buffers = options.broadcast_buffers
        self._buckets: dict[str, _CachedBuckets] = {}  # by the name of the exchange: "gradients" or "buffers"
        self._models: list[torch.nn.Module] = []
        # Whether this rank has a gradient for each parameter, as of the last `prepare_reduction`.
        self._has_gradient: list[bool] = []
        hooks = (options.comm_hook, options.comm_wrapper)
        if any(hook is not DDPCommunicationHookType.NO for hook in hooks):
            raise UnsupportedError(
                "a communication hook belongs to DDP's reducer, which microbatching='auto' does not use; leave comm_hook "
                "and comm_wrapper out, or microbatching off"
            )

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> None:
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

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run backward. Gradients are scaled so that their sum over the ranks is the average.

        Args:
            loss: Loss of the micro-batch.
            factor: Factor for the gradient.
            precision: Precision of the run, which scales the loss if it has a gradient scaler.
            **kwargs: Further arguments of `torch.autograd.backward`.
        """
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
        self._has_gradient = [parameter.grad is not None for parameter in parameters]
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
        return self._has_gradient.count(False)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Sum gradients over the ranks, and broadcast rank 0's buffers (such as running statistics).

        Call `prepare_reduction` first. If no rank had a gradient for a parameter then, its `grad` is None afterwards.
        Buffers of models in evaluation mode are not broadcast.
        """
        with torch.no_grad():
            unused: list[torch.nn.Parameter] = []
            if has_gaps:
                flags = torch.tensor(self._has_gradient, dtype=torch.float32)
                self.everyone.sum_in_place([flags])
                unused = [parameter for parameter, flag in zip(parameters, flags.tolist()) if not flag]
            # Use the buckets that `prepare_reduction` allocated. Allocating new ones here, after the vote, might fail.
            grads = [p.grad for p in parameters if p.grad is not None]
            self._exchange_buckets("gradients", grads, self.everyone.sum_in_place, {id(p.grad) for p in unused})
            for parameter in unused:
                parameter.grad = None
            self._exchange_buckets("buffers", self._list_buffers(), self.everyone.broadcast_in_place)

    def _list_buffers(self) -> list[torch.Tensor]:
        """Return the buffers of models in training mode that are broadcast, in a form that all backends can transfer."""
        if not self._broadcasts_buffers:
            return []
        models = (model for model in self._models if model.training)
        return make_transferable(buffer for model in models for buffer in model.buffers() if buffer.numel())

    def _get_buckets(self, name: str, tensors: list[torch.Tensor]) -> "GradientBuckets":
        """Return the buckets for tensors of these shapes and dtypes. They are kept for later calls with this `name`."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        cached = self._buckets.get(name)
        if cached is None or cached.shapes != shapes:
            cached = self._buckets[name] = _CachedBuckets(shapes, GradientBuckets(tensors))
        return cached.buckets

    def _exchange_buckets(
        self,
        name: str,
        tensors: list[torch.Tensor],
        exchange: Callable[[list[torch.Tensor]], None],
        unused: Container[int] = (),
    ) -> None:
        """Pack tensors into buckets, exchange the buckets, and copy the results back into the tensors.

        Args:
            name: Name of the exchange, under which buckets are kept for the next one.
            tensors: Tensors of this rank.
            exchange: Function that changes the buckets in place, such as a broadcast.
            unused: IDs of tensors that no rank needs, so that they need not be sent. Default: (), none.
        """
        if tensors:
            buckets = self._get_buckets(name, tensors)
            exchange(buckets.pack(tensors, unused))
            buckets.unpack(tensors)

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release one model, or all models if `model` is None. The gradient buckets are freed, too."""
        super().release_model()
        self._models = [] if model is None else [each for each in self._models if each is not model]
        self._buckets.clear()


class _Bucket(NamedTuple):
    """Flat buffer for small tensors of one dtype and device.

    Attributes:
        flat: The buffer.
        indices: Indices of the tensors that are packed into the buffer.
        views: Views of the buffer with the shapes of these tensors.
    """

    flat: torch.Tensor
    indices: list[int]
    views: list[torch.Tensor]


class GradientBuckets:
    """Flat buffers into which small tensors of one dtype and device are packed. Large tensors are sent directly.

    The layout depends only on sizes, dtypes and order of the tensors, so it is equal on all ranks.

    Args:
        templates: Tensors with the shapes, dtypes and devices of the tensors that will be sent.
    """

    def __init__(self, templates: Sequence[torch.Tensor]) -> None:
        self._buckets: list[_Bucket] = []
        self._direct: list[int] = []  # indices of large tensors, which are sent directly
        self._copies: dict[int, torch.Tensor] = {}  # contiguous copies of large tensors, by index
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(templates):
            if tensor.nbytes >= _DIRECT_BYTES:
                self._direct.append(index)
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in small.items():
            for indices in _divide_into_buckets(members, templates):
                sizes = [templates[i].numel() for i in indices]
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
                pieces = torch.split(flat, sizes)
                views = [piece.view(templates[i].shape) for piece, i in zip(pieces, indices)]
                self._buckets.append(_Bucket(flat, indices, views))

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate the memory that `pack` needs in addition to the flat buffers. `unpack` frees it.

        Args:
            tensors: Tensors that will be packed.
        """
        for i in self._direct:
            # A tensor whose memory order differs from the peers' would mix up elements, so it is copied.
            if not tensors[i].is_contiguous() and i not in self._copies:
                self._copies[i] = torch.empty_like(tensors[i], memory_format=torch.contiguous_format)

    def pack(self, tensors: Sequence[torch.Tensor], unused: Container[int] = ()) -> list[torch.Tensor]:
        """Copy tensors into the buckets, and return the tensors to send.

        Args:
            tensors: Tensors whose shapes equal those passed to the constructor.
            unused: IDs of tensors that no rank needs. Large ones among them are not sent.
        """
        for bucket in self._buckets:
            foreach_copy_(bucket.views, [tensors[i] for i in bucket.indices])
        self.reserve(tensors)
        self._copies = {i: self._copies[i].copy_(tensors[i]) for i in self._direct if not tensors[i].is_contiguous()}
        sent_directly = [self._copies.get(i, tensors[i]).view(-1) for i in self._direct if id(tensors[i]) not in unused]
        return [bucket.flat for bucket in self._buckets] + sent_directly

    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy received values from the buckets and from contiguous copies back into the tensors."""
        for bucket in self._buckets:
            foreach_copy_([tensors[i] for i in bucket.indices], bucket.views)
        for index, copy in self._copies.items():
            tensors[index].copy_(copy)
        self._copies = {}


class _CachedBuckets(NamedTuple):
    """Buckets, with the shapes and dtypes of the tensors for which they were allocated."""

    shapes: list[tuple[torch.Size, torch.dtype]]
    buckets: GradientBuckets


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.nn.Parameter], group: Collectives) -> None:
    """Average gradients over the ranks of a group, in place. All ranks must call this.

    A rank without a gradient for a parameter contributes zeros. If no rank has one, the parameter's `grad` stays None.
    The average of gradients that are equal on all ranks is the same gradient, so gradients can be averaged repeatedly.

    Args:
        parameters: Different parameters, of which each rank of the group has all elements. They can be replicated
            DTensors.
        group: Collectives over the ranks.
    """
    flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    group.sum_in_place([flags])
    used = [parameter for parameter, count in zip(parameters, flags.tolist()) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = dtensors.get_local_gradients(used)
    if grads:
        foreach_div_(grads, group.world_size)
        buckets = GradientBuckets(grads)
        group.sum_in_place(buckets.pack(grads))
        buckets.unpack(grads)


def _divide_into_buckets(members: list[int], templates: Sequence[torch.Tensor]) -> list[list[int]]:
    """Divide indices of tensors into one list for each bucket of at most 25 MiB.

    Args:
        members: Indices of the tensors to divide.
        templates: All tensors.
    """
    buckets: list[list[int]] = [[]]
    num_bytes = 0
    for index in members:
        if buckets[-1] and num_bytes + templates[index].nbytes > _BUCKET_BYTES:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(index)
        num_bytes += templates[index].nbytes
    return buckets
