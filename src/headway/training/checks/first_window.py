"""What the first window tells about a loop: scaled losses, gradients cleared midway, what is no loss, rows nobody counts.

Rows of batches that no prepared loader counts, on several ranks: each loss weighs 1, however many rows it was taken over.

What is said of something that is no loss.
"""

from typing import Any, NoReturn

import torch

from headway.errors import LossError, StateError
from headway.log import get_logger
from headway.runtime.collectives.tree import find_batch_size
from headway.strategies.base import Strategy
from headway.training.prepared.objects import PreparedObjects
from headway.training.windows import AccumulationWindows

log = get_logger(__name__)

BY_HAND = (
    "backward came outside accumulate(), with gradient_accumulation_steps=%d: each loss is divided by %d, and step() and "
    "zero_grad() act whenever they are called. `with accelerator.accumulate(model):` makes it exact, for short windows and ragged "
    "batches too, and reduces gradients only once per window. Do not divide the loss yourself"
)
_SCALED = (
    "the loss was %s by %d, which is the number of %s, before it came to backward(). backward() accounts for that itself: give it "
    "the loss as it is. If the number means something else here, this warning does not concern you"
)
_CLEARED = (
    "the gradients of the window in progress were cleared between two of its micro-batches: by model.zero_grad(), or by an "
    "optimizer that is not prepared. Call zero_grad() on what prepare() returned for the optimizer; it waits for the window's end"
)
_SEVERAL_BATCHES = (
    "two losses came in one accumulate() block in which several batches of a loader were read. A block is one micro-batch, with "
    "one loss, or with several over the same samples: give each batch a block of its own"
)


class FirstWindow:
    """Looks at each backward of the first window; later ones cost nothing.

    Args:
        windows: of the run.
        prepared: what is trained.
        strategy: knows the gradients.
    """

    def __init__(self, windows: AccumulationWindows, prepared: PreparedObjects, strategy: Strategy) -> None:
        self._windows = windows
        self._prepared = prepared
        self._strategy = strategy
        self._had_gradients = False
        self._scaled: tuple[object, ...] = ()
        """What is to be said of the micro-batch's loss, unless another one follows: two halves make a mean."""

    def before_backward(self, loss: torch.Tensor, is_weighed: bool) -> None:
        """A loss comes to backward.

        Args:
            loss: a scalar with a graph.
            is_weighed: backward divides it, by a weight that nobody gave.

        Raises:
            StateError: gradients have been cleared within the window, or two batches share a block.
        """
        window = self._windows.current
        if window.micro_weight is not None and self._windows.num_read > 1:
            raise StateError(_SEVERAL_BATCHES)
        # A batch in pieces has what came before it set aside.
        if not self._windows.is_cut and window.has_gradient and self._had_gradients and not self._has_gradients():
            raise StateError(_CLEARED)
        if window.micro_weight is None:
            self._tell()
            self._scaled = self._scale(loss) if is_weighed else ()
        else:
            self._scaled = ()

    def after_backward(self) -> None:
        """It has run."""
        is_closed = self._windows.current.is_closed
        self._had_gradients = not is_closed and self._has_gradients()
        if is_closed:
            self._tell()

    def _tell(self) -> None:
        if self._scaled:
            log.warning_once(_SCALED, *self._scaled)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._prepared.parameters_of(self._windows.current))

    def _scale(self, loss: torch.Tensor) -> tuple[object, ...]:
        """What the last operation of its graph has multiplied it by, where that is a number of the run's."""
        kind, factor = type(loss.grad_fn).__name__, getattr(loss.grad_fn, "_saved_other", None)
        if kind not in ("DivBackward0", "MulBackward0") or not isinstance(factor, torch.Tensor):
            return ()
        if factor.ndim or factor.device.type != "cpu":  # a tensor of the script's
            return ()
        steps, ranks = self._windows.num_steps, self._strategy.everyone.world_size
        number = factor.item()
        if steps > 1 and number == (steps if kind == "DivBackward0" else 1 / steps):
            return "divided", steps, "micro-batches of an update"
        if ranks > 1 and kind == "MulBackward0" and number in (ranks, ranks * steps):
            return "multiplied", number, "processes" if number == ranks else "processes times micro-batches"
        return ()


_WORDS = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)


class RowCountCheck:
    """Looks at the first dimension of what models are called with; it guesses no weight from that, it tells.

    Args:
        windows: of the run; what a prepared loader counts is not looked at.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._seen: set[int] = set()
        self._first: set[int] = set()
        self._num_rows = 0
        self._is_told = False

    def see(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A prepared model is called."""
        if self._windows.loader is None and torch.is_grad_enabled() and model.training:
            self._seen.add(find_batch_size((args, kwargs)) or 0)

    def unweighed(self) -> None:
        """A loss weighs 1. Where this rank's batches change, others' may not; where all ranks' always differ, `take` shows it."""
        seen, self._seen = self._seen, set()
        if not seen:
            return
        self._num_rows = sum(seen)
        self._first = self._first or seen
        if seen != self._first and not self._is_told:
            now, before = (", ".join(map(str, sorted(rows))) for rows in (seen, self._first))
            log.warning(_WORDS, f"a batch of this rank has {now} rows, earlier ones {before}", main_process_only=False)
            self._is_told = True

    def take(self) -> int:
        """The rows that the last loss was computed from, if it weighs 1."""
        found, self._num_rows = self._num_rows, 0
        return found

    def place(self) -> int:
        """How many samples of its pass the loader in iteration has given."""
        return 0 if self._windows.loader is None else self._windows.loader.num_consumed

    def tell(self, counts: list[int]) -> None:
        """The ranks' batches differ."""
        if not self._is_told:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_WORDS, f"batches have different numbers of rows ({told})")
            self._is_told = True


def refuse_loss(loss: Any) -> NoReturn:
    """Say why.

    Raises:
        LossError: no tensor, no scalar, or no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(
            f"backward() got a {type(loss).__name__}; give the loss tensor (for a model output: output.loss)"
        )
    if loss.numel() != 1:
        raise LossError(
            f"backward() got a loss of shape {tuple(loss.shape)}; reduce it first: loss.mean(), or loss.sum() with "
            "weight= and reduction='sum'"
        )
    raise LossError(
        "backward() got a loss without a graph: it does not depend on any parameter that requires grad. Was it made under "
        "torch.no_grad(), detached, or are all parameters frozen?"
    )


def refuse_weight(weight: float | None, reduction: str) -> NoReturn:
    """Say why.

    Raises:
        LossError: an unknown reduction, or a weight that is negative or not finite.
    """
    if reduction not in ("mean", "sum"):
        raise LossError(f"reduction={reduction!r}; allowed: 'mean' (of `weight` items) and 'sum' (over `weight` items)")
    raise LossError(f"weight={weight!r}; give the number of items the loss was taken over, 0 or more")
