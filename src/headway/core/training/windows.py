"""State of accumulation windows: which micro-batches form an update, and their weights.

An accumulation window consists of the micro-batches of one update. Its gradient must be the exact mean over all items
(such as samples or tokens) of these micro-batches on all ranks. A loss is the mean over the items of one micro-batch on
one rank, and its weight is the number of these items. So the gradient of an update is::

    sum(weight * gradient of the loss) / total weight          both summed over the window's losses on all ranks

The total weight is unknown until the window's last loss. So a *nominal weight*, a prediction of the total weight, is
used in its place, and the error of the prediction is corrected at the end of the window::

    each backward        loss *= weight / nominal weight
    end of the window    weights are summed over ranks (while the last backward runs)
                         gradients *= nominal weight / total weight          (the correction)

Dividing at once, and not only at the end, keeps the magnitude of fp16 gradients at that of a mean. The prediction is the
total weight of the last full window. In the first window, it is the weight of the first micro-batch on all ranks times
the number of micro-batches per update. If a window has only one backward, and its total weight is known without
communication, it is used as nominal weight. Gradients then need no correction. In a single-process run, they are
bitwise identical to those of `loss.backward()`. `LossPolicy` (`loss_policy.py`) computes both factors, and `step.py` applies
them.

When the last backward of a window has returned, the window is closed: its gradients are final, and clip, step and
zero_grad take effect. The next micro-batch opens the next window.

A backward outside `accumulate` is called a standalone backward. It is a window of its own, because the caller can step
after any of them. If the run accumulates gradients, its loss is divided by `gradient_accumulation_steps`, as if it were
one of that many equal micro-batches.

`begin_micro_batch` finds the window of a micro-batch. The window is `current` until the next micro-batch begins, and
backward, clip, step and zero_grad read its fields. The fields are plain attributes, because they are read several times
per micro-batch.

`snapshot` and `restore` define which state is restored when a batch is run again, because memory ran out.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from headway.core.data.batch_reads import BatchReads
from headway.core.data.loader import PreparedLoader
from headway.core.training.loss_policy import (
    ConstantDivision as ConstantDivision,  # docs/accumulation.md imports it from here
)
from headway.log import get_logger

log = get_logger(__name__)

_WITHOUT_WEIGHT = (
    "the last %d accumulation windows had a total loss weight of 0 on all ranks, so they made no update: parameters, optimizer state "
    "and schedule stay as they are. Each of their losses was a mean over no items, such as over no label other than -100. Look at "
    "the labels of a batch: were the tokens to be learned truncated, or all tokens masked? (docs/accumulation.md)"
)
_NUM_WITHOUT_WEIGHT_AT_START = 2
"""Number of windows without weight in a row that are a mistake if no window has had a weight before."""
_NUM_WITHOUT_WEIGHT = 20
"""Number of windows without weight in a row that are a mistake later in a run, when a few of them may be due to the data."""


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


UNSPLIT = BatchPiece(0, 1, 1, True)
"""Value of `AccumulationWindows.piece` if the batch is not split, and its number of rows is unknown or counted by its
loader.
"""


class LossWeight(NamedTuple):
    """Weight of a micro-batch's loss, such as its number of rows or tokens.

    Attributes:
        local: Weight on this rank. 0 if this rank's batch has only padding.
        over_ranks: Sum of the weights over all ranks. None if only a collective can provide it.
    """

    local: float
    over_ranks: float | None


class WindowStash(NamedTuple):
    """Gradients of an accumulation window that are detached from their parameters.

    Attributes:
        parameter_ids: IDs of the parameters.
        gradients: Result of `Strategy.stash_gradients`.
    """

    parameter_ids: frozenset[int]
    gradients: Any


@dataclass
class AccumulationWindow:
    """Accumulation window: the state of the micro-batches of one update, for one set of models.

    One object serves all windows of a set of models, one after another, because `open` resets it. The fields are
    grouped: position, progress, loss weights (such as numbers of rows or tokens), and special cases.

    Attributes:
        models: Models that train in this window. Empty for a backward outside `accumulate`.
        number: Number of the window in the run, from 1. 0 until the first window is opened.
        num_done: Number of micro-batches begun. The parts of a split batch count as one.
        batch: Number of the batch to which the latest micro-batch belongs, from 1. 0 without automatic micro-batching.
        is_first: Whether this is the first window of its models since the run was started or resumed. Only such windows
            are checked for mistakes in the training loop.
        is_last: Whether the current micro-batch closes the window.
        has_gradient: Whether a backward of the window has run.
        is_closed: Whether the backward of its last micro-batch has returned, so that gradients are final. Also True
            before the window is opened, and after an error in it.
        is_discarded: Whether it closed with a total weight of zero or after an error, so that no update follows.
        is_applied: Whether an optimizer's step() came after the window closed, even if the guard refused the update or
            fp16 skipped it. Also True after zero_grad() has dropped the gradients of a closed window.
        nominal_weight: Weight by which each backward of the window divides its loss. None while it is unknown.
        next_nominal_weight: Total weight of the last full window, which becomes `nominal_weight` in the next one. None
            before a full window has closed.
        local_weight: Sum of this rank's weights so far.
        global_weight: Sum of all ranks' weights so far. None if only a collective can provide it. For a backward outside
            `accumulate`, the sum over all such backwards since the last optimizer step.
        micro_weight: Weight of the current micro-batch's loss. None before the micro-batch's first loss.
        sums_weights: Whether only a collective can provide the sum of the ranks' weights, because the script passes
            weights on all ranks. Kept from one window of the same models to the next.
        has_given_weights: Whether the script passed a weight for a loss of this window.
        has_default_weights: Whether the script passed no weight for a loss of this window.
        num_without_weight: Number of windows of these models in a row, up to the last closed one, that had a total
            weight of zero.
        has_had_weight: Whether any closed window of these models had a total weight above zero.
        is_standalone_fraction: Whether this is a backward outside `accumulate` in a run that accumulates gradients. The
            script then combines several of them into an update.
        has_leftover_gradients: Whether the previous window of these models ended without an optimizer step, and its
            gradients were not dropped.
        was_step_called_early: Whether step() or zero_grad() was called between a backward and the end of the
            micro-batch, where it had no effect.
        stashed_gradients: Gradients that are detached from their parameters while another window trains the same
            parameters.
    """

    models: tuple[torch.nn.Module, ...] = ()
    number: int = 0
    num_done: int = 0
    batch: int = 0

    is_first: bool = False
    is_last: bool = False
    has_gradient: bool = False
    is_closed: bool = True
    is_discarded: bool = False
    is_applied: bool = False

    nominal_weight: float | None = None
    next_nominal_weight: float | None = None
    local_weight: float = 0.0
    global_weight: float | None = 0.0
    micro_weight: LossWeight | None = None
    sums_weights: bool = False
    has_given_weights: bool = False
    has_default_weights: bool = False
    num_without_weight: int = 0
    has_had_weight: bool = False

    is_standalone_fraction: bool = False
    has_leftover_gradients: bool = False
    was_step_called_early: bool = False
    stashed_gradients: tuple[WindowStash, ...] = ()

    def open(self, number: int) -> None:
        """Reset this object for the next accumulation window of its models.

        The losses of that window are divided by the total loss weight of the last full window, if there was one.

        Args:
            number: Number of the new window in the run.
        """
        self.is_first = not self.number
        self.number = number
        self.has_leftover_gradients = not self.is_applied and self.has_pending_gradients
        self.num_done = 0
        self.is_closed = False
        self.is_discarded = False
        self.has_gradient = False
        self.is_applied = False
        self.stashed_gradients = ()
        self.nominal_weight = self.next_nominal_weight
        self.local_weight = 0.0
        self.global_weight = 0.0
        self.has_given_weights = False
        self.has_default_weights = False

    @property
    def has_pending_gradients(self) -> bool:
        """Whether the window has gradients on which no optimizer has stepped, and which were not dropped."""
        return self.has_gradient and not (self.is_applied or self.is_discarded)

    def close(self, total_weight: float) -> None:
        """Mark the accumulation window as closed, because its gradients are final. An optimizer may then step on them.

        Warn once if several windows in a row have no weight, because a run of such windows learns nothing.

        Args:
            total_weight: Sum of the loss weights of the window's micro-batches over all ranks, such as a number of rows
                or tokens. If it is 0, no update follows.
        """
        self.is_closed = True
        if total_weight:
            self.is_discarded = False
            self.has_had_weight = True
            self.num_without_weight = 0
            return
        self.is_discarded = True
        self.num_without_weight += 1
        if self.num_without_weight == (_NUM_WITHOUT_WEIGHT if self.has_had_weight else _NUM_WITHOUT_WEIGHT_AT_START):
            log.warning_once(_WITHOUT_WEIGHT, self.num_without_weight)

    def close_after_error(self) -> None:
        """Close the accumulation window after an error, so that its gradients are not used.

        The next micro-batch starts a new window.
        """
        self.is_closed = self.is_discarded = True


class AccumulationWindows:
    """All accumulation windows of a run, with a reference to the current window.

    Args:
        num_steps: Micro-batches per update.
        reads: Record of the loaders that are being iterated, and of the batches that were read from them.
        sync_with_loader: Whether a loader's last batch closes the window.
        sync_each: Whether to reduce gradients at every micro-batch.
        clips_partial_gradients: Whether clipping also changes the partial gradients of an unfinished window. Default:
            False.

    Attributes:
        reads: Record of the loaders that are being iterated, and of the batches that were read from them.
        current: Window of the latest micro-batch.
        has_several_windows: Whether different sets of models have separate windows.
        is_last: Whether the latest micro-batch ends its window.
        num_windows: Number of windows begun so far. After a resume, it continues from the number of updates made.
        piece: Part of a split batch that is being processed, or `UNSPLIT`.
        is_inside: Whether the script is inside a `with accelerator.accumulate()` block.
        are_steps_disabled: Whether step() and zero_grad() have no effect before the next micro-batch, as set by
            `set_steps_enabled`.
        restart_listeners: Functions to call when all windows are dropped, such as when the run continues from a loaded
            state.
    """

    NOT_ROLLED_BACK: ClassVar[frozenset[str]] = frozenset(
        (
            # Settings.
            "num_steps",
            "sync_with_loader",
            "sync_each",
            "clips_partial_gradients",
            # Listeners of the run.
            "restart_listeners",
            # State of the `accumulate` block, which a replay leaves and enters again.
            "piece",
            "is_inside",
            "are_steps_disabled",
        )
    )
    """Names of attributes that `snapshot` leaves out. `restore` resets all other attributes when a batch is run
    again.
    """

    def __init__(
        self,
        num_steps: int,
        reads: BatchReads[PreparedLoader],
        sync_with_loader: bool = True,
        sync_each: bool = False,
        *,
        clips_partial_gradients: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_loader = sync_with_loader
        self.sync_each = sync_each
        self.clips_partial_gradients = clips_partial_gradients
        self.reads = reads
        self.restart_listeners: list[Callable[[], None]] = []
        self.current = AccumulationWindow()
        self.has_several_windows = False
        self.is_last = True
        self.num_windows = 0
        self.piece = UNSPLIT
        self.is_inside = False
        self.are_steps_disabled = False
        # By the IDs of the models that train together, in order of last use.
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
            self.has_several_windows = len(self._by_models) > 1
        elif window is not self.current:
            self._by_models[key] = self._by_models.pop(key)  # `find_latest_window` relies on the order of last use
        # If the last micro-batch of a window never ran backward (the loop skipped it), the window continues until one
        # does.
        opens_window = window.is_closed
        if opens_window:
            self.num_windows += 1
            window.open(self.num_windows)
        opened_with_none_unfinished = opens_window and (
            not self.has_several_windows or self._are_closed(excluded=window)
        )
        piece = self.piece
        if not piece.batch or window.batch != piece.batch:
            window.num_done += 1
            window.batch = piece.batch
        window.micro_weight = None
        window.was_step_called_early = False
        loader = self.reads.record_micro_batch(window.num_done, window is self.current)
        is_end = self.sync_with_loader and loader is not None and loader.pass_position.rank_batch.is_last
        self.is_last = window.is_last = self._is_complete(window, is_end) and piece.is_last
        self.current = window
        self.is_inside = True
        self.are_steps_disabled = False
        return opened_with_none_unfinished

    def _is_complete(self, window: AccumulationWindow, is_end: bool) -> bool:
        """Whether the current micro-batch completes its accumulation window.

        Args:
            window: Window of the micro-batch.
            is_end: Whether the batch is its loader's last one, and therefore ends the window.
        """
        return is_end or window.num_done >= self.num_steps

    def begin_standalone_window(self) -> AccumulationWindow:
        """Begin and return the accumulation window of a standalone backward, which is outside any `accumulate` block.

        The window becomes `current`. It has no models, and this backward is its only one. The script may add up the
        gradients of several standalone backwards before it steps. Their weights are added up, too, because an update
        follows if any of them is not zero.
        """
        previous = self.current
        window = AccumulationWindow(is_last=True, num_done=1, is_standalone_fraction=self.num_steps > 1)
        if not previous.models:
            window.has_had_weight = previous.has_had_weight
            window.num_without_weight = previous.num_without_weight
            if previous.number and not previous.is_applied:
                window.global_weight = previous.global_weight or 0.0
                # Both belong to one update, which counts once.
                window.num_without_weight -= previous.is_discarded
        self.num_windows += 1
        window.number = self.num_windows
        self.reads.record_standalone_backward()
        self.is_last = True
        self.current = window
        return self.current

    def end_block(self) -> None:
        """Record that the loop has left the `with accelerator.accumulate()` block of the current micro-batch.

        A backward that follows is a standalone backward.
        """
        self.is_inside = False

    def set_piece(self, piece: BatchPiece) -> None:
        """Set the part of a batch that the following micro-batches process."""
        self.piece = piece

    def withdraw_piece(self) -> None:
        """Record that the `accumulate` block of the current part of a batch has ended early, and will be run again."""
        self.is_inside = self.is_last = False

    def set_steps_enabled(self, is_enabled: bool) -> None:
        """Set whether calls to step() and zero_grad() can take effect before the next micro-batch begins.

        This method is for loops that define accumulation windows themselves. The next micro-batch enables them again.
        """
        self.are_steps_disabled = not is_enabled

    def set_num_steps(self, num_steps: int) -> None:
        """Set the number of micro-batches per update from now on."""
        self.num_steps = num_steps

    # ---------------------------------------------------------------- queries

    def find_latest_window(self, model_ids: Container[int]) -> AccumulationWindow | None:
        """Return the latest accumulation window that trained one of these models, or None.

        A window that `resume` created is skipped until its first micro-batch, because it has trained nothing yet.

        Args:
            model_ids: `id` of each model. If the current window has no models, as for a backward outside `accumulate`,
                it is returned whatever `model_ids` contains.
        """
        if not self.current.models:
            return self.current
        for window in reversed(self._by_models.values()):
            if window.number and any(id(model) in model_ids for model in window.models):
                return window
        return None

    @property
    def are_gradients_final(self) -> bool:
        """Whether the current accumulation window's gradients are final, so that clipping and step() take effect."""
        return self.can_step(self.current)

    def can_step(self, window: AccumulationWindow) -> bool:
        """Whether an accumulation window's gradients are final, and `set_steps_enabled` has not disabled optimizer steps."""
        return window.is_closed and not self.are_steps_disabled

    @property
    def is_step_due(self) -> bool:
        """Whether the current micro-batch ends its window, and `set_steps_enabled` has not disabled optimizer steps."""
        return self.is_last and not self.are_steps_disabled

    @property
    def has_partial_gradients(self) -> bool:
        """Whether gradients cover only part of the current accumulation window, which more micro-batches will complete.

        False for an unfinished window that the loop has left: it is outside any `accumulate` block, and no loader is
        being iterated.
        """
        window = self.current
        return window.has_gradient and not window.is_closed and (self.is_inside or bool(self.reads.active_loaders))

    @property
    def is_unfinished(self) -> bool:
        """Whether the current accumulation window has begun, and no optimizer has stepped on its gradients yet.

        A window that closed with a loss weight of 0 or after an error counts as finished, because no update follows.
        """
        window = self.current
        return window.num_done > 0 and not (window.is_applied or (window.is_closed and window.is_discarded))

    @property
    def is_in_splittable_batch(self) -> bool:
        """Whether the current micro-batch belongs to a batch that automatic micro-batching may split.

        If all of the batch fits into memory, it runs as one micro-batch, and the result is True, too.
        """
        return self.piece.batch > 0

    @property
    def are_closed(self) -> bool:
        """Whether all accumulation windows are closed, so that no gradients are partial."""
        return self._are_closed(None)

    def _are_closed(self, excluded: AccumulationWindow | None) -> bool:
        """Whether all accumulation windows are closed, apart from the excluded one. None: no window is excluded."""
        return all(window.is_closed or window is excluded for window in self._by_models.values())

    def find_pending_windows(self, excluded: AccumulationWindow) -> list[AccumulationWindow]:
        """Return the accumulation windows that have gradients on which no optimizer has stepped yet.

        Args:
            excluded: Window that is left out of the result.
        """
        if not self.has_several_windows:
            return []
        others = (window for window in self._by_models.values() if window is not excluded)
        return [window for window in others if window.has_pending_gradients]

    # ---------------------------------------------------------------- resume and replay

    def list_nominal_weights(self, models: Sequence[torch.nn.Module]) -> list[tuple[list[int], float]]:
        """Return the total weight by which losses are divided in the next accumulation window of each set of models.

        Args:
            models: All models. The returned indices are positions in this list.

        Returns:
            A pair (indices of the models, weight) for each set of models that share an accumulation window. Sets that
                have not completed a full window yet are left out.
        """
        indices = {id(model): index for index, model in enumerate(models)}
        return [
            ([indices[key] for key in model_ids if key in indices], window.next_nominal_weight)
            for model_ids, window in self._by_models.items()
            if window.next_nominal_weight is not None
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
        for indices, weight in nominal_weights:
            window_models = tuple(models[index] for index in indices)
            self._by_models[tuple(map(id, window_models))] = AccumulationWindow(
                window_models, next_nominal_weight=weight
            )
        self.has_several_windows = len(self._by_models) > 1

    def reset(self) -> None:
        """Drop all accumulation windows and the current piece of a batch, and call the functions in `restart_listeners`."""
        self._start_over()
        self.piece = UNSPLIT

    def _start_over(self) -> None:
        """Drop all accumulation windows, and call the functions in `restart_listeners`."""
        self._by_models.clear()
        self.reads.forget_loaders()
        self.current = AccumulationWindow()
        self.has_several_windows = False
        self.is_last = True
        self.is_inside = False
        for listener in self.restart_listeners:
            listener()

    def snapshot(self) -> dict[str, Any]:
        """Return the state that `restore` needs to undo a batch: all attributes except those in `NOT_ROLLED_BACK`."""
        state = {name: value for name, value in vars(self).items() if name not in self.NOT_ROLLED_BACK}
        # Other objects refer to the windows, so `restore` writes the copies' values back into the windows themselves.
        state["_by_models"] = {key: (window, replace(window)) for key, window in self._by_models.items()}
        state["reads"] = self.reads.snapshot()
        return state

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the state from a snapshot, and drop the accumulation windows of models that had none before.

        A snapshot can be restored several times.
        """
        state = dict(snapshot)
        self.reads.restore(state.pop("reads"))
        window_copies = state.pop("_by_models")
        vars(self).update(state)
        self._by_models = {}
        for key, (window, copy) in window_copies.items():
            vars(window).update(vars(copy))
            self._by_models[key] = window

    def restore_weights(self, snapshot: dict[str, Any]) -> None:
        """Restore only the total loss weights by which the next accumulation windows divide their losses.

        Args:
            snapshot: Return value of `snapshot()`.
        """
        for window, copy in snapshot["_by_models"].values():
            window.next_nominal_weight = copy.next_nominal_weight
