"""How a strategy is driven through an update of a plan: the calls around the step that training would make."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from headway.errors import HeadwayError, UnsupportedError
from headway.forecasting.tracing.step import autocast
from headway.precision.mixed import Precision
from headway.runtime.collectives.tree import Tree
from headway.strategies.base import Strategy

if TYPE_CHECKING:
    from headway.planning.dry_run.meter import ActivationMeter, StepMeter

Step = Callable[[nn.Module], torch.Tensor]
"""One forward: the model in, the loss out."""


@runtime_checkable
class BatchStep(Protocol):
    """A step whose batch can be cut: pipelines run micro-batches of it in turn."""

    def inputs(self) -> Tree:
        """The batch of one data shard."""

    def loss(self, model: nn.Module, inputs: Tree) -> torch.Tensor:
        """The loss of (a part of) it."""

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """The loss of all of it."""


class Forward:
    """A step on a model, in the number format of the run; what autograd keeps is noted.

    Args:
        step: one batch of one data shard.
        model: prepared.
        precision: "no", "bf16" or "fp16".
        saved: takes the notes.
    """

    def __init__(self, step: Step, model: nn.Module, precision: str, saved: "ActivationMeter") -> None:
        self.step, self.model = step, model
        self.saved, self._precision = saved, precision

    def __call__(self) -> torch.Tensor:
        """The loss of the batch.

        Raises:
            UnsupportedError: it cannot be computed without values, or is not a loss.
        """
        loss = self.within(lambda: self.step(self.model))
        is_lost = torch.is_grad_enabled() and isinstance(loss, torch.Tensor) and not loss.requires_grad
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or is_lost:
            raise UnsupportedError(
                f"the step returned {type(loss).__name__}; it must return the loss, a tensor of one element with a gradient"
            )
        return loss

    def within(self, compute: Callable[[], Any]) -> Any:
        """What a forward of the model gives.

        Raises:
            UnsupportedError: it cannot be computed without values.
        """
        try:
            with self.saved.watching(), autocast(self._precision):
                return compute()
        except HeadwayError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the step could not be run on {type(self.model).__name__} without values: {type(error).__name__}: {error}. If it "
                "reads a value (.item(), if tensor:), remove that; a plan without a step counts no communication"
            ) from error


class StepDriver:
    """Where the model's own calls do everything: replicas, shards, parts of matrices."""

    def warm_up(self, forward: Forward) -> None:
        """What happens once in a run, and is not counted.

        Args:
            forward: the one that follows.
        """

    def update(self, forward: Forward, meter: "StepMeter") -> None:
        """Forward, backward and the reduction of gradients.

        Args:
            forward: gives the loss.
            meter: is told what is going on.
        """
        loss = forward()
        self.ended(forward, loss)
        meter.phase = "backward"
        self.backward(loss)

    def ended(self, forward: Forward, loss: torch.Tensor) -> None:
        """Forward has ended: what is held now is kept for backward."""
        forward.saved.forward_ended(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """Of the loss."""
        loss.backward()  # type: ignore[no-untyped-call]


class CutSequences(StepDriver):
    """Context parallelism, which compares a model with its whole at the first call.

    Args:
        strategy: of the layout.
        model: prepared by it.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model

    def warm_up(self, forward: Forward) -> None:
        """The comparison."""
        with torch.no_grad():
            forward()
        self._strategy.at_rest(self._model)

    def backward(self, loss: torch.Tensor) -> None:
        """Blocks that are computed again see their parts."""
        self._strategy.backward(loss, 1.0, Precision())


class Pipeline(StepDriver):
    """Stages, between which the first micro-batch of each shape goes ahead once.

    GPipe is planned as a loop runs it that calls the model, the other schedules as `forward_backward`.

    Args:
        strategy: of the layout.
        schedule: its name.

    Raises:
        UnsupportedError: this schedule needs a batch that can be cut, and the step's cannot.
    """

    def __init__(self, strategy: Strategy, schedule: str, step: Step | None) -> None:
        self._strategy = strategy
        self._is_plain = schedule == "gpipe"
        if not self._is_plain and step is not None and not isinstance(step, BatchStep):
            raise UnsupportedError(
                f"PipelineOptions(schedule={schedule!r}) runs forward and backward of micro-batches in turn, so a plan needs a step "
                "whose batch can be cut: an object with inputs(), loss(model, inputs) and __call__(model). Or use schedule='gpipe'"
            )

    def warm_up(self, forward: Forward) -> None:
        """What travels between stages is found."""
        self._run(forward)
        self._strategy.drop_gradients(forward.model.parameters())

    def update(self, forward: Forward, meter: "StepMeter") -> None:
        """Run the schedule, and reduce what several ranks have."""
        if self._is_plain:
            super().update(forward, meter)
        else:
            meter.phase = "schedule"
            self._run(forward)
        meter.phase = "update"
        self._strategy.reduce_gradients()

    def ended(self, forward: Forward, loss: torch.Tensor) -> None:
        """Nothing: micro-batches are under way side by side, and autograd says what they keep."""

    def backward(self, loss: torch.Tensor) -> None:
        """The loss's own, then the stages' from last to first."""
        self._strategy.backward(loss, 1.0, Precision())

    def _run(self, forward: Forward) -> None:
        step, model = forward.step, forward.model
        if self._is_plain or not isinstance(step, BatchStep):
            self.backward(forward())
            return

        def fn(piece: Tree) -> torch.Tensor:
            found: torch.Tensor = forward.within(lambda: step.loss(model, piece))
            return found

        self.backward(self._strategy.compute(fn, step.inputs(), None, "mean"))
