"""Check of the first accumulation window: losses that the script scales itself, and gradients cleared too early."""

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
        self._scaled: tuple[object, ...] = ()
        """Arguments of the pending warning that the script itself scales the micro-batch's loss. (): no warning is due.

        The warning is dropped if the micro-batch has a second loss, because two halved losses make a correct mean.
        """

    def before_backward(self, loss: torch.Tensor, is_weighed: bool) -> None:
        """Raise an error, or prepare a warning, if a loss shows that the training loop makes a mistake.

        Args:
            loss: Scalar loss with a graph, before its backward.
            is_weighed: Whether backward divides the loss by a weight that Headway derives, because the caller passed
                none.

        Raises:
            StateError: If gradients were cleared within the accumulation window. Also if an `accumulate` block has two
                losses, and several batches of one loader were read for it.
        """
        window = self._windows.current
        if window.micro_weight is not None and self._windows.num_unused_reads > 1:
            raise StateError(_SEVERAL_BATCHES)
        # If a batch is split to fit into memory, the gradients of earlier batches are stored elsewhere, so `grad` can
        # be None here.
        if (
            not self._windows.is_in_splittable_batch
            and window.has_gradient
            and self._had_gradients
            and not self._has_gradients()
        ):
            raise StateError(_CLEARED)
        if window.micro_weight is None:
            self._warn_of_scaled()
            self._scaled = self._find_scale_warning(loss) if is_weighed else ()
        else:
            self._scaled = ()

    def after_backward(self) -> None:
        """Record whether gradients exist. If the accumulation window has closed, log the pending warning."""
        is_closed = self._windows.current.is_closed
        self._had_gradients = not is_closed and self._has_gradients()
        if is_closed:
            self._warn_of_scaled()

    def _warn_of_scaled(self) -> None:
        if self._scaled:
            log.warning_once(_SCALED, *self._scaled)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._prepared.list_parameters_of(self._windows.current))

    def _find_scale_warning(self, loss: torch.Tensor) -> tuple[object, ...]:
        """Return the arguments of a log warning if the script itself has scaled the loss, else ().

        The last operation of the loss's graph shows it: a division by the number of accumulation steps, or a
        multiplication by the number of ranks.
        """
        kind, factor = type(loss.grad_fn).__name__, getattr(loss.grad_fn, "_saved_other", None)
        if kind not in ("DivBackward0", "MulBackward0") or not isinstance(factor, torch.Tensor):
            return ()
        if factor.ndim or factor.device.type != "cpu":  # a tensor that the script created
            return ()
        steps, ranks = self._windows.num_steps, self._strategy.everyone.world_size
        number = factor.item()
        if steps > 1 and number == (steps if kind == "DivBackward0" else 1 / steps):
            return "divided", steps, "micro-batches of an update"
        if ranks > 1 and kind == "MulBackward0" and number in (ranks, ranks * steps):
            return "multiplied", number, "processes" if number == ranks else "processes times micro-batches"
        return ()
