"""The windows of a run: which micro-batches make an update, what they weigh, how far the one in progress is. State only.

The gradient of an update is that of (sum of losses over the window and all data ranks) / (sum of weights). Each backward
multiplies its loss by weight / nominal, where nominal is a window weight that all ranks agree on beforehand; when
the window closes with another weight, gradients are corrected once by nominal / actual. So fp16 gradients keep the
size of a mean, and gradients are final when the window's last backward returns::

    open ----> micro-batch: begin() sets is_last; each backward adds weight_i * loss_i / nominal
      ^             |
      |             +-- is_last: weights are summed over ranks (while backward runs), gradients *= nominal / actual
      +-- next -----+             buffers follow rank 0; the window is closed: clip, step, zero_grad act

A window that closes with its first backward divides by what it weighs, where that is known without asking: nothing is
left to correct, and on one process gradients are bit by bit those of `loss.backward()`.

Outside `accumulate` every backward is a window of its own, and the caller steps when it likes: each loss is divided by
the steps, as one of so many equal micro-batches.

How losses are divided is a policy at the end of this file, and `step.py` carries it out. What a batch that is run again
takes back is said here, by `snapshot` and `restore`.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from headway.data.loader import LoaderEvents, PreparedLoader
from headway.log import get_logger

log = get_logger(__name__)

_READ_AHEAD = (
    "%d batches were read before the first of them came to accumulate(): for all of them, the number of samples and the end of "
    "the epoch are those of the last one read. Read each batch when it is its turn; or give backward(loss, weight=...) and "
    "GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False)"
)


@dataclass(frozen=True)
class BatchPiece:
    """A part of a batch, under automatic micro-batching.

    Attributes:
        batch: the batch's number, from 1; 0 for one that is never cut, whether its rows are known or not.
        num_rows: its rows.
        total_rows: the batch's rows.
        is_last: no other piece of the batch follows.
    """

    batch: int
    num_rows: int
    total_rows: int
    is_last: bool

    @property
    def share(self) -> float:
        """Its part of the batch."""
        return self.num_rows / self.total_rows


WHOLE = BatchPiece(0, 1, 1, True)
"""A batch that is not cut."""


@dataclass
class AccumulationWindow:
    """The micro-batches of one update, for one set of models.

    Attributes:
        number: counts the run's windows, from 1.
        num_done: micro-batches begun.
        is_last: the current one closes the window.
        is_closed: its last backward has returned and gradients are final.
        is_empty: it closed with a total weight of zero: no update.
        nominal: the window weight that backwards divide by; None until the first one is agreed.
        next_nominal: what the last full window really weighed.
        local_weight: this rank's weights so far.
        global_weight: all ranks' weights so far; None where only an exchange can tell.
        micro_weight: (this rank's, all ranks') weight of the current micro-batch or piece, set by its first loss.
        has_gradient: a backward of the window has run.
        is_applied: an optimizer took the step, or fp16 skipped it.
        batch: the number of the batch in pieces that was counted last.
        is_by_hand: one backward outside `accumulate`, of several that the caller makes an update from.
        was_left: the one before it ended, and nobody stepped on its gradient or dropped it.
        was_asked: step() or zero_grad() has been called between a backward and the end of the micro-batch, and had to wait.
        set_aside: (ids of parameters, what a strategy has taken of their gradients), while another window that trains them
            too has its turn.
    """

    models: tuple[torch.nn.Module, ...] = ()
    number: int = 0
    num_done: int = 0
    is_last: bool = False
    is_closed: bool = True
    is_empty: bool = False
    nominal: float | None = None
    next_nominal: float | None = None
    local_weight: float = 0.0
    global_weight: float | None = 0.0
    micro_weight: tuple[float, float | None] | None = None
    has_gradient: bool = False
    is_applied: bool = False
    batch: int = 0
    is_by_hand: bool = False
    was_left: bool = False
    was_asked: bool = False
    set_aside: tuple[tuple[frozenset[int], Any], ...] = ()

    def open(self, number: int) -> None:
        """Start over, with the last full window's weight as the nominal one."""
        self.number = number
        self.was_left = self.is_waiting
        self.num_done, self.is_closed, self.is_empty, self.has_gradient = 0, False, False, False
        self.is_applied = False
        self.set_aside = ()
        self.nominal, self.local_weight, self.global_weight = self.next_nominal, 0.0, 0.0

    @property
    def is_waiting(self) -> bool:
        """Has it a gradient that no optimizer has stepped on, and nobody has dropped?"""
        return self.has_gradient and not (self.is_applied or self.is_empty)

    def add(self, local: float, total: float | None) -> None:
        """The micro-batch weighs so much, here and on all ranks together."""
        self.micro_weight = local, total
        self.has_gradient = True
        self.local_weight += local
        self.global_weight = None if total is None or self.global_weight is None else self.global_weight + total

    def close(self, total: float) -> None:
        """Its gradients are final, and it weighs so much in all."""
        self.is_closed, self.is_empty = True, total == 0

    def fail(self) -> None:
        """It starts over with the next micro-batch."""
        self.is_closed = self.is_empty = True


