"""Run one update of a planned layout, with the calls that training would make before and after the forward pass."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.tree import Tree
from headway.core.strategies.base import Strategy
from headway.errors import HeadwayError, UnsupportedError
from headway.forecasting.tracing.recipe import make_autocast

if TYPE_CHECKING:
    from headway.planning.dry_run.activation_meter import ActivationMeter
    from headway.planning.dry_run.meter import StepMeter

Step = Callable[[nn.Module], torch.Tensor]
"""Function that runs one forward: it takes the model and returns the loss."""


@runtime_checkable
class BatchStep(Protocol):
    """Interface of a training step whose batch can be split into micro-batches. Pipeline schedules need such a step."""

    def inputs(self) -> Tree:
        """Return the batch of one data shard."""

    def loss(self, model: nn.Module, inputs: Tree) -> torch.Tensor:
        """Return the loss of the batch, or of a part of the batch.

        Args:
            model: Model to call.
            inputs: The batch that `inputs` returns, or a part of it.
        """

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the entire batch."""


class MeasuredForward:
    """Forward pass of a training step in the run's precision. It records the memory that autograd keeps for backward.

    Args:
        step: Training step on the batch of one data shard.
        model: Prepared model.
        precision: "no", "bf16" or "fp16".
        activation_meter: Meter of the memory that autograd keeps.
    """

    def __init__(self, step: Step, model: nn.Module, precision: str, activation_meter: "ActivationMeter") -> None:
        self.step = step
        self.model = model
        self.activation_meter = activation_meter
        self._precision = precision

    def __call__(self) -> torch.Tensor:
        """Run the forward pass, and return the loss of the batch.

        Raises:
            UnsupportedError: If the loss cannot be computed without values, or is not a tensor of one element. Also if
                it has no gradient although gradients are enabled.
        """
        loss: torch.Tensor = self.measure_forward(lambda: self.step(self.model))
        is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if not is_scalar or (torch.is_grad_enabled() and not loss.requires_grad):
            raise UnsupportedError(
                f"the step returned {type(loss).__name__}; it must return the loss, a tensor of one element with a gradient"
            )
        return loss

    def measure_forward(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` in the run's precision, record the memory that autograd keeps for backward, and return the result.

        Args:
            compute: Function that runs the model's forward.

        Raises:
            UnsupportedError: If `compute` raises an error that is not one of Headway's. The usual reason is that it reads
                values of tensors, which have none in a dry run.
            HeadwayError: If `compute` raises one of Headway's own errors, which is passed on unchanged.
        """
        try:
            with self.activation_meter.watch_forward(), make_autocast(self._precision):
                return compute()
        except HeadwayError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the step could not be run on {type(self.model).__name__} without values: {type(error).__name__}: {error}. If it "
                "reads a value (.item(), if tensor:), remove that; a plan without a step counts no communication"
            ) from error


class StepDriver:
    """Driver of an update for layouts that only need to call the model: replicas, FSDP and tensor parallelism.

    Subclasses add the calls that other layouts need.
    """

    def warm_up(self, forward: MeasuredForward) -> None:
        """Do the work that a training run does only once, before the measured update. The base class does nothing.

        Args:
            forward: Forward pass of the measured update.
        """

    def run_update(self, forward: MeasuredForward, meter: "StepMeter") -> None:
        """Run forward and backward. Gradients are reduced in backward.

        Args:
            forward: Forward pass that returns the loss.
            meter: Meter whose attribute `phase` is set when backward begins.
        """
        loss = forward()
        self.end_forward(forward, loss)
        meter.phase = "backward"
        self.run_backward(loss)

    def end_forward(self, forward: MeasuredForward, loss: torch.Tensor) -> None:
        """Record the end of forward. All memory that is still in use is now kept for backward.

        Args:
            forward: Forward pass that has ended.
            loss: Loss that it returned.
        """
        forward.activation_meter.end_forward(loss)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass from the loss."""
        loss.backward()  # type: ignore[no-untyped-call]


class ContextParallelDriver(StepDriver):
    """Driver of an update for context parallelism, which splits each sequence over ranks.

    The first call of a model under context parallelism also runs the unsplit model, to compare the results. `warm_up`
    makes this call, so that it is not measured.

    Args:
        strategy: Strategy of the layout.
        model: Model that the strategy has prepared.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy = strategy
        self._model = model

    def warm_up(self, forward: MeasuredForward) -> None:
        """Call the model once without gradients.

        The first call also runs the unsplit model to compare the results. That work must not be counted.
        """
        with torch.no_grad():
            forward()
        self._strategy.free_gathered(self._model)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run backward through the strategy, so that recomputed blocks see their sequence shards."""
        self._strategy.backward(loss, 1.0, Precision())


class PipelineDriver(StepDriver):
    """Driver of an update for pipeline stages.

    Before the update, `warm_up` runs the schedule once, in which the stages determine the shapes that they send. GPipe
    is planned as in a training loop that calls the model. The other schedules are planned as in a loop that calls
    `forward_backward`.

    Args:
        strategy: Strategy of the layout.
        schedule: Name of the schedule.
        step: Training step to run, or None to only prepare the model.

    Raises:
        UnsupportedError: If the schedule needs a batch that can be split, and the step does not provide one.
    """

    def __init__(self, strategy: Strategy, schedule: str, step: Step | None) -> None:
        self._strategy = strategy
        # GPipe runs all forwards before the first backward, so a loop can call the model as without a pipeline.
        self._calls_model = schedule == "gpipe"
        if not self._calls_model and step is not None and not isinstance(step, BatchStep):
            raise UnsupportedError(
                f"PipelineOptions(schedule={schedule!r}) runs forward and backward of micro-batches in turn, so a plan needs a step "
                "whose batch can be split: an object with inputs(), loss(model, inputs) and __call__(model). Or use schedule='gpipe'"
            )

    def warm_up(self, forward: MeasuredForward) -> None:
        """Run the schedule once, to determine which shapes the stages send to each other. Then drop the gradients."""
        self._run_schedule(forward)
        self._strategy.drop_gradients(forward.model.parameters())

    def run_update(self, forward: MeasuredForward, meter: "StepMeter") -> None:
        """Run an update's pipeline schedule, and reduce the gradients of parameters that are replicated over ranks."""
        if self._calls_model:
            super().run_update(forward, meter)
        else:
            meter.phase = "schedule"
            self._run_schedule(forward)
        meter.phase = "update"
        self._strategy.reduce_gradients()

    def end_forward(self, forward: MeasuredForward, loss: torch.Tensor) -> None:
        """Do nothing, because several micro-batches are in progress when a forward ends.

        The memory of activations is instead recorded from the tensors that autograd saves.
        """

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run backward from the loss through all stages, from the last stage to the first."""
        self._strategy.backward(loss, 1.0, Precision())

    def _run_schedule(self, forward: MeasuredForward) -> None:
        """Run the schedule on the step's batch, which is split into micro-batches if the schedule needs that."""
        step, model = forward.step, forward.model
        if self._calls_model or not isinstance(step, BatchStep):
            self.run_backward(forward())
            return

        def compute_loss(micro_batch: Tree) -> torch.Tensor:
            loss: torch.Tensor = forward.measure_forward(lambda: step.loss(model, micro_batch))
            return loss

        self.run_backward(self._strategy.compute_loss(compute_loss, step.inputs(), None, "mean"))
