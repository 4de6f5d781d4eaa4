"""The training step: backward by the windows' arithmetic, clipping, the update. `windows.py` has the formula and its state.

::

    accumulate -> begin        a window opens or goes on
    backward   -> weigh, run   each loss with its weight; the window's last one sums weights and makes gradients final
    clip, step, zero_grad      act on final gradients, through `act`, `update` and `drop`

`TrainingStep` is what both kinds share. `WholeStep` runs each batch once; `replay/step.py` runs it in pieces, and again where memory
ran out. What a step works with comes in through its constructor; a feature that is off is an empty list or a null object.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from headway.errors import LossError, StateError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree, find_batch_size
from headway.strategies.base import Strategy
from headway.training.hooks import (
    BY_HAND,
    FirstWindow,
    NonFiniteNotice,
    RunParts,
    SkippedUpdates,
    refuse_loss,
    refuse_weight,
)
from headway.training.model_turns import TWO_TURNS, ModelTurns
from headway.training.task import BatchTask, Weigher
from headway.training.windows import WHOLE, AccumulationWindow, BatchPiece, LossPolicy

log = get_logger(__name__)

_AS_IT_COMES = nullcontext()


class StepGuard:
    """Watches the numbers of a step. This one prevents nothing.

    Args:
        parts: of the run.
        notice: is told of losses that are not finite, or may be; None where tensors have no values.

    Attributes:
        of_non_finite, of_spikes: the guard itself where `on_non_finite` or `on_spike` asked for it; None: nobody did.
    """

    of_non_finite: Any = None
    of_spikes: Any = None

    def __init__(self, parts: RunParts, notice: NonFiniteNotice | None = None) -> None:
        self._parts = parts
        self._notice = notice
        self._skips = SkippedUpdates(parts.windows, parts.clock)
        self._is_read_late = False

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward is run on."""
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        """It has run; a pipeline computes the loss's value in it."""
        if self._notice is not None and (not loss.is_cpu or not math.isfinite(loss.item())):
            self._is_read_late = True
            self._notice.note(loss)

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Final gradients are about to be clipped; their total norm, where it has been computed here."""
        return None

    def after_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """They have been."""

    def permits(self) -> bool:
        """May the closed window's update be made? The same answer on every rank."""
        if self._notice is not None and self._is_read_late:
            self._notice.look()
        return True

    def after_step(self, did_step: bool) -> None:
        """An optimizer has made its step, or not."""
        if not did_step:
            self._skips.note()


