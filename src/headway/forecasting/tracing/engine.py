"""Interfaces between a running training step and its surroundings: `StepObserver` follows it, `StepEngine` distributes it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from headway.forecasting._torch import foreach_mul_, foreach_norm
from headway.forecasting.tracing.reads import answer_reads
from headway.forecasting.tracing.recipe import NUM_UPDATES


class StepObserver:
    """Interface of an observer that is notified of the phases and tensors of a running step.

    The methods of this base class do nothing.
    """

    def enter_phase(self, phase: str) -> None:
        """Handle the start of a phase, such as "step 1 forward". Operations until the next call belong to the phase."""

    def mark_tensors(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Handle a report that the given tensors are of one kind of memory, such as "gradients"."""

    def mark_activations(self) -> None:
        """Handle the end of forward. All memory that forward has allocated and not freed counts as activations."""


class StepEngine:
    """Interface of an engine that distributes a step over ranks. This base class runs the whole model in one process.

    Args:
        model: Model whose gradients the engine manages.
    """

    num_updates = NUM_UPDATES
    """Number of updates to trace. From the last of them on, memory requests are the same in each update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def make_modes(self) -> Iterable[AbstractContextManager[Any]]:
        """Return the context managers, such as dispatch modes, in which the step runs. The base class needs none."""
        return ()

    def list_own_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, apart from those of the model, that the engine allocates before the first step.

        An example is DDP's buckets. The base class has no such tensors.
        """
        return []

    def run_micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context manager in which the forward and backward passes of a micro-batch run.

        Gradients are reduced over ranks only in the last micro-batch of an accumulation window.

        Args:
            is_last: Whether the micro-batch is the last of its accumulation window.
        """
        return nullcontext()

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check a new optimizer, and decide how it updates parameters. The base class does nothing."""

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Make an update with an optimizer.

        Args:
            optimizer: Optimizer to step.
            closure: Closure of the step, or None. Default: None.
        """
        with answer_reads(optimizer):
            optimizer.step(*([] if closure is None else [closure]))

    def list_gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients, including those that are reduced only at the end of the accumulation window."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients down so that their norm over all parameters is at most `max_norm`.

        This is equivalent to torch's `clip_grad_norm_` with `foreach=True`, which torch refuses for tensors on a CPU.
        """
        gradients = self.list_gradients()
        if not gradients:
            return
        norms = foreach_norm(gradients, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
