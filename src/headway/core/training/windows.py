"""State of accumulation windows: which micro-batches form an update, their weights, and the progress of training.

The gradient of an update is the gradient of (sum of losses over the window and all data ranks) / (sum of weights).
Each backward multiplies its loss by weight / nominal. The nominal weight is the window's expected total weight, which
all ranks agree on in advance. If the actual total differs, gradients are multiplied once by nominal / actual. So fp16
gradients keep the magnitude of a mean, and gradients are final when the window's last backward returns::

    open ----> begin_micro_batch: is_last is set; each backward adds weight_i * loss_i / nominal
      ^             |
      |             +-- is_last: weights are summed over ranks (while backward runs), gradients *= nominal / actual
      +-- next -----+             buffers are copied from rank 0; the window is closed: clip, step, zero_grad act

If a window has only one backward, and its actual weight is known without communication, the loss is divided by the
actual weight. Gradients then need no correction. In a single-process run, they are bitwise identical to those of
`loss.backward()`.

Outside `accumulate`, every backward is a separate window, and the caller can step at any time. Each loss is then
divided by `gradient_accumulation_steps`, as if it were one of that many equal micro-batches.

`begin_micro_batch` finds the window of a micro-batch. The window is `current` until the next micro-batch begins, and
backward, clip, step and zero_grad read its fields. The fields are plain attributes, because they are read several times
per micro-batch.

The policies at the end of this file define how losses are divided, and `step.py` applies them. `snapshot` and `restore`
define which state is restored when a batch is run again.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.log import get_logger

log = get_logger(__name__)

_READ_AHEAD = (
    "%d batches were read before the first of them was used in accumulate(), so the number of samples and the end of the epoch of "
    "the last one count for all of them. Read each batch right before its block, or give backward(loss, weight=...) and "
    "GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False)"
)

_SAVED_IN_ROUND = (
    "a checkpoint was saved between two updates on batches that were read together (%d batches, as in `for one, other in "
    "zip(...)`). It counts all of them as trained on, so a run that resumes from it leaves out the updates after the save. Save "
    "after the last update of the round, or read each batch right before its update"
)


@dataclass(frozen=True)
class BatchPiece:
    """Part of a batch that automatic micro-batching has split, to be run as one micro-batch.

    Attributes:
        batch: Number of the batch, from 1. 0 for a batch that is never split, even if its rows are known.
        num_rows: Number of rows in the piece. 0 for a piece that only repeats rows, so that all ranks run equally many
            pieces.
        total_rows: Number of rows in the batch.
        is_last: Whether this is the batch's last piece.
    """

    batch: int
    num_rows: int
    total_rows: int
    is_last: bool

    @property
    def share(self) -> float:
        """Fraction of the batch's rows that are in this part of the batch."""
        return self.num_rows / self.total_rows


WHOLE = BatchPiece(0, 1, 1, True)
"""Value of `AccumulationWindows.piece` while a batch is not split, and only its loader, if any, counts its rows."""


class LossWeight(NamedTuple):
    """Weight of a micro-batch's loss, such as its number of rows or tokens.

    Attributes:
        local: Weight on this rank. 0 if this rank's batch has only padding.
        over_ranks: Sum of the weights over all ranks. None if only a collective can provide it.
    """

    local: float
    over_ranks: float | None


