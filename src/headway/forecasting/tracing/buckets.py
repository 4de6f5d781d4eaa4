"""Model the memory of DDP's reducer, which copies gradients into flat buckets and all-reduces the buckets.

The reducer is written in C++ and does not accept fake tensors, so its rules are modeled here. At first, one bucket
contains all gradients. After the first backward, buckets have at most `bucket_cap_mb` and follow the order in which
gradients became ready. Gradients are copied into their bucket, or become views of it with `gradient_as_bucket_view`.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.forecasting.tracing.engine import StepEngine

_MIB = 1 << 20
"""Number of bytes in a mebibyte."""
_BROADCAST_BYTES = 250 * _MIB
"""Approximate size in bytes of the buffers in which DDP broadcasts rank 0's parameters and buffers."""
_IN_FLIGHT = 2
"""Number of broadcast buffers that exist at the same time."""


class BucketedReplica(StepEngine):
    """Engine that models the memory of DDP: a full replica of the model on each rank, with buckets of gradients.

    Args:
        model: Model whose tensors have no values.
        max_bytes: Maximum size of a bucket in bytes.
        uses_views: Whether gradients are views of the buckets (`gradient_as_bucket_view`).
        is_fixed: Whether the buckets are never rebuilt, as with `find_unused_parameters`.
    """

    # The second update starts with one bucket and ends with many, so only the third is like all later ones.
    num_updates = 3

    def __init__(self, model: nn.Module, max_bytes: int, uses_views: bool = False, is_fixed: bool = False) -> None:
        super().__init__(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_bytes = max_bytes
        self._uses_views = uses_views
        self._is_fixed = is_fixed
        self._buckets: list[torch.Tensor] = []
        self._bucket_views: dict[int, torch.Tensor] = {}  # by index of the parameter
        self._ready_order: list[int] = []  # indices of the parameters whose gradients are ready, in order
        self._is_last = False
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, index))  # type: ignore[no-untyped-call]

    def list_own_tensors(self) -> list[torch.Tensor]:
        """Return DDP's buckets.

        The first call creates the buckets. Before that, it models the memory of the broadcast in which ranks receive
        the parameters and buffers of rank 0.
        """
        if not self._buckets:
            self._broadcast_states()
            self._make_buckets(range(len(self._parameters))[::-1], self._max_bytes if self._is_fixed else sys.maxsize)
        return self._buckets

    @contextmanager
    def run_micro_batch(self, is_last: bool) -> Iterator[None]:
        """Return the context for forward and backward of a micro-batch, in which gradients are assigned to buckets.

        The buckets are rebuilt once: on the first entry after all gradients have become ready, in the order in which
        they became ready.

        Args:
            is_last: Whether the micro-batch is the last of its accumulation window.
        """
        if len(self._ready_order) == len(self._parameters) and not self._is_fixed:
            self._is_fixed = True
            self._buckets.clear()
            self._bucket_views.clear()
            self._make_buckets(self._ready_order, self._max_bytes)
        self._is_last = is_last
        yield

    def _record_gradient(self, index: int, _: nn.Parameter) -> None:
        """Record that a parameter's gradient is ready, and make it a view of its bucket if DDP would do so.

        Nothing is recorded before the last micro-batch of an accumulation window.

        Args:
            index: Index of the parameter.
            _: The parameter, which is not used.
        """
        if not self._is_last:
            return
        if not self._is_fixed:
            self._ready_order.append(index)
        if self._uses_views:
            self._parameters[index].grad = self._bucket_views[index]

    def _broadcast_states(self) -> None:
        """Allocate the buffers in which DDP broadcasts parameters and buffers before the first forward."""
        states = [each.detach() for each in (*self.model.parameters(), *self.model.buffers())]
        in_flight: deque[torch.Tensor] = deque()
        for group in _group_tensors(states, _BROADCAST_BYTES):
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft()
            members = [states[index] for index in group]
            in_flight.append(torch.empty(sum(each.numel() for each in members), dtype=members[0].dtype))

    def _make_buckets(self, order: Sequence[int], max_bytes: int) -> None:
        """Allocate the buckets, and the views of them that become gradients.

        Args:
            order: Indices of the parameters, in the order in which their gradients are put into buckets.
            max_bytes: Maximum size of a bucket in bytes.
        """
        for group in _group_tensors([self._parameters[index].detach() for index in order], max_bytes):
            indices = [order[position] for position in group]
            sizes = [self._parameters[index].numel() for index in indices]
            bucket = torch.empty(sum(sizes), dtype=self._parameters[indices[0]].dtype)
            self._buckets.append(bucket)
            if self._uses_views:
                for index, size, begin in zip(indices, sizes, accumulate([0, *sizes])):
                    self._bucket_views[index] = bucket[begin : begin + size].view(self._parameters[index].shape)


def _group_tensors(tensors: list[torch.Tensor], max_bytes: int) -> list[list[int]]:
    """Return the indices of the tensors in each bucket, by the rule of DDP's reducer. Each bucket has one dtype."""
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

    groups: list[list[int]] = _compute_bucket_assignment_by_size(tensors, [max_bytes])[0]
    return groups


def make_replica(model: nn.Module, options: DistributedDataParallelKwargs) -> StepEngine:
    """Return an engine that models the memory of DDP. It has no buckets if no parameter is trainable."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return StepEngine(model)
    is_fixed = options.find_unused_parameters and not options.static_graph
    return BucketedReplica(model, options.bucket_cap_mb * _MIB, options.gradient_as_bucket_view, is_fixed)
