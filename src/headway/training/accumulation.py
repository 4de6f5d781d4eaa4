"""Windows of micro-batches and the (sum, weight) arithmetic that makes their gradient that of the whole batch.

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
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headway.data.loader import PreparedLoader
from headway.errors import LossError, StateError
from headway.log import get_logger
from headway.precision.base import Precision
from headway.runtime import phases
from headway.runtime.control import note_progress
from headway.strategies.base import Strategy
from headway.training.loss import ConstantDivision as ConstantDivision
from headway.training.loss import LossPolicy as LossPolicy
from headway.training.loss import WeightedMean as WeightedMean
from headway.training.loss import check_loss
from headway.training.unprepared import loader_elsewhere

if TYPE_CHECKING:
    from headway.training.finite import FiniteGuard
    from headway.training.throughput import Throughput
    from headway.training.transaction import Transaction

log = get_logger(__name__)

_NO_PIECE = (
    "under microbatching='auto' every accumulate and backward belongs to a batch that can be cut: loop with `for piece in "
    "accelerator.microbatches(batch): with accelerator.accumulate(model): ...`, or use accelerator.forward_backward(batch, fn)"
)

_BY_HAND = (
    "backward came outside accumulate(), with gradient_accumulation_steps=%d: each loss is divided by %d, and step() and "
    "zero_grad() act whenever they are called. `with accelerator.accumulate(model):` makes it exact, for short windows and ragged "
    "batches too, and reduces gradients only once per window. Do not divide the loss yourself"
)


@dataclass(frozen=True)
class Piece:
    """A part of a batch, under automatic micro-batching.

    Attributes:
        batch: the batch's number.
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


@dataclass
class Window:
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

    def open(self) -> None:
        """Start over, with the last full window's weight as the nominal one."""
        self.num_done, self.is_closed, self.is_empty, self.has_gradient = 0, False, False, False
        self.is_applied = False
        self.nominal, self.local_weight, self.global_weight = self.next_nominal, 0.0, 0.0