@dataclass
class AccumulationWindow:
    """Accumulation window: the state of the micro-batches of one update, for one set of models.

    "Weight" means the weight of a loss, such as its number of rows or tokens.

    Attributes:
        models: Models that train in this window. Empty for a backward outside `accumulate`.
        number: Number of the window in the run, from 1. 0 until the first window is opened.
        num_done: Number of micro-batches begun. The parts of a split batch count as one.
        is_first: Whether this is the first window of its models since the run was started or resumed. Only such windows
            are checked for mistakes in the training loop.
        is_last: Whether the current micro-batch closes the window.
        is_closed: Whether the backward of its last micro-batch has returned, so that gradients are final. Also True
            before the window is opened, and after an error in it.
        is_empty: Whether it closed with a total weight of zero or after an error, so that no update follows.
        nominal: Weight by which each backward of the window divides its loss. None while it is unknown.
        next_nominal: Actual weight of the last full window, which becomes `nominal` in the next one.
        local_weight: Sum of this rank's weights so far.
        global_weight: Sum of all ranks' weights so far. None if only a collective can provide it.
        micro_weight: Weight of the current micro-batch's loss. None before the micro-batch's first loss.
        has_gradient: Whether a backward of the window has run.
        is_applied: Whether an optimizer made its step, or fp16 skipped it.
        batch: Number of the batch to which the latest micro-batch belongs. 0 without automatic micro-batching.
        is_by_hand: Whether this is a single backward outside `accumulate`, one of several that the script combines into
            an update.
        was_left: Whether the previous window ended without an optimizer step, and its gradients were not dropped.
        was_step_called_early: Whether step() or zero_grad() was called between a backward and the end of the
            micro-batch, where it had no effect.
        set_aside: Pairs of (parameter IDs, gradients). These gradients are detached from their parameters while another
            window trains the same parameters.
    """

    models: tuple[torch.nn.Module, ...] = ()
    number: int = 0
    num_done: int = 0
    is_first: bool = False
    is_last: bool = False
    is_closed: bool = True
    is_empty: bool = False
    nominal: float | None = None
    next_nominal: float | None = None
    local_weight: float = 0.0
    global_weight: float | None = 0.0
    micro_weight: LossWeight | None = None
    has_gradient: bool = False
    is_applied: bool = False
    batch: int = 0
    is_by_hand: bool = False
    was_left: bool = False
    was_step_called_early: bool = False
    set_aside: tuple[tuple[frozenset[int], Any], ...] = ()

    def open(self, number: int) -> None:
        """Reset this object for the next accumulation window of its models.

        The losses of that window are divided by the total loss weight of the last full window, if there was one.

        Args:
            number: Number of the new window in the run.
        """
        self.is_first = not self.number
        self.number = number
        self.was_left = not self.is_applied and self.is_waiting
        self.num_done = 0
        self.is_closed = False
        self.is_empty = False
        self.has_gradient = False
        self.is_applied = False
        self.set_aside = ()
        self.nominal = self.next_nominal
        self.local_weight = 0.0
        self.global_weight = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the window has gradients on which no optimizer has stepped, and which were not dropped."""
        return self.has_gradient and not (self.is_applied or self.is_empty)

    def close(self, total: float) -> None:
        """Mark the accumulation window as closed, because its gradients are final. An optimizer may then step on them.

        Args:
            total: Sum of the loss weights of the window's micro-batches over all ranks, such as a number of rows or
                tokens. If it is 0, no update follows.
        """
        self.is_closed = True
        self.is_empty = total == 0

    def close_after_error(self) -> None:
        """Close the accumulation window after an error, so that its gradients are not used.

        The next micro-batch starts a new window.
        """
        self.is_closed = self.is_empty = True


class AccumulationWindows:
    """All accumulation windows of a run, with a reference to the current window.

    Args:
        num_steps: Micro-batches per update.
        events: Loader events, and the loaders that are being iterated.
        sync_with_loader: Whether a loader's last batch closes the window.
        sync_each: Whether to reduce gradients at every micro-batch.
        elsewhere: Function that returns another Accelerator's current loader, used if no loader of this run is being
            iterated. By default it returns None.
        clips_partial_gradients: Whether clipping also changes the partial gradients of an unfinished window. Default:
            False.

    Attributes:
        active: Loaders that are being iterated, innermost last.
        current: Window of the latest micro-batch.
        are_several: Whether different sets of models have separate windows.
        is_last: Whether the latest micro-batch ends its window.
        num_windows: Number of windows begun so far. After a resume, it continues from the number of updates made.
        piece: Part of a split batch that is being processed, or `WHOLE`.
        trained_on: Loaders that were being iterated when a micro-batch began. Of nested loaders, only the innermost.
        read_in_training: All loaders that were being iterated when a micro-batch began, such as both of
            `zip(one, other)`.
        is_inside: Whether the script is inside a `with accelerator.accumulate()` block.
        is_held: Whether step() and zero_grad() have no effect before the next micro-batch, as set by `set_due`.
        restarted: Functions to call when all windows are dropped, such as when the run continues from a loaded state.
    """

    NOT_ROLLED_BACK: ClassVar[frozenset[str]] = frozenset(
        (
            # settings
            "num_steps",
            "sync_with_loader",
            "sync_each",
            "clips_partial_gradients",
            # state of the surrounding loop, and the listeners
            "active",
            "_in_hand",
            "trained_on",
            "read_in_training",
            "restarted",
            "_elsewhere",
            # state of the block, which a replay leaves and enters again
            "piece",
            "is_inside",
            "is_held",
        )
    )
    """Names of attributes that `snapshot` leaves out. `restore` resets all other attributes when a batch is run
    again.
    """

    def __init__(
        self,
        num_steps: int,
        events: LoaderEvents,
        sync_with_loader: bool = True,
        sync_each: bool = False,
        elsewhere: Callable[[], PreparedLoader | None] = lambda: None,
        *,
        clips_partial_gradients: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_loader = sync_with_loader
        self.sync_each = sync_each
        self.clips_partial_gradients = clips_partial_gradients
        self.active = events.active
        self._in_hand = events.in_hand
        self.restarted: list[Callable[[], None]] = []
        self.current = AccumulationWindow()
        self.are_several = False
        self.is_last = True
        self.num_windows = 0
        self.piece = WHOLE
        self.trained_on: list[PreparedLoader] = []
        self.read_in_training: list[PreparedLoader] = []
        self.is_inside = False
        self.is_held = False
        self._elsewhere = elsewhere
        self._num_ahead = 0
        self._num_in_round = 0
        self._is_round_saved = False
        self._by_models: dict[tuple[int, ...], AccumulationWindow] = {}

    # ---------------------------------------------------------------- changes

    def begin_micro_batch(self, models: Sequence[torch.nn.Module]) -> bool:
        """Begin a micro-batch of these models. `current` becomes its accumulation window.

        If a batch was split to fit into memory, each of its parts is a micro-batch here, but only the first part is
        counted.

        Returns:
            Whether the micro-batch opened a new window while no other window was unfinished.
        """
        key = tuple(map(id, models))
        window = self._by_models.get(key)
        if window is None:
            window = self._by_models[key] = AccumulationWindow(tuple(models))
            self.are_several = len(self._by_models) > 1
        elif window is not self.current:
            self._by_models[key] = self._by_models.pop(key)  # keep the dict in order of use, latest last
        # If the last micro-batch of a window never ran backward (the loop skipped it), the window continues until one
        # does.
        opened_with_none_unfinished = window.is_closed
        if opened_with_none_unfinished:
            self.num_windows += 1
            window.open(self.num_windows)
            opened_with_none_unfinished = not self.are_several or self._are_closed(but=window)
        piece = self.piece
        if not piece.batch or window.batch != piece.batch:
            window.num_done += 1
            window.batch = piece.batch
        window.micro_weight = None
        window.was_step_called_early = False
        is_end = self._note_batch(window)
        self.is_last = window.is_last = self._is_complete(window, is_end) and piece.is_last
        self.current = window
        self.is_inside = True
        self.is_held = False
        return opened_with_none_unfinished

    def _note_batch(self, window: AccumulationWindow) -> bool:
        """Record which loader the micro-batch is from. Warn of batches read ahead, and of a save between them.

        Returns:
            Whether this is the loader's last batch and `sync_with_loader` is set, so that the batch ends the window.
        """
        active = self.active
        loader = active[-1] if active else self._elsewhere()
        if active and (len(active) > 1 or loader not in self.trained_on):
            self._note_loaders()
        num_read = 1 if loader is None else self._in_hand.count(loader)
        if num_read > 1 or self._num_ahead:
            self._note_reading(window, num_read)
        if self._in_hand:
            self._num_in_round = len(self._in_hand)
            self._is_round_saved = False
            self._in_hand.clear()
        elif self._is_round_saved and window.num_done == 1:
            log.warning_once(_SAVED_IN_ROUND, self._num_in_round)
        return self.sync_with_loader and loader is not None and loader.pass_position.share.is_last

    def _is_complete(self, window: AccumulationWindow, is_end: bool) -> bool:
        """Whether the current micro-batch completes its accumulation window.

        Args:
            window: Window of the micro-batch.
            is_end: Whether the batch is its loader's last one, and therefore ends the window.
        """
        return is_end or window.num_done >= self.num_steps

    def _note_reading(self, window: AccumulationWindow, num_read: int) -> None:
        """Record how many batches were read ahead. Warn if a later micro-batch of the window uses one of them.

        Args:
            window: Window of the micro-batch.
            num_read: Number of batches that were read since the last micro-batch.
        """
        if num_read:
            self._num_ahead = num_read - 1
        elif self._num_ahead and window is self.current and window.num_done > 1:
            log.warning_once(_READ_AHEAD, self._num_ahead + 1)

    def note_save(self) -> None:
        """Record a save. If batches that were read together are trained on before and after it, a warning follows.

        A save inside an accumulation window needs no warning, because the resumed run starts that window again and
        reads its batches again.
        """
        self._is_round_saved = self._num_in_round > 1 and bool(self.active) and not self.is_unfinished

    def begin_lone_window(self) -> AccumulationWindow:
        """Begin and return a separate accumulation window for a backward outside of any `accumulate` block."""
        self.num_windows += 1
        self._in_hand.clear()
        self._note_loaders()
        self.is_last = True
        self.current = AccumulationWindow(
            number=self.num_windows, num_done=1, is_last=True, is_by_hand=self.num_steps > 1
        )
        return self.current

    def leave_block(self) -> None:
        """Record that the loop has left the `with accelerator.accumulate()` block of the current micro-batch.

        A backward that follows is then treated as one outside any micro-batch.
        """
        self.is_inside = False

    def set_piece(self, piece: BatchPiece) -> None:
        """Set the part of a batch that the following micro-batches process."""
        self.piece = piece

    def withdraw_piece(self) -> None:
        """Record that the `accumulate` block of the current part of a batch has ended early, and will be run again."""
        self.is_inside = self.is_last = False

    def set_due(self, is_due: bool) -> None:
        """Set whether calls to step() and zero_grad() have an effect until the next micro-batch begins.

        This method is for loops that define accumulation windows themselves.
        """
        self.is_held = not is_due

    def set_steps(self, num_steps: int) -> None:
        """Set the number of micro-batches per update from now on."""
        self.num_steps = num_steps

    def _note_loaders(self) -> None:
        """Record all loaders that are being iterated as used in training."""
        if self.active and self.active[-1] not in self.trained_on:
            self.trained_on.append(self.active[-1])
        for each in self.active:
            if each not in self.read_in_training:
                self.read_in_training.append(each)

    # ---------------------------------------------------------------- queries

    @property
    def loader(self) -> PreparedLoader | None:
        """Innermost loader that is being iterated, or None.

        If none of this run's loaders is being iterated, it is the loader that `elsewhere` returns, if any.
        """
        return self.active[-1] if self.active else self._elsewhere()

    @property
    def num_read(self) -> int:
        """Largest number of batches that any single loader has returned since the last micro-batch began."""
        return max(Counter(map(id, self._in_hand)).values(), default=0)

    def find_latest(self, models: Container[int]) -> AccumulationWindow | None:
        """Return the latest accumulation window that trained one of these models, or None.

        A window that was only prepared for the first micro-batch of a resumed run is skipped, because it has trained
        nothing yet.

        Args:
            models: `id` of each model. If the current window has no models, as for a backward outside `accumulate`, it
                is returned whatever `models` contains.
        """
        if not self.current.models:
            return self.current
        opened = (window for window in reversed(self._by_models.values()) if window.number)
        return next((window for window in opened if any(id(model) in models for model in window.models)), None)

    @property
    def is_final(self) -> bool:
        """Whether the current accumulation window's gradients are final, so that clipping and step() take effect."""
        return self.can_step(self.current)

    def can_step(self, window: AccumulationWindow) -> bool:
        """Whether an accumulation window's gradients are final, and `set_due` has not disabled optimizer steps."""
        return window.is_closed and not self.is_held

    @property
    def is_due(self) -> bool:
        """Whether the current micro-batch ends its window, and `set_due` has not disabled optimizer steps."""
        return self.is_last and not self.is_held

    @property
    def is_partial(self) -> bool:
        """Whether gradients cover only part of an accumulation window that is still being computed."""
        window = self.current
        return window.has_gradient and not window.is_closed and (self.is_inside or bool(self.active))

    @property
    def is_in_hand(self) -> bool:
        """Whether a loader is being iterated, and no batch has been read since the latest micro-batch began."""
        return bool(self.active) and not self._in_hand

    @property
    def is_unfinished(self) -> bool:
        """Whether the current accumulation window has begun, and no optimizer has stepped on its gradients yet.

        A window that closed with a loss weight of 0 or after an error counts as finished, because no update follows.
        """
        window = self.current
        return window.num_done > 0 and not (window.is_applied or (window.is_closed and window.is_empty))

    @property
    def is_cut(self) -> bool:
        """Whether the current micro-batch is a piece that automatic micro-batching has made of a batch.

        The piece can also be the whole batch, if all of it fits into memory.
        """
        return self.piece.batch > 0

    @property
    def are_closed(self) -> bool:
        """Whether all accumulation windows are closed, so that no gradients are partial."""
        return self._are_closed(None)

    def _are_closed(self, but: AccumulationWindow | None) -> bool:
        return all(window.is_closed or window is but for window in self._by_models.values())

    def find_waiting(self, window: AccumulationWindow) -> list[AccumulationWindow]:
        """Return the other accumulation windows that have gradients on which no optimizer has stepped yet.

        Args:
            window: Window that is left out of the result.
        """
        if not self.are_several:
            return []
        others = (other for other in self._by_models.values() if other is not window)
        return [other for other in others if other.is_waiting]

    # ---------------------------------------------------------------- resume and replay

    def list_nominal_weights(self, models: Sequence[torch.nn.Module]) -> list[tuple[list[int], float]]:
        """Return the total weight by which losses are divided in the next accumulation window of each set of models.

        Args:
            models: All models. The returned indices are positions in this list.

        Returns:
            A pair (indices of the models, weight) for each set of models that share an accumulation window. Sets that
                have not completed a full window yet are left out.
        """
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
        """Drop unfinished accumulation windows, and set the weights by which the next ones divide their losses.

        A resumed run thus computes the same updates as an uninterrupted one.

        Args:
            models: All models, in the order that the indices refer to.
            nominal_weights: Pairs of (model indices, window weight), as `list_nominal_weights()` returns them.
            num_updates: Number of updates made so far. Later windows are numbered from it.
        """
        self._start_over()
        self.num_windows = num_updates
        for numbers, weight in nominal_weights:
            chosen = tuple(models[number] for number in numbers)
            self._by_models[tuple(map(id, chosen))] = AccumulationWindow(chosen, next_nominal=weight)
        self.are_several = len(self._by_models) > 1

    def reset(self) -> None:
        """Drop all accumulation windows and the current piece of a batch, and call the functions in `restarted`."""
        self._start_over()
        self.piece = WHOLE

    def _start_over(self) -> None:
        self._by_models.clear()
        self.trained_on.clear()
        self.read_in_training.clear()
        self.current = AccumulationWindow()
        self.are_several = False
        self.is_last = True
        self.is_inside = False
        for listener in self.restarted:
            listener()

    def snapshot(self) -> dict[str, Any]:
        """Return the state that `restore` needs to undo a batch: all attributes except those in `NOT_ROLLED_BACK`."""
        kept = {name: value for name, value in vars(self).items() if name not in self.NOT_ROLLED_BACK}
        kept["_by_models"] = {key: (window, replace(window)) for key, window in self._by_models.items()}
        return kept

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the state from a snapshot, and drop the accumulation windows that have begun since.

        A snapshot can be restored several times.
        """
        vars(self).update(snapshot)
        self._by_models = {}
        for key, (window, saved) in snapshot["_by_models"].items():
            vars(window).update(vars(saved))
            self._by_models[key] = window

    def restore_weights(self, snapshot: dict[str, Any]) -> None:
        """Restore only the total loss weights by which the next accumulation windows divide their losses.

        Args:
            snapshot: Return value of `snapshot()`.
        """
        for window, saved in snapshot["_by_models"].values():
            window.next_nominal = saved.next_nominal


@dataclass
class UpdateClock:
    """Counter of a run's updates. The progress of training is measured in updates.

    Attributes:
        num_updates: Number of accumulation windows in which an optimizer stepped. Several optimizers in one window
            count once.
        num_skipped: Number of accumulation windows in which fp16's gradient scaler skipped the optimizer step.
    """

    num_updates: int = 0
    num_skipped: int = 0
    _last_window: int = -1
    _last_skipped: int = -1

    def count_update(self, window: int) -> None:
        """Count the update of the accumulation window with this number.

        Steps of further optimizers in one window are not counted.
        """
        if window != self._last_window:
            self._last_window = window
            self.num_updates += 1

    def count_skip(self, window: int) -> bool:
        """Count the skipped update of the accumulation window with this number, once per window.

        Returns:
            Whether this was the first skipped step of the window.
        """
        is_first = window != self._last_skipped
        self._last_skipped = window
        self.num_skipped += is_first
        return is_first

    def resume(self, num_updates: int) -> None:
        """Continue the count from `num_updates` updates, because the run continues from a loaded state."""
        self.num_updates = num_updates
        self._last_window = -1
        self._last_skipped = -1

    def snapshot(self) -> dict[str, Any]:
        """Return the clock's counts, which `restore` needs to undo a batch."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the clock's counts from a snapshot, which can be restored several times."""
        vars(self).update(snapshot)


class LossPolicy:
    """Policy that sets the factor by which each loss is multiplied before its backward.

    This base class averages over all items of the accumulation window on all ranks. Subclasses for other libraries'
    scripts average differently.
    """

    @property
    def weighs_losses(self) -> bool:
        """Whether the factor of a loss depends on its accumulation window.

        If so, every backward must go through `Accelerator.backward`. This is true for `LossPolicy` itself. It is false
        for subclasses, which use constant factors, so that a script may run backward itself.
        """
        return type(self) is LossPolicy

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """Return the factor by which a backward multiplies its mean loss.

        Args:
            weight: Weight of the loss, such as its number of rows or tokens.
            nominal: Divisor of the losses: the assumed total weight of the window.
            divisor: Number by which DDP or another engine itself divides gradients.
            num_steps: Micro-batches per update.
        """
        return weight * divisor / nominal

    def correction(self, nominal: float, actual: float) -> float:
        """Return the factor by which gradients are multiplied when an accumulation window closes.

        Args:
            nominal: Weight by which the backwards of the window divided their losses.
            actual: Sum of the weights of the window's micro-batches over all ranks.
        """
        return nominal / actual


class ConstantDivision(LossPolicy):
    """Policy that divides every loss by the number of micro-batches per update and averages over ranks.

    The number of items that a loss covers has no effect.
    """

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """Return 1 / `num_steps`."""
        return 1 / num_steps

    def correction(self, nominal: float, actual: float) -> float:
        """Return 1, because gradients need no correction."""
        return 1.0
