"""Check of the first accumulation window: losses that the script scales itself, and gradients cleared too early."""

from typing import NamedTuple

import torch

from headway.core.training.run import Run
from headway.errors import StateError
from headway.log import get_logger

log = get_logger(__name__)

STANDALONE_BACKWARDS = (
    "backward() was called outside accumulate(), with gradient_accumulation_steps=%d: each loss is divided by %d, and step() and "
    "zero_grad() act whenever they are called. `with accelerator.accumulate(model):` makes it exact, for short windows and ragged "
    "batches too, and reduces gradients only once per window. Do not divide the loss yourself"
)
_SCALED = (
    "the loss was %s by %d, which is the number of %s, before backward() was called. backward() divides it already, so pass it "
    "the undivided loss. If you divide the loss for another reason, ignore this warning"
)
_CLEARED = (
    "the gradients of the window in progress were cleared between two of its micro-batches: by model.zero_grad(), or by an "
    "optimizer that is not prepared. Call zero_grad() on what prepare() returned for the optimizer; it waits for the window's end"
)
_SEVERAL_BATCHES = (
    "one accumulate() block contains two losses and reads several batches of a loader. A block is one micro-batch, with one loss "
    "or with several losses over the same samples. Use a separate block for each batch"
)


class FirstWindow:
    """Check of each backward in the first accumulation window, for mistakes of the training loop.

    Later windows are not checked, so the check costs nothing from then on.

    Args:
        run: Run of the Accelerator.
    """

    def __init__(self, run: Run) -> None:
        self._windows = run.windows
        self._prepared = run.prepared
        self._strategy = run.strategy
        self._had_gradients = False
        # Scale of the micro-batch's loss, of which a warning is pending. It is dropped if the micro-batch has a second
        # loss, because two halved losses make a correct mean.
        self._loss_scale: _LossScale | None = None

    def before_backward(self, loss: torch.Tensor, has_default_weight: bool) -> None:
        """Raise an error, or prepare a warning, if a loss shows that the training loop makes a mistake.

        Args:
            loss: Scalar loss with a graph, before its backward.
            has_default_weight: Whether Headway chooses the loss's weight, because the caller passed none. A script that
                passes weights may have reasons to scale the loss, too.

        Raises:
            StateError: If gradients were cleared within the accumulation window. Also if an `accumulate` block has two
                losses, and several batches of one loader were read for it.
        """
        window = self._windows.current
        if window.micro_weight is not None and self._windows.reads.num_unused_reads > 1:
            raise StateError(_SEVERAL_BATCHES)
        # With automatic micro-batching, the gradients of earlier batches are stored elsewhere, so `grad` can be None.
        can_see_gradients = not self._windows.is_in_splittable_batch
        if can_see_gradients and window.has_gradient and self._had_gradients and not self._has_gradients():
            raise StateError(_CLEARED)
        if window.micro_weight is None:
            self._log_scale_warning()
            self._loss_scale = self._find_loss_scale(loss) if has_default_weight else None
        else:
            self._loss_scale = None

    def after_backward(self) -> None:
        """Record whether gradients exist. If the accumulation window has closed, log the pending warning."""
        is_closed = self._windows.current.is_closed
        self._had_gradients = not is_closed and self._has_gradients()
        if is_closed:
            self._log_scale_warning()

    def _log_scale_warning(self) -> None:
        """Log the pending warning that the script itself scales losses, if there is one."""
        if self._loss_scale is not None:
            log.warning_once(_SCALED, *self._loss_scale)

    def _has_gradients(self) -> bool:
        """Whether any parameter that trains in the current window has a gradient."""
        return any(p.grad is not None for p in self._prepared.list_parameters_of(self._windows.current))

    def _find_loss_scale(self, loss: torch.Tensor) -> "_LossScale | None":
        """Return how the script itself has scaled the loss, or None if it has not.

        The last operation of the loss's graph shows it: a division by the number of accumulation steps, or a
        multiplication by the number of ranks.
        """
        operation, operand = type(loss.grad_fn).__name__, getattr(loss.grad_fn, "_saved_other", None)
        if operation not in ("DivBackward0", "MulBackward0") or not isinstance(operand, torch.Tensor):
            return None
        # torch saves a Python number as a 0-d tensor on the CPU. Any other operand is a tensor of the script.
        if operand.ndim or operand.device.type != "cpu":
            return None
        num_steps, num_ranks = self._windows.num_steps, self._strategy.everyone.world_size
        number = operand.item()
        if num_steps > 1 and number == (num_steps if operation == "DivBackward0" else 1 / num_steps):
            return _LossScale("divided", num_steps, "micro-batches of an update")
        if num_ranks > 1 and operation == "MulBackward0" and number in (num_ranks, num_ranks * num_steps):
            meaning = "processes" if number == num_ranks else "processes times micro-batches"
            return _LossScale("multiplied", number, meaning)
        return None


class _LossScale(NamedTuple):
    """Number by which the script itself has scaled a loss: the arguments of the warning `_SCALED`.

    Attributes:
        operation: "divided" or "multiplied".
        number: The number.
        meaning: What the run has in this number, such as "processes".
    """

    operation: str
    number: float
    meaning: str