class TrainingStep(ABC):
    """What both kinds of a step share.

    Args:
        parts: of the run.
        policy: how losses are divided.
        guard: watches losses and gradients.

    Attributes:
        windows, prepared, strategy, precision, moments: the parts' own.
        turns: of models that learn in turn.
        weighs_losses: what a loss is multiplied by depends on its window, so every backward must come through here.
    """

    def __init__(self, parts: RunParts, policy: LossPolicy, guard: StepGuard) -> None:
        self.parts = parts
        self.windows, self.prepared, self.moments = parts.windows, parts.prepared, parts.moments
        self.strategy, self.precision = parts.strategy, parts.precision
        self.guard = guard
        self.grad_norm: torch.Tensor | None = None
        """Of the last clipping of final gradients."""
        self.turns = ModelTurns(parts)
        self._first_window = FirstWindow(parts)
        self.weighs_losses = type(policy) is LossPolicy
        self._policy = policy

    def begin(self, models: Sequence[torch.nn.Module]) -> bool:
        """A micro-batch begins; returns whether gradients travel in it."""
        windows, moments = self.windows, self.moments
        for check in (*moments.before_learning, *moments.before_begin):
            check()
        if windows.begin(models):
            self.precision.adjust()
        if windows.are_several:
            self.turns.take(windows.current)
        for listener in moments.begun:
            listener(windows.current.number, windows.current.num_done)
        return windows.is_last or windows.sync_each

    def end(self, error: BaseException | None) -> bool:
        """The micro-batch's block is left; where it failed, the window starts over with the next one, without gradients.

        Returns:
            Is the error dealt with?
        """
        windows = self.windows
        windows.leave()
        window = windows.current
        if error is not None and not window.is_closed:
            window.fail()
            self.strategy.drop_gradients(self.prepared.parameters_of(window))
        return False

    def weigh(self, weight: float | None) -> tuple[float, float | None]:
        """This rank's weight, and all ranks' together where that is known without asking them."""
        loader, shard = self.windows.loader, self.strategy.data_shard
        counts = None if loader is None else loader.valid_counts
        if weight is not None:
            is_filler = counts is not None and counts[shard.index] == 0
            return (0.0 if is_filler else weight), (None if shard.count > 1 else weight)
        piece = self.windows.piece
        if counts is None:
            if piece is not WHOLE:  # a batch that was handed over has as many rows as it has
                return float(piece.num_rows), (None if shard.count > 1 else float(piece.num_rows))
            for listener in self.moments.unweighed:
                listener()
            log.info_once(
                "backward outside a prepared loader: each loss weighs 1; pass weight= where micro-batches differ"
            )
            counts = (1,) * shard.count
        # A mean over a piece weighs its part of the whole batch.
        rows, total = piece.num_rows, piece.total_rows
        return counts[shard.index] * rows / total, sum(counts) * rows / total

    def weigh_micro_batch(self, window: AccumulationWindow, weight: float | None) -> float:
        """Count the micro-batch once, by its first loss; later losses of it are further terms over the same items."""
        if window.micro_weight is None:
            local, total = self.weigh(weight)
            window.add(local, total)
            return local
        local = window.micro_weight[0]
        if weight is not None and self.weigh(weight)[0] != local:
            raise LossError(
                f"two losses of one micro-batch weigh {local:g} and {weight:g}; their gradients land in the same tensors "
                "and cannot be told apart. Add the losses up and call backward once, or give both the same weight"
            )
        return local

    def backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Add the loss's gradient with its weight; the window's last one makes gradients final."""
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            refuse_loss(loss)
        if reduction not in ("mean", "sum") or (weight is not None and not 0 <= weight < float("inf")):
            refuse_weight(weight, reduction)
        window = self.windows.current
        if self.windows.is_inside:
            if window.was_asked and not (window.is_last and window.num_done == 1):
                raise StateError(TWO_TURNS)
            is_first = self.weighs_losses and self.windows.is_first(window)
            if is_first:
                self._first_window.before_backward(loss, weight is None)
            self._backward_inside(loss, weight, reduction, **kwargs)
            if is_first:
                self._first_window.after_backward()
        else:
            self._backward_outside(loss, weight, reduction, **kwargs)

    @abstractmethod
    def _backward_inside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """In a micro-batch's block."""

    @abstractmethod
    def _backward_outside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Outside of any."""

    def run(self, loss: torch.Tensor, weight: float, nominal: float, reduction: str, **kwargs: Any) -> None:
        """One backward of a loss that weighs `weight` of `nominal`."""
        windows, strategy = self.windows, self.strategy
        mean_weight = (1.0 if weight else 0.0) if reduction == "sum" else weight
        # A policy that counts micro-batches instead of weights must see a piece as the part that it is.
        piece = windows.piece
        share = 1.0 if reduction == "sum" and piece.num_rows else piece.share
        factor = 0.0  # of a piece that only fills up
        if share:
            factor = self._policy.factor(mean_weight / share, nominal, strategy.gradient_divisor, windows.num_steps)
            factor *= share
        loss, factor = strategy.plain(loss, factor)
        if factor:
            loss = self.guard.watch(loss)
            block: AbstractContextManager[object] = _AS_IT_COMES
        else:  # A mean over nothing is 0/0: what weighs zero must not carry its NaN into sums, nor to other ranks.
            block = self.strategy.silence(self.prepared.all_parameters())
        moments = self.moments
        for listener in moments.before_backward:
            listener()
        for measure in moments.phases:
            measure("backward")
        block = self.turns.spare_others(block) if self.are_several else block
        try:
            with block:
                strategy.backward(loss, factor, self.precision, **kwargs)
        finally:
            for measure in moments.phases:
                measure("step" if windows.current.is_last else "forward")
        if factor:
            self.guard.after_backward(loss)

    def close(
        self,
        window: AccumulationWindow,
        total: float,
        parameters: Sequence[torch.nn.Parameter] = (),
        has_gaps: bool = False,
    ) -> None:
        """The window's last backward has run, and all ranks' weights are known: make gradients final."""
        window.close(total)
        if window.nominal is not None and total > 0:
            correction = self._policy.correction(window.nominal, total)
            if abs(correction - 1.0) > 1e-12:
                self.strategy.scale_gradients(self.prepared.parameters_of(window), correction)
                window.nominal = total
            # A short window says nothing about the next one.
            if window.num_done >= self.windows.num_steps:
                window.next_nominal = total
        self.strategy.reduce_gradients(parameters, has_gaps)
        for listener in self.moments.reduced:
            listener()

    @property
    def are_several(self) -> bool:
        """Could there be models that learn in turn?"""
        return len(self.prepared.optimizers) > 1

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip at the end of a window; inside one only the norm so far is returned."""
        chosen = self._present(parameters)
        if self._is_final(chosen):
            return self.act(lambda: self._clip(chosen, max_norm, norm_type))  # type: ignore[no-any-return]
        return self.precision.unscaled_norm(self.strategy.total_norm(chosen, norm_type))

    def _clip(self, chosen: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
        """Where the guard looks at gradients, it has read them: clipping reads them no second time."""
        self._unscaled(chosen)
        known = self.guard.before_clip(chosen, norm_type)
        norm = self.strategy.clip(chosen, max_norm, norm_type, known)
        self.guard.after_clip(chosen)
        self.grad_norm = norm
        return norm

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clamp final gradients element by element; inside a window they are left alone."""
        chosen = self._present(parameters)
        if self._is_final(chosen):
            self.act(lambda: self._clip_value(chosen, clip_value))

    def _clip_value(self, chosen: list[Any], clip_value: float) -> None:
        self._unscaled(chosen)
        if self.strategy.capabilities.whole_gradients:
            torch.nn.utils.clip_grad_value_(chosen, clip_value)
            return
        for grad in self.strategy.local_gradients(chosen):
            grad.clamp_(-clip_value, clip_value)

    def _is_final(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Are the gradients those of a whole window, of the models that these parameters belong to?"""
        window = self.turns.window_with(parameters) if self.windows.are_several else self.windows.current
        return window is not None and self.windows.may_step(window)

    def _present(self, parameters: Any) -> list[Any]:
        """The parameters as they are now, of one or of many as they were before prepare()."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return [self.strategy.current(parameter) for parameter in given]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's final gradients true values."""
        self.act(lambda: self.precision.unscale(optimizer))

    def _unscaled(self, chosen: list[Any]) -> None:
        if self.precision.is_mixed:
            wanted = set(map(id, chosen))
            for prepared in self.prepared.optimizers:
                if any(id(p) in wanted for group in prepared.optimizer.param_groups for p in group["params"]):
                    self.precision.unscale(prepared.optimizer)

    @abstractmethod
    def act(self, action: Callable[[], Any]) -> Any:
        """Do something to final gradients."""

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None) -> bool:
        """Let torch's own optimizer step at a closed window, by the strategy that set its parameters up; did the update happen?"""

    def drop(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """The optimizer's gradients are not wanted any more."""
        self.precision.discard(optimizer)
        if set_to_none or not self.strategy.capabilities.whole_gradients:
            self.strategy.rollback([optimizer])
        else:
            optimizer.zero_grad(set_to_none=False)

    @abstractmethod
    def tick(self, call: Callable[[], None]) -> None:
        """A schedule's own tick, once a batch that counts."""

    @abstractmethod
    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch in pieces that fit into memory."""

    @abstractmethod
    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch; returns the loss over all ranks."""

    def run_task(self, task: BatchTask, piece: Tree) -> None:
        """A piece of a batch that is held as a function, or all of it."""
        with MicroBatch(self, self.prepared.models):
            weigh = task.weigher(piece)
            loss = self.strategy.compute(task.fn, piece, task.weight, task.reduction)
            self.backward(loss, weigh(), task.reduction)
            weighed = self.windows.current.micro_weight
            task.add(loss.detach(), 1.0 if weighed is None else weighed[0])

    @property
    def pieces(self) -> Any:
        """The size of pieces that batches are cut into; None: they stay whole."""
        return None

    def release(self) -> None:
        """Forget the batch in hand and all windows."""
        self.windows.reset()
        self.turns.forget()


class WholeStep(TrainingStep):
    """Each batch as it comes, once."""

    def _backward_inside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        window = self.windows.current
        is_first = not window.has_gradient
        local = self.weigh_micro_batch(window, weight)
        if is_first and window.is_last and window.global_weight:
            window.nominal = window.global_weight
        elif window.nominal is None:
            window.nominal = self._agree_nominal(window)
        nominal = window.nominal or 1.0  # without one, all weights so far are zero
        if not window.is_last:
            self.run(loss, local, nominal, reduction, **kwargs)
        elif window.is_closed:  # a further loss of the last micro-batch
            self.strategy.expect_backward(window.models)
            self.run(loss, local, nominal, reduction, **kwargs)
            self.strategy.reduce_gradients()
        elif window.global_weight is not None:
            self.run(loss, local, nominal, reduction, **kwargs)
            self.close(window, window.global_weight)
        else:
            # The exchange of weights runs while backward computes.
            group = self.strategy.data_group
            pending = group.start_sum([window.local_weight])
            self.run(loss, local, nominal, reduction, **kwargs)
            self.close(window, group.finish_sum(pending)[0])

    def _agree_nominal(self, window: AccumulationWindow) -> float | None:
        """The first window's nominal weight: what its first micro-batch that weighs anything weighs, times the steps."""
        assert window.micro_weight is not None
        local, total = window.micro_weight
        if total is None:
            total = self.strategy.data_group.reduce_numbers([local])[0]
        return total * self.windows.num_steps if total > 0 else None

    def _backward_outside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """One of `num_steps` equal micro-batches: what other backwards left in the gradients must not be touched, so weigh it
        exactly; the caller says when the window ends.
        """
        windows, moments, num_steps = self.windows, self.moments, self.windows.num_steps
        if num_steps > 1:
            log.warning_once(BY_HAND, num_steps, num_steps)
        for check in moments.before_learning:
            check()
        left = windows.current
        if left.models and left.micro_weight is None and self.strategy.capabilities.lone_forward:
            # The loss of a block that has been left, where its forward may have been told to keep gradients local.
            self.strategy.expect_backward(left.models)
        window = windows.begin_alone()
        for listener in moments.begun:
            listener(window.number, window.num_done)
        if windows.are_closed:
            self.precision.adjust()
        # A window by hand may have been read ahead, and the loader's counts be another batch's: processes weigh the same there.
        ranks = self.strategy.data_shard.count
        local, total = (1.0, ranks) if num_steps > 1 and weight is None else self.weigh(weight)
        if total is None:
            total = self.strategy.data_group.reduce_numbers([local])[0]
        window.close(total)
        self.run(loss, local, total * num_steps or 1.0, reduction, **kwargs)
        self.strategy.reduce_gradients()
        for note in moments.reduced:
            note()

    def act(self, action: Callable[[], Any]) -> Any:
        """Do it."""
        return action()

    def update(self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None) -> bool:
        """Where the guard permits it."""
        for check in self.moments.before_update:
            check()
        return self.guard.permits() and strategy.step(optimizer, self.precision, closure)

    def tick(self, call: Callable[[], None]) -> None:
        """Every call is one."""
        call()

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch."""
        with self._handed_out(batch):
            yield batch

    @contextmanager
    def _handed_out(self, batch: Tree) -> Iterator[None]:
        """A block in which the batch's own rows are what a loss weighs, where no loader counts them."""
        rows = find_batch_size(batch) if self.windows.loader is None else None
        self.windows.hand_out(WHOLE if rows is None else BatchPiece(0, rows, rows, True))
        try:
            yield
        finally:
            self.windows.hand_out(WHOLE)

    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """All of it at once."""
        task = BatchTask(batch, fn, weight, reduction)
        with self._handed_out(batch):
            self.run_task(task, batch)
        return task.loss(self.strategy.data_group)


class MicroBatch:
    """The context of one micro-batch (`accelerator.accumulate`)."""

    __slots__ = ("_contexts", "_models", "_step")

    def __init__(self, step: TrainingStep, models: Sequence[torch.nn.Module]) -> None:
        self._step = step
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        step, contexts = self._step, self._contexts
        sync = step.begin(self._models)
        others = step.turns.others(self._models).models if step.are_several else ()
        for model in (*self._models, *others):
            context = step.strategy.accumulate(model, sync and model not in others)
            context.__enter__()
            contexts.append(context)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        for context in reversed(self._contexts):
            context.__exit__(kind, error, trace)
        return self._step.end(error)
