"""The strategy protocol: the narrow set of questions that a way of spreading a model over processes answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.collectives.door import Collectives
from headway.data.shard import Shard
from headway.errors import UnsupportedError
from headway.precision.base import Precision

Transform = Callable[[torch.nn.Module], torch.nn.Module]
"""Something done to a model before it is wrapped: activation checkpointing, compile, sharding."""
Engine = Callable[..., Any]
"""What a prepared model's forward goes through when gradients are wanted; None: the model itself."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do; asked once, generically.

    Attributes:
        several_models: more than one model may be prepared.
        deferred_sync: gradients can stay local for some micro-batches.
        clip_by_value: gradients can be clamped element by element.
        rollback: a step can be taken back.
    """

    several_models: bool = True
    deferred_sync: bool = True
    clip_by_value: bool = True
    rollback: bool = True

    def require(self, name: str, strategy: str, remedy: str) -> None:
        """Raise the one uniform error where the capability is missing.

        Raises:
            UnsupportedError: it is.
        """
        if not getattr(self, name):
            raise UnsupportedError(f"the {strategy} strategy cannot do {name.replace('_', ' ')}; {remedy}")


class Strategy(Protocol):
    """One way to spread training over processes.

    Attributes:
        name: for messages.
        capabilities: what it can do.
        data_shard: this process's slice of the data; not always (rank, world size).
        data_group: the processes among which gradients, weights and metrics reduce.
        gradient_divisor: what the engine divides summed gradients by on its own; the loss is multiplied by it.
    """

    name: str
    capabilities: Capabilities
    data_shard: Shard
    data_group: Collectives
    gradient_divisor: int

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Wrap or shard a model once; parameter names are those of the bare model, captured before."""

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own module."""

    def accumulate(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch: do gradients travel in its backward?"""

    def keep_local(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A block in which nothing of the model travels, neither gradients nor buffers, whatever `accumulate` says."""

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Add the gradient of `loss * factor`."""

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Another backward follows on forwards whose gradients have travelled already; they must travel again."""

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate what `reduce_gradients` will need, so that memory cannot run out within it.

        Returns:
            How many of the parameters have no gradient here, where that matters to the others.
        """

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """What remains to be reduced when the window's last backward has returned: buffers, deferred gradients.

        Args:
            parameters: those of the window that learn.
            has_gaps: on some rank, some of them have no gradient (what `ready` returned is not 0 everywhere).
        """

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply gradients: the one correction of (sum, weight)."""

    def clip(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clip by the global norm; returns the norm from before, a plain 0-d tensor.

        Args:
            parameters: whose gradients.
            max_norm: the most it may be.
            norm_type: 2 for the Euclidean norm.
            known: this process's own norm of these gradients, where it is known already.
        """

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """Step; False where the update was skipped."""

    def rollback(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drop the gradients of an update that will not happen."""

    def release(self) -> None:
        """Forget all models, so that their memory can go."""

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors by the bare module's names, one at a time."""

    def import_state(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors by the bare module's names into the model."""
