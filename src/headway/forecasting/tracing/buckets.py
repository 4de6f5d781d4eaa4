"""What DDP's reducer holds beside a model: flat buckets in which gradients travel.

The reducer is C++ and takes no tensors without values, so its memory follows its rules: one bucket for all gradients at first; after
the first backward buckets of at most so many bytes, in the order in which gradients came; gradients are copied into them, and lie in
them from then on where they are views of their bucket.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from headway.config.engines import DistributedDataParallelKwargs
from headway.forecasting.tracing.step import StepEngine

_MIB = 1 << 20
_BROADCAST, _IN_FLIGHT = 250 * _MIB, 2
"""DDP sends the first rank's parameters and buffers in copies of about so many bytes, so many at a time."""


class BucketedReplica(StepEngine):
    """A whole model on each rank, whose gradients are summed by DDP.

    Args:
        model: of tensors without values.
        cap: bytes of a bucket.
        as_views: `gradient_as_bucket_view`.
        is_fixed: buckets stay as they are cut at first, as with `find_unused_parameters`.
    """

    steps = 3  # the second update begins with one bucket and ends with many

    def __init__(self, model: nn.Module, cap: int, as_views: bool = False, is_fixed: bool = False) -> None:
        super().__init__(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._cap, self._as_views, self._is_fixed = cap, as_views, is_fixed
        self._buckets: list[torch.Tensor] = []
        self._places: dict[int, torch.Tensor] = {}
        self._arrived: list[int] = []
        self._is_last = False
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, index))  # type: ignore[no-untyped-call]

    def own(self) -> list[torch.Tensor]:
        """The buckets, which come after the parameters have been broadcast."""
        if not self._buckets:
            self._broadcast()
            self._cut(range(len(self._parameters))[::-1], self._cap if self._is_fixed else sys.maxsize)
        return self._buckets

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """The buckets are cut anew where the order of the gradients is known."""
        if len(self._arrived) == len(self._parameters) and not self._is_fixed:
            order, self._is_fixed = list(self._arrived), True
            self._buckets.clear()
            self._places.clear()
            self._cut(order, self._cap)
        self._is_last = is_last
        yield

    def _arrive(self, index: int, _: nn.Parameter) -> None:
        """A parameter has its gradient."""
        if not self._is_last:
            return
        if not self._is_fixed:
            self._arrived.append(index)
        if self._as_views:
            self._parameters[index].grad = self._places[index]

    def _broadcast(self) -> None:
        states = [each.detach() for each in (*self.model.parameters(), *self.model.buffers())]
        flying: deque[torch.Tensor] = deque()
        for group in _grouped(states, _BROADCAST):
            if len(flying) == _IN_FLIGHT:
                flying.popleft()
            members = [states[place] for place in group]
            flying.append(torch.empty(sum(each.numel() for each in members), dtype=members[0].dtype))

    def _cut(self, order: Iterable[int], cap: int) -> None:
        wanted = list(order)
        for group in _grouped([self._parameters[index].detach() for index in wanted], cap):
            members = [self._parameters[wanted[place]] for place in group]
            sizes = [parameter.numel() for parameter in members]
            self._buckets.append(torch.empty(sum(sizes), dtype=members[0].dtype))
            for place, parameter, begin in zip(group, members, accumulate([0, *sizes])):
                flat = self._buckets[-1][begin : begin + parameter.numel()]
                if self._as_views:
                    self._places[wanted[place]] = flat.view(parameter.shape)


def _grouped(tensors: list[torch.Tensor], cap: int) -> list[list[int]]:
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

    groups: list[list[int]] = _compute_bucket_assignment_by_size(tensors, [cap])[0]
    return groups


def replica(model: nn.Module, options: DistributedDataParallelKwargs) -> StepEngine:
    """The model as DDP holds it: with buckets, unless nothing of it learns."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return StepEngine(model)
    is_fixed = options.find_unused_parameters and not options.static_graph
    return BucketedReplica(model, options.bucket_cap_mb * _MIB, options.gradient_as_bucket_view, is_fixed)