class Accumulation:
    """The windows of a run, and backward.

    Args:
        num_steps: micro-batches per update.
        strategy: runs backward and reduces.
        precision: scales losses.
        policy: how losses are divided.
        active: the loaders in iteration, innermost last.
        sync_with_loader: a loader's last batch closes the window.
        sync_each: reduce gradients at every micro-batch.

    Attributes:
        is_held: somebody makes windows by hand, and this micro-batch does not end one: step and zero_grad wait.
    """

    def __init__(self, num_steps: int, strategy: Strategy, precision: Precision, policy: LossPolicy,
                 active: list[PreparedLoader], sync_with_loader: bool = True, sync_each: bool = False) -> None:  # fmt: skip
        self.num_steps = num_steps
        self.strategy = strategy
        self.precision = precision
        self.policy = policy
        self.active = active
        self.sync_with_loader = sync_with_loader
        self.sync_each = sync_each
        self.parameters: dict[int, list[torch.nn.Parameter]] = {}
        self.current = Window()
        self.is_last = True
        self.num_windows = 0
        self.trained_on: list[PreparedLoader] = []
        self.num_resets = 0
        self.has_loader = False
        self.transaction: Transaction | None = None
        self.piece: Piece | None = None
        self.guard: FiniteGuard | None = None
        self.meter: Throughput | None = None
        self.is_held = False
        self._windows: dict[tuple[int, ...], Window] = {}
        self._is_inside = False

    # ---------------------------------------------------------------- windows

    def begin(self, models: Sequence[torch.nn.Module]) -> bool:
        """A micro-batch or a piece of one begins; returns whether gradients travel in it.

        Raises:
            StateError: under automatic micro-batching, outside a batch that it cuts.
        """
        piece = self.piece
        if self.transaction is not None and piece is None:
            raise StateError(_NO_PIECE)
        key = tuple(map(id, models))
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window(tuple(models))
        # A window whose last micro-batch never ran backward (the loop skipped it) goes on until one does.
        if window.is_closed:
            window.open()
            self.num_windows += 1
            window.number = self.num_windows
            if all(other.is_closed or other is window for other in self._windows.values()):
                self.precision.adjust()
        if piece is None or window.batch != piece.batch:
            window.num_done += 1
            window.batch = 0 if piece is None else piece.batch
        note_progress(window.number, window.num_done)
        window.micro_weight = None
        self._note_loader()
        loader = self.loader if self.sync_with_loader else None
        is_end = loader is not None and loader.is_last
        window.is_last = (is_end or window.num_done >= self.num_steps) and (piece is None or piece.is_last)
        self.current, self.is_last, self._is_inside, self.is_held = window, window.is_last, True, False
        return window.is_last or self.sync_each

    def end(self, is_failed: bool = False) -> None:
        """The micro-batch's block is left; where it failed, the window starts over with the next one, without gradients."""
        self._is_inside = False
        window = self.current
        if is_failed and not window.is_closed:
            window.is_closed = window.is_empty = True
            for parameter in self._parameters_of(window):
                parameter.grad = None

    def withdraw(self) -> None:
        """The piece's block is left to be run again."""
        self._is_inside = self.is_last = False

    @property
    def windows(self) -> Iterable[Window]:
        """One for each set of models met so far."""
        return self._windows.values()

    def forget(self, window: Window) -> None:
        """It was begun by a batch that did not happen."""
        del self._windows[tuple(map(id, window.models))]

    @property
    def is_final(self) -> bool:
        """Are the gradients those of a whole window, so that clip and step may act?"""
        return self.current.is_closed and not self.is_held

    @property
    def will_step(self) -> bool:
        """Does the micro-batch in hand end its window?"""
        return self.is_last and not self.is_held

    @property
    def is_fresh(self) -> bool:
        """Does no gradient of a window in progress lie in the tensors, so that zero_grad may act?"""
        window = self.current
        return (window.is_closed or not window.has_gradient) and not self.is_held

    @property
    def is_partial(self) -> bool:
        """Is a part of a window's gradient in the tensors, and the loop that makes it under way?"""
        window = self.current
        return window.has_gradient and not window.is_closed and (self._is_inside or bool(self.active))

    @property
    def loader(self) -> PreparedLoader | None:
        """The innermost loader in iteration; where this Accelerator has none at all, that of another one."""
        return self.active[-1] if self.active else loader_elsewhere(self)

    def current_ids(self) -> set[int]:
        """The ids of the parameters that learn in the current window."""
        return {id(parameter) for parameter in self._parameters_of(self.current)}

    def _note_loader(self) -> None:
        if self.active and self.active[-1] not in self.trained_on:
            self.trained_on.append(self.active[-1])

    @property
    def is_unfinished(self) -> bool:
        """Has a window begun whose update, or the decision to make none, is still to come?"""
        window = self.current
        return window.num_done > 0 and not (window.is_applied or (window.is_closed and window.is_empty))

    def nominal_weights(self, models: Sequence[torch.nn.Module]) -> list[tuple[list[int], float]]:
        """For each set of models, by their numbers, the weight that its next window will divide by."""
        numbers = {id(model): number for number, model in enumerate(models)}
        return [
            ([numbers[key] for key in keys if key in numbers], window.next_nominal)
            for keys, window in self._windows.items()
            if window.next_nominal is not None
        ]

    def resume(self, models: Sequence[torch.nn.Module], nominal_weights: Iterable[tuple[Sequence[int], float]],
               num_updates: int) -> None:  # fmt: skip
        """Drop windows in progress; the next ones divide by these weights, as an uninterrupted run would."""
        if self.guard is not None:
            self.guard.forget()
        self.num_windows = num_updates
        self._windows.clear()
        self.current, self.is_last, self._is_inside = Window(), True, False
        self.trained_on.clear()
        for numbers, weight in nominal_weights:
            chosen = tuple(models[number] for number in numbers)
            self._windows[tuple(map(id, chosen))] = Window(chosen, next_nominal=weight)

    def reset(self) -> None:
        """Forget all windows and parameters."""
        if self.transaction is not None:
            self.transaction.release()
        if self.guard is not None:
            self.guard.forget()
        self.trained_on.clear()
        self.num_resets += 1
        self.parameters.clear()
        self._windows.clear()
        self.current, self.is_last, self._is_inside, self.piece = Window(), True, False, None

    # ---------------------------------------------------------------- weights

    def _weigh(self, weight: float | None) -> tuple[float, float | None]:
        """This rank's weight, and all ranks' together where that is known without asking them."""
        loader = self.loader
        counts = None if loader is None else loader.valid_counts
        if weight is not None:
            is_filler = counts is not None and counts[self.strategy.data_shard.index] == 0
            return (0.0 if is_filler else weight), (None if self.strategy.data_shard.count > 1 else weight)
        if self.transaction is not None:
            self.transaction.look_for_padding()
        if counts is not None:
            return self._part_of(counts[self.strategy.data_shard.index]), self._part_of(sum(counts))
        log.info_once("backward outside a prepared loader: each loss weighs 1; pass weight= where micro-batches differ")
        return self._part_of(1), self._part_of(self.strategy.data_shard.count)

    def _part_of(self, weight: float) -> float:
        """What a mean over the piece in hand weighs, where its whole batch weighs `weight`."""
        piece = self.piece
        return float(weight) if piece is None else weight * piece.num_rows / piece.total_rows

    def _weigh_micro_batch(self, window: Window, weight: float | None) -> float:
        """Count the micro-batch once, by its first loss; later losses of it are further terms over the same items."""
        if window.micro_weight is None:
            window.micro_weight = local, total = self._weigh(weight)
            window.has_gradient = True
            window.local_weight += local
            window.global_weight = (
                None if total is None or window.global_weight is None else window.global_weight + total
            )
            return local
        local = window.micro_weight[0]
        if weight is not None and self._weigh(weight)[0] != local:
            raise LossError(
                f"two losses of one micro-batch weigh {local:g} and {weight:g}; their gradients land in the same tensors "
                "and cannot be told apart. Add the losses up and call backward once, or give both the same weight"
            )
        return local

    def _agree_nominal(self, window: Window) -> float | None:
        """The first window's nominal weight: what its first micro-batch that weighs anything weighs, times the steps."""
        assert window.micro_weight is not None
        local, total = window.micro_weight
        if self.transaction is not None and self.piece is not None:
            # Nothing may travel now. A rank's own estimate does: gradients are corrected before they are summed.
            total = (local * self.strategy.data_shard.count if total is None else total) / self.piece.share
        elif total is None:
            total = self.strategy.data_group.reduce_numbers([local])[0]
        return total * self.num_steps if total > 0 else None

    # ---------------------------------------------------------------- backward

    def backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Add the loss's gradient with its weight; the window's last one makes gradients final."""
        check_loss(loss, weight, reduction)
        if not self._is_inside:
            if self.transaction is not None:
                raise StateError(_NO_PIECE)
            self._backward_alone(loss, weight, reduction, **kwargs)
            return
        window, group = self.current, self.strategy.data_group
        is_first = not window.has_gradient
        local = self._weigh_micro_batch(window, weight)
        if is_first and window.is_last and window.global_weight and self.transaction is None:
            window.nominal = window.global_weight
        elif window.nominal is None:
            window.nominal = self._agree_nominal(window)
        nominal = window.nominal or 1.0  # without one, all weights so far are zero
        if self.transaction is not None:
            self._backward_piece(self.transaction, loss, local, nominal, reduction, **kwargs)
        elif not window.is_last:
            self._run(loss, local, nominal, reduction, **kwargs)
        elif window.is_closed:  # a further loss of the last micro-batch
            self.strategy.expect_backward(window.models)
            self._run(loss, local, nominal, reduction, **kwargs)
            self.strategy.reduce_gradients()
        else:
            # The exchange of weights runs while backward computes.
            pending = (
                [window.global_weight] if window.global_weight is not None else group.start_sum([window.local_weight])
            )
            self._run(loss, local, nominal, reduction, **kwargs)
            self._close(window, group.finish_sum(pending)[0])

    def _backward_piece(self, transaction: "Transaction", loss: torch.Tensor, weight: float, nominal: float,
                        reduction: str, **kwargs: Any) -> None:  # fmt: skip
        """Nothing travels before all ranks have said that their pieces went through."""
        window = self.current
        parameters = [p for p in self._parameters_of(window) if p.requires_grad]
        # A further loss of the last piece: what has travelled already must not travel again.
        travelled = transaction.put_aside(parameters) if window.is_closed else []
        self._run(loss, weight, nominal, reduction, **kwargs)
        if window.is_last:
            total, has_gaps = transaction.agree_gradients(window.local_weight, parameters)
            if window.is_closed:
                self.strategy.reduce_gradients(parameters, has_gaps)
            else:
                self._close(window, total, parameters, has_gaps)
            for parameter, grad in travelled:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def _run(self, loss: torch.Tensor, weight: float, nominal: float, reduction: str, **kwargs: Any) -> None:
        mean_weight = (1.0 if weight else 0.0) if reduction == "sum" else weight
        # A policy that counts micro-batches instead of weights must see a piece as the part that it is.
        share = 1.0 if self.piece is None or reduction == "sum" else self.piece.share
        factor = (
            self.policy.factor(mean_weight / share, nominal, self.strategy.gradient_divisor, self.num_steps) * share
        )
        # A mean over nothing is 0/0: what weighs zero must not carry its NaN into sums, nor to other ranks.
        hooks = [] if factor else [_silence(p) for p in self._learning()]
        if self.guard is not None and factor:
            loss = self.guard.watch(loss, self.current.number, self.current.num_done)
        if self.meter is not None:
            self.meter.begin_backward()
        phases.mark("backward")
        try:
            self.strategy.backward(loss, factor, self.precision, **kwargs)
        finally:
            phases.mark("step" if self.current.is_last else "forward")
            for hook in hooks:
                hook.remove()

    def _learning(self) -> Iterable[torch.nn.Parameter]:
        return (p for parameters in self.parameters.values() for p in parameters if p.requires_grad)

    def _close(self, window: Window, total: float, parameters: Sequence[torch.nn.Parameter] = (),
               has_gaps: bool = False) -> None:  # fmt: skip
        window.is_closed, window.is_empty = True, total == 0
        if window.nominal is not None and total > 0:
            correction = self.policy.correction(window.nominal, total)
            if abs(correction - 1.0) > 1e-12:
                self.strategy.scale_gradients(self._parameters_of(window), correction)
                window.nominal = total
            # A short window says nothing about the next one.
            if window.num_done >= self.num_steps:
                window.next_nominal = total
        self.strategy.reduce_gradients(parameters, has_gaps)

    def _backward_alone(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """One of `num_steps` equal micro-batches: what other backwards left in the gradients must not be touched, so weigh it
        exactly; the caller says when the window ends.
        """
        if self.num_steps > 1:
            log.warning_once(_BY_HAND, self.num_steps, self.num_steps)
        self.num_windows += 1
        self._note_loader()
        note_progress(self.num_windows, 1)
        if all(window.is_closed for window in self._windows.values()):
            self.precision.adjust()
        # A window by hand may have been read ahead, and the loader's counts be another batch's: processes weigh the same there.
        ranks = self.strategy.data_shard.count
        local, total = (1.0, ranks) if self.num_steps > 1 and weight is None else self._weigh(weight)
        if total is None:
            total = self.strategy.data_group.reduce_numbers([local])[0]
        self.is_last = True
        self.current = Window(number=self.num_windows, num_done=1, is_last=True, is_empty=total == 0,
                              is_by_hand=self.num_steps > 1)  # fmt: skip
        self._run(loss, local, total * self.num_steps or 1.0, reduction, **kwargs)
        self.strategy.reduce_gradients()

    def permits(self, update: int) -> bool:
        """May the closed window's update be made, as far as the guard against non-finite values goes?"""
        window = self.current
        return self.guard is None or self.guard.permits(self._parameters_of(window), window.number, update)

    def _parameters_of(self, window: Window) -> Iterable[torch.nn.Parameter]:
        models = [id(model) for model in window.models] or list(self.parameters)
        unique = {id(p): p for model in models for p in self.parameters.get(model, ())}
        return unique.values()


class MicroBatch:
    """The context of one micro-batch (`accelerator.accumulate`)."""

    __slots__ = ("_accumulation", "_contexts", "_models")

    def __init__(self, accumulation: Accumulation, models: Sequence[torch.nn.Module]) -> None:
        self._accumulation = accumulation
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        sync = self._accumulation.begin(self._models)
        strategy = self._accumulation.strategy
        self._contexts = [strategy.accumulate(model, sync) for model in self._models]
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        for context in reversed(self._contexts):
            context.__exit__(kind, error, trace)
        transaction = self._accumulation.transaction
        if error is not None and transaction is not None and transaction.takes(error):
            self._accumulation.withdraw()
            return True
        self._accumulation.end(is_failed=kind is not None)
        return False


def _silence(parameter: torch.nn.Parameter) -> torch.utils.hooks.RemovableHandle:
    return parameter.register_hook(torch.zeros_like)  # type: ignore[no-any-return, no-untyped-call]
