"""`StepGuard`, which watches the losses and gradients of a training step, and may refuse an update.

The guard of this file only warns. `checks/finite.py` and `headway.extras` contain guards that refuse updates.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from headway.core.training.checks.notices import NonFiniteNotice, SkippedUpdates
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow


class StepGuard:
    """Object that watches losses and gradients, and may refuse an update.

    This base class only reports non-finite losses.

    Args:
        run: Run of the Accelerator.
        notice: Object that warns of non-finite losses. None in a dry run, whose tensors have no values.

    Attributes:
        non_finite_guard: The guard itself if it applies the policy `on_non_finite`, else None.
        spike_guard: The guard itself if it applies the policy `on_spike`, else None.
    """

    can_refuse_updates: ClassVar[bool] = False
    """Whether the guard may refuse updates.

    If False, the training step does not call `watch`, `before_clip` and `after_clip`, and it calls `after_step` only
    for a skipped update.
    """
    non_finite_guard: "StepGuard | None" = None
    spike_guard: "StepGuard | None" = None

    def __init__(self, run: Run, notice: NonFiniteNotice | None = None) -> None:
        self._run = run
        self._notice = notice
        self._skips = SkippedUpdates(run.clock)
        self._has_recorded_losses = False

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss on which to run backward. Called before each backward if `can_refuse_updates` is set.

        This base class checks nothing and returns `loss` unchanged.
        """
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        """Record the loss for the warning about non-finite losses, unless it is on the CPU and finite.

        This is done after backward, because in a pipeline a loss has no value before. In a dry run, do nothing. The
        training step does not call this method for losses with weight 0.
        """
        # `item()` would wait for an accelerator, so a loss there is recorded without reading it.
        if self._notice is not None and (not loss.is_cpu or not math.isfinite(loss.item())):
            self._has_recorded_losses = True
            self._notice.check_loss(loss)

    def before_clip(
        self, window: AccumulationWindow, parameters: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """Examine final gradients before they are clipped. This base class does nothing and returns None.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients are about to be clipped.
            norm_type: Order of the norm by which they are clipped.

        Returns:
            The total norm of the gradients if the guard has computed it, else None.
        """
        return None

    def after_clip(self, window: AccumulationWindow, parameters: Sequence[torch.Tensor]) -> None:
        """Examine final gradients after they were clipped. This base class does nothing.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients were clipped.
        """

    def can_update(self, window: AccumulationWindow) -> bool:
        """Whether an optimizer may step on the gradients of a closed accumulation window.

        The result is equal on all ranks. This base class always returns True, and checks recorded losses that have
        arrived on the host, for the warning about non-finite losses.

        Args:
            window: Window in which the optimizer's models trained last.
        """
        if self._notice is not None and self._has_recorded_losses:
            self._notice.check_arrived_losses()
        return True

    def after_step(self, window: AccumulationWindow, did_step: bool) -> None:
        """Record the update as skipped if the optimizer did not step.

        Args:
            window: Accumulation window of the update.
            did_step: Whether the optimizer has stepped.
        """
        if not did_step:
            self._skips.record_skip(window)
