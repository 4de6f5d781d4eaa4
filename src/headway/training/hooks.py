"""What a run is made of, and who looks on at its steps: hooks, notices where nobody asked for a guard, and the first window.

Notices tell and do not prevent, so nobody waits: a loss that lies on a device is read an update late. What prevents is `finite.py`.

What the first window tells about a loop: scaled losses, gradients cleared midway, what is no loss.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import torch

from headway.common import scope
from headway.data.loader import LoaderEvents
from headway.errors import LossError, StateError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime import events, process
from headway.runtime.control_plane import control
from headway.runtime.process import ProcessRuntime
from headway.runtime.transfers import Readback
from headway.strategies.base import Strategy
from headway.strategies.fully_sharded.dtensors import local
from headway.training.prepared.objects import PreparedObjects
from headway.training.windows import AccumulationWindows, UpdateClock


@dataclass
class StepHooks:
    """Who hears of a step's moments: lists of functions, empty while nothing is measured or watched.

    Attributes:
        before_learning: a micro-batch is about to begin, or a backward comes outside of any.
        before_begin: a micro-batch is about to begin.
        begun: it has, as (number of its window, its number in it).
        before_forward: a prepared model is about to be called, with these arguments; not within another call of it.
        before_backward: a loss is about to run backward.
        unweighed: a loss weighs 1, because nobody knows what it was taken over.
        reduced: a window's gradients are final.
        before_update: an optimizer is about to step on them.
        phases: the name of the phase that begins: "forward", "backward", "step".
    """

    before_learning: list[Callable[[], None]] = field(default_factory=list)
    before_begin: list[Callable[[], None]] = field(default_factory=list)
    begun: list[Callable[[int, int], None]] = field(default_factory=list)
    before_forward: list[Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]] = field(
        default_factory=list
    )
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    unweighed: list[Callable[[], None]] = field(default_factory=list)
    reduced: list[Callable[[], None]] = field(default_factory=list)
    before_update: list[Callable[[], None]] = field(default_factory=list)
    phases: list[Callable[[str], None]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class RunParts:
    """What the run of one Accelerator is made of, for its step, and for what guards and checks it.

    Attributes:
        windows: the state of its windows.
        clock: counts its updates.
        prepared: the objects that are trained.
        strategy: runs backward and reduces.
        precision: scales losses.
        events: of its loaders.
        runtime: this process.
        moments: who hears of its steps.
    """

    windows: AccumulationWindows
    clock: UpdateClock
    prepared: PreparedObjects
    strategy: Strategy
    precision: Precision
    events: LoaderEvents
    runtime: ProcessRuntime
    moments: StepHooks


log = get_logger(__name__)

_NUM_HOPELESS = 20
"""After so many halvings of fp16's usual scale, 65536, it is below 1: what overflows now is not the scale's doing."""


class NonFiniteNotice:
    """Tells once, on one rank, that a loss was not finite.

    Args:
        windows: of the run.
        clock: the run's.
        runtime: this process.
    """

    def __init__(self, windows: AccumulationWindows, clock: UpdateClock, runtime: ProcessRuntime) -> None:
        self._windows = windows
        self._clock = clock
        self._runtime = runtime
        self._key = f"non_finite/{next(scope.own(_numbers))}"
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=4096)
        self._asked: deque[tuple[int, list[int], Readback]] = deque()
        self._is_told = False
        process.at_end(self._read_all)

    def note(self, loss: torch.Tensor) -> None:
        """A loss that is not finite, or lies where it cannot be read at once."""
        if not self._is_told:
            micro_batch, plain = self._windows.current.num_done, local(loss.detach())
            if plain.device.type == "cpu":
                self._tell(self._clock.num_updates + 1, micro_batch, plain.item())
            else:
                self._losses.append((micro_batch, plain))

    def look(self) -> None:
        """An update is about to be made: ask for its losses, and read those of earlier ones that have come."""
        while self._asked and self._asked[0][-1].is_there:
            self._read()
        if self._losses:
            numbers, losses = zip(*self._losses)
            self._losses.clear()
            together = losses[0].reshape(1) if len(losses) == 1 else torch.stack(losses)
            self._asked.append((self._clock.num_updates + 1, list(numbers), Readback(together)))

    def _read_all(self) -> None:
        while self._asked:
            self._read()

    def _read(self) -> None:
        update, numbers, asked = self._asked.popleft()
        for micro_batch, loss in zip(numbers, asked.read().tolist()):
            if not math.isfinite(loss) and not self._is_told:
                self._tell(update, micro_batch, loss)

    def _tell(self, update: int, micro_batch: int, loss: float) -> None:
        """A gradient that is not finite spoils the weights of all ranks, and so their next losses: the first to come speaks."""
        self._is_told = True
        rank = self._runtime.rank
        told = {str(rank): f"{loss} in micro-batch {micro_batch}"}
        events.notify("non_finite", source=self._clock, update=update, action="none", losses=told)
        if control.current().set_once(self._key, str(rank).encode()) != str(rank).encode():
            return
        cause = f", or a gradient of update {update - 1} was not finite" if update > 1 else ""
        log.warning(
            "update %d: the loss of micro-batch %d was %s on rank %d%s. Training goes on with it, and nothing after it is likely to "
            "be of use: Accelerator(on_non_finite='skip'), 'stop' or 'raise' leaves such an update out on all ranks, and names "
            "gradients too (docs/non_finite.md)",
            update,
            micro_batch,
            loss,
            rank,
            cause,
            main_process_only=False,
        )


class SkippedUpdates:
    """Counts the updates that fp16's scaler leaves out.

    Args:
        windows: of the run.
        clock: keeps the count.
    """

    def __init__(self, windows: AccumulationWindows, clock: UpdateClock) -> None:
        self._windows = windows
        self._clock = clock

    def note(self) -> None:
        """An optimizer of the closed window was not allowed its step."""
        clock = self._clock
        if not clock.skip(self._windows.current.number):
            return
        events.notify("skipped_update", source=clock, num_skipped=clock.num_skipped)
        if self._fact not in events.facts():
            events.facts().append(self._fact)
            process.at_end(self._leave_bars)
        if clock.num_skipped == _NUM_HOPELESS and not clock.num_updates:
            log.warning(
                "fp16 has skipped all of the first %d updates: nothing was learned. Gradients overflow whatever the scale, so losses "
                "or weights are not finite, or values in the model exceed 65504, float16's largest (a mask of -1e9, a large norm). "
                "mixed_precision='bf16' has float32's range; on_non_finite='raise' says whether it is the loss",
                clock.num_skipped,
            )

    def _fact(self) -> str:
        return f"{self._clock.num_skipped} updates skipped"

    def _leave_bars(self) -> None:
        if self._fact in events.facts():
            events.facts().remove(self._fact)


def _numbers() -> "count[int]":
    """Numbers the notices of this process; every rank makes the same ones."""
    return count()


# ---------------------------------------------------------------- the first window

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
        parts: of the run.
    """

    def __init__(self, parts: RunParts) -> None:
        self._windows, self._prepared, self._strategy = parts.windows, parts.prepared, parts.strategy
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