class AccumulationWindows:
    """The windows of a run.

    Args:
        num_steps: micro-batches per update.
        events: of the loaders; those in iteration end windows.
        sync_with_loader: a loader's last batch closes the window.
        sync_each: reduce gradients at every micro-batch.
        elsewhere: the loader in iteration where this run has none of its own.

    Attributes:
        active: the loaders in iteration, innermost last.
        current: the window of the latest micro-batch.
        is_last: the latest micro-batch ends its window.
        num_windows: begun so far.
        piece: what is in hand of the batch.
        trained_on: loaders in whose passes a window began.
        is_inside: the block of a micro-batch is being run.
        restarted: called when the run goes on from elsewhere and windows are counted afresh.
    """

    NOT_ROLLED_BACK: ClassVar[frozenset[str]] = frozenset(
        (
            *("num_steps", "sync_with_loader", "sync_each"),  # settings
            *("active", "_in_hand", "trained_on", "restarted", "_elsewhere"),  # of the loop around, and of who listens
            *("piece", "is_inside", "_is_held"),  # of the block, which whoever runs the batch again leaves and enters
        )
    )
    """All else that a run of a batch changes goes back when it is run again."""

    def __init__(
        self,
        num_steps: int,
        events: LoaderEvents,
        sync_with_loader: bool = True,
        sync_each: bool = False,
        elsewhere: Callable[[], PreparedLoader | None] = lambda: None,
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_loader = sync_with_loader
        self.sync_each = sync_each
        self.active = events.active
        self._in_hand = events.in_hand
        self.restarted: list[Callable[[], None]] = []
        self.current = AccumulationWindow()
        self.is_last = True
        self.num_windows = 0
        self.piece = WHOLE
        self.trained_on: list[PreparedLoader] = []
        self.is_inside = False
        self._is_held = False
        self._elsewhere = elsewhere
        self._num_ahead = 0
        self._by_models: dict[tuple[int, ...], AccumulationWindow] = {}

    # ---------------------------------------------------------------- moves

    def begin(self, models: Sequence[torch.nn.Module]) -> bool:
        """A micro-batch or a piece of one begins; returns whether a window has opened while no other is in progress."""
        key = tuple(map(id, models))
        window = self._by_models.get(key)
        if window is None:
            window = self._by_models[key] = AccumulationWindow(tuple(models))
        elif window is not self.current:
            self._by_models[key] = self._by_models.pop(key)  # the latest is the last
        # A window whose last micro-batch never ran backward (the loop skipped it) goes on until one does.
        is_first = window.is_closed
        if is_first:
            self.num_windows += 1
            window.open(self.num_windows)
            is_first = len(self._by_models) == 1 or self._are_closed(but=window)
        piece = self.piece
        if not piece.batch or window.batch != piece.batch:
            window.num_done += 1
            window.batch = piece.batch
        window.micro_weight, window.was_asked = None, False
        loader = self.note_loader()
        self._note_reading(window, self._in_hand.count(loader) if loader is not None else 1)
        self._in_hand.clear()
        is_end = self.sync_with_loader and loader is not None and loader.is_last
        self.is_last = window.is_last = self._ends(window, is_end) and piece.is_last
        self.current, self.is_inside, self._is_held = window, True, False
        return is_first

    def _ends(self, window: AccumulationWindow, is_end: bool) -> bool:
        """Is its micro-batch the last one, of a window or (`is_end`) of the data?"""
        return is_end or window.num_done >= self.num_steps

    def _note_reading(self, window: AccumulationWindow, num_read: int) -> None:
        """Warn where the micro-batches of a window are read before the first of them begins."""
        if num_read:
            self._num_ahead = num_read - 1
        elif self._num_ahead and window is self.current and window.num_done > 1:
            log.warning_once(_READ_AHEAD, self._num_ahead + 1)

    def begin_alone(self) -> AccumulationWindow:
        """A backward comes outside any micro-batch: a window of its own."""
        self.num_windows += 1
        self._in_hand.clear()
        self.note_loader()
        self.is_last = True
        self.current = AccumulationWindow(
            number=self.num_windows, num_done=1, is_last=True, is_by_hand=self.num_steps > 1
        )
        return self.current

    def leave(self) -> None:
        """The micro-batch's block is left."""
        self.is_inside = False

    def withdraw(self) -> None:
        """The piece's block is left to be run again."""
        self.is_inside = self.is_last = False

    def hand_out(self, piece: BatchPiece) -> None:
        """The micro-batches that follow are this piece of a batch."""
        self.piece = piece

    def set_due(self, is_due: bool) -> None:
        """Let step() and zero_grad() act or wait, until the next micro-batch begins: for loops that make windows by hand."""
        self._is_held = not is_due

    def set_steps(self, num_steps: int) -> None:
        """So many micro-batches make an update from now on."""
        self.num_steps = num_steps

    def note_loader(self) -> PreparedLoader | None:
        """The loader in iteration, which is trained on from now on."""
        loader = self.loader
        if self.active and loader not in self.trained_on:
            self.trained_on.append(self.active[-1])
        return loader

    # ---------------------------------------------------------------- questions

    @property
    def loader(self) -> PreparedLoader | None:
        """The innermost loader in iteration; where this Accelerator has none at all, that of another one."""
        return self.active[-1] if self.active else self._elsewhere()

    @property
    def are_several(self) -> bool:
        """Do different sets of models have windows of their own?"""
        return len(self._by_models) > 1

    def is_first(self, window: AccumulationWindow) -> bool:
        """Is it the first one of its models?"""
        return window.number <= len(self._by_models)

    @property
    def num_read(self) -> int:
        """Most batches that one loader has given since the micro-batch began."""
        return max(Counter(map(id, self._in_hand)).values(), default=0)

    def latest(self, models: Container[int]) -> AccumulationWindow | None:
        """The window that one of these models, by their ids, learned in last; the current one, where that has no models."""
        if not self.current.models:
            return self.current
        found = (w for w in reversed(self._by_models.values()) if any(id(model) in models for model in w.models))
        return next(found, None)

    @property
    def is_final(self) -> bool:
        """Are the gradients those of a whole window, so that clip and step may act?"""
        return self.may_step(self.current)

    def may_step(self, window: AccumulationWindow) -> bool:
        """Are its gradients those of the whole window?"""
        return window.is_closed and not self._is_held

    @property
    def is_due(self) -> bool:
        """Does the micro-batch in hand end its window, so that step() will act?"""
        return self.is_last and not self._is_held

    def may_clear(self, window: AccumulationWindow) -> bool:
        """Does no gradient of it, in progress, lie in the tensors, so that zero_grad may act?"""
        return (window.is_closed or not window.has_gradient) and not self._is_held

    @property
    def is_partial(self) -> bool:
        """Is a part of a window's gradient in the tensors, and the loop that makes it under way?"""
        window = self.current
        return window.has_gradient and not window.is_closed and (self.is_inside or bool(self.active))

    @property
    def is_in_hand(self) -> bool:
        """Is the batch of the latest micro-batch the last one that its loader gave?"""
        return bool(self.active) and not self._in_hand

    @property
    def is_unfinished(self) -> bool:
        """Has a window begun whose update, or the decision to make none, is still to come?"""
        window = self.current
        return window.num_done > 0 and not (window.is_applied or (window.is_closed and window.is_empty))

    @property
    def is_cut(self) -> bool:
        """Is a piece of a batch in hand, rather than a whole one?"""
        return self.piece.batch > 0

    @property
    def are_closed(self) -> bool:
        """Is no window in progress?"""
        return self._are_closed(None)

    def _are_closed(self, but: AccumulationWindow | None) -> bool:
        return all(window.is_closed or window is but for window in self._by_models.values())

    def waiting_beside(self, window: AccumulationWindow) -> list[AccumulationWindow]:
        """The others with a gradient that no optimizer has stepped on yet."""
        if not self.are_several:
            return []
        others = (other for other in self._by_models.values() if other is not window)
        return [other for other in others if other.is_waiting]

    # ---------------------------------------------------------------- another place

    def nominal_weights(self, models: Sequence[torch.nn.Module]) -> list[tuple[list[int], float]]:
        """For each set of models, by their numbers, the weight that its next window will divide by."""
        numbers = {id(model): number for number, model in enumerate(models)}
        return [
            ([numbers[key] for key in keys if key in numbers], window.next_nominal)
            for keys, window in self._by_models.items()
            if window.next_nominal is not None
        ]

    def resume(
        self,
        models: Sequence[torch.nn.Module],
        nominal_weights: Iterable[tuple[Sequence[int], float]],
        num_updates: int,
    ) -> None:
        """Drop windows in progress; the next ones divide by these weights, as an uninterrupted run would."""
        self._start_over()
        self.num_windows = num_updates
        for numbers, weight in nominal_weights:
            chosen = tuple(models[number] for number in numbers)
            self._by_models[tuple(map(id, chosen))] = AccumulationWindow(chosen, next_nominal=weight)

    def reset(self) -> None:
        """Forget all windows."""
        self._start_over()
        self.piece = WHOLE

    def _start_over(self) -> None:
        self._by_models.clear()
        self.trained_on.clear()
        self.current, self.is_last, self.is_inside = AccumulationWindow(), True, False
        for listener in self.restarted:
            listener()

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs to take a batch back: all but NOT_ROLLED_BACK, a new counter included."""
        kept = {name: value for name, value in vars(self).items() if name not in self.NOT_ROLLED_BACK}
        kept["_by_models"] = {key: (window, replace(window)) for key, window in self._by_models.items()}
        return kept

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot, which stays good; windows begun by a batch that did not happen are forgotten."""
        vars(self).update(snapshot)
        self._by_models = {}
        for key, (window, saved) in snapshot["_by_models"].items():
            vars(window).update(vars(saved))
            self._by_models[key] = window

    def restore_weights(self, snapshot: dict[str, Any]) -> None:
        """Of a snapshot, only the weights that next windows divide by."""
        for window, saved in snapshot["_by_models"].values():
            window.next_nominal = saved.next_nominal


@dataclass
class UpdateClock:
    """How far training is: progress is counted in updates that happened.

    Attributes:
        num_updates: windows whose optimizer stepped; several optimizers that step in one window count as one update.
        num_skipped: windows in which fp16's scaler let none step.
    """

    num_updates: int = 0
    num_skipped: int = 0
    _last_window: int = -1
    _last_skipped: int = -1

    def count(self, window: int) -> None:
        """An optimizer stepped in the window of that number."""
        if window != self._last_window:
            self._last_window = window
            self.num_updates += 1

    def skip(self, window: int) -> bool:
        """An optimizer was not let step in the window of that number; is it the first of the window?"""
        is_first = window != self._last_skipped
        self._last_skipped = window
        self.num_skipped += is_first
        return is_first

    def resume(self, num_updates: int) -> None:
        """Go on from so many updates; windows are numbered afresh."""
        self.num_updates, self._last_window, self._last_skipped = num_updates, -1, -1

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs to take a batch back: everything."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot, which stays good."""
        vars(self).update(snapshot)


class LossPolicy:
    """How losses are divided: by the mean over everything in the window, on all ranks. A compatibility layer brings its own."""

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """What a backward multiplies its mean loss by, given that the engine divides by `divisor`."""
        return weight * divisor / nominal

    def correction(self, nominal: float, actual: float) -> float:
        """What a closing window multiplies gradients by."""
        return nominal / actual


class ConstantDivision(LossPolicy):
    """The plain recipe: every loss divided by the number of steps, ranks averaged, whatever the window really held."""

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """1 / steps."""
        return 1 / num_steps

    def correction(self, nominal: float, actual: float) -> float:
        """1: gradients stay as they are."""
        return 1.0
