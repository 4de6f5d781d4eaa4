"""Records of the losses and gradient norms of accumulation windows, on which guards decide about updates."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef


class BadLosses(NamedTuple):
    """Refused losses of one rank in one accumulation window.

    Attributes:
        num_losses: Number of these losses.
        micro_batch: Micro-batch of the first one, from 1.
        loss: Value of the first one.
    """

    num_losses: int
    micro_batch: int
    loss: float


class UpdateVerdict(NamedTuple):
    """Decision on an update. It is valid until the next accumulation window or backward.

    Attributes:
        window: Number of the accumulation window.
        num_backwards: `WindowRecord.num_backwards` at the decision.
        is_permitted: Whether the update may be made.
    """

    window: int
    num_backwards: int
    is_permitted: bool


class RecordedLoss(NamedTuple):
    """Loss of one backward.

    Attributes:
        micro_batch: Number of the micro-batch in its accumulation window, from 1.
        loss: Scalar loss without a graph.
    """

    micro_batch: int
    loss: torch.Tensor


class NormGroup(NamedTuple):
    """Parameters whose gradients have one device and dtype.

    Attributes:
        parameters: The parameters.
        norms: 2-norm of each parameter's gradient, a tensor of shape [number of parameters] on the gradients' device.
    """

    parameters: list[torch.Tensor]
    norms: torch.Tensor


@dataclass
class ClippedGradients:
    """Norms of gradients that were clipped, if every rank has all gradients.

    Attributes:
        groups: Norms before clipping, because clipping spreads a NaN to all gradients.
        versions: For each clipped parameter, by ID: a weak reference to its gradient, and the gradient's version counter
            after clipping.
    """

    groups: list[NormGroup] = field(default_factory=list)
    versions: dict[int, tuple[TensorWeakRef, int]] = field(default_factory=dict)

    def is_unchanged(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient was clipped and has not changed since, so that its recorded norm is valid."""
        if id(parameter) not in self.versions:
            return False
        reference, version = self.versions[id(parameter)]
        grad = parameter.grad
        return grad is not None and reference() is grad and grad._version == version


class StampedShards(NamedTuple):
    """State of gradient shards after a clipping call, to find out whether they have changed since.

    Attributes:
        parameters: Parameters that were clipped.
        stamps: Pair (address, version counter) of each of their gradient shards on this rank.
    """

    parameters: list[torch.Tensor]
    stamps: list[tuple[int, int]]


@dataclass
class ClippedShards:
    """Norms of gradients that were clipped, if gradients are sharded. Each list has one entry per clipping call.

    Attributes:
        totals: Norms over all ranks before clipping, as 0-d tensors.
        squares: Squared norms of this rank's shards before clipping, as 0-d tensors. Only the spike guard records them.
        parameter_ids: IDs of the parameters that any of these calls clipped.
        stamped: Gradient shards after clipping.
    """

    totals: list[torch.Tensor] = field(default_factory=list)
    squares: list[torch.Tensor] = field(default_factory=list)
    parameter_ids: set[int] = field(default_factory=set)
    stamped: list[StampedShards] = field(default_factory=list)


@dataclass
class WindowRecord:
    """Losses and gradient norms that the guard has recorded for one set of models since it last judged an update.

    Attributes:
        window: Number of the latest accumulation window of these models. -1 before the first one.
        losses: On an accelerator all losses, on a CPU only those that are not finite or, with the spike guard, above its
            limit.
        num_backwards: Number of backwards so far. Each of them changes gradients.
        gradients: Norms recorded by clipping, if every rank has all gradients. Valid only if `has_valid_norms`.
        shards: Norms recorded by clipping, if gradients are sharded. Valid only if `has_valid_norms`.
        clipped_at: Value of `num_backwards` at the last clipping. -1 before the first one.
        verdict: Latest decision, or None.
        is_judged: Whether an update was judged. The losses of the next accumulation window then begin a new record.
        is_counted: Whether the refused update was counted.
        new_losses: This rank's losses as numbers. They limit later losses once the update is made. Only the spike guard
            records them.
        grad_norm: Gradient norm over all ranks, of which the same holds. NaN before the update is judged.
    """

    window: int = -1
    losses: deque[RecordedLoss] = field(default_factory=lambda: deque(maxlen=4096))
    num_backwards: int = 0
    gradients: ClippedGradients = field(default_factory=ClippedGradients)
    shards: ClippedShards = field(default_factory=ClippedShards)
    clipped_at: int = -1
    verdict: UpdateVerdict | None = None
    is_judged: bool = False
    is_counted: bool = False
    new_losses: list[float] = field(default_factory=list)
    grad_norm: float = math.nan

    @property
    def has_valid_norms(self) -> bool:
        """Whether gradients were clipped, and no backward has changed them since."""
        return self.clipped_at == self.num_backwards

    def begin_clipping(self) -> None:
        """Prepare to record the gradient norms of a clipping call. Drop earlier norms that are no longer valid."""
        if not self.has_valid_norms:
            self.gradients, self.shards = ClippedGradients(), ClippedShards()
            self.clipped_at = self.num_backwards
