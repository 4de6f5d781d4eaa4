"""The training step: backward by the windows' arithmetic, clipping, the update. `windows.py` has the formula and its state.

::

    accumulate -> begin        a window opens or goes on
    backward   -> weigh, run   each loss with its weight; the window's last one sums weights and makes gradients final
    clip, step, zero_grad      act on final gradients, through `act`, `update` and `drop`

`Step` is what both kinds share. `WholeStep` runs each batch once; `replay/step.py` runs it in pieces, and again where memory
ran out. What a step works with comes in through its constructor; a feature that is off is an empty list or a null object.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from headway.collectives.tree import Tree
from headway.errors import LossError, StateError
from headway.log import get_logger
from headway.precision.base import Precision
from headway.strategies.base import Strategy
from headway.training.losses import check_loss, look_for_division
from headway.training.prepared import Prepared
from headway.training.task import Task, Weigher
from headway.training.windows import LossPolicy, Window, Windows

log = get_logger(__name__)

_AS_IT_COMES = nullcontext()
_BY_HAND = (
    "backward came outside accumulate(), with gradient_accumulation_steps=%d: each loss is divided by %d, and step() and "
    "zero_grad() act whenever they are called. `with accelerator.accumulate(model):` makes it exact, for short windows and ragged "
    "batches too, and reduces gradients only once per window. Do not divide the loss yourself"
)

_CLEARED = (
    "the gradients of this update's earlier micro-batches are gone: something cleared them inside the window, such as "
    "model.zero_grad(). Call the prepared optimizer's zero_grad(), which waits for the window's end"
)
_LEFTOVER = (
    "an update begins, but no optimizer has stepped on the last one, whose gradients are added to: step() acts after every %d "
    "micro-batches (gradient_accumulation_steps). Call it in each accumulate() block; it waits by itself"
)
_MOST_WITNESSES = 32


class Guard(Protocol):
    """Watches the numbers of a step."""

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward is run on."""

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Final gradients are about to be clipped; their total norm, where it has been computed here."""

    def after_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """They have been."""

    def permits(self) -> bool:
        """May the closed window's update be made? The same answer on every rank."""

    def after_step(self, did_step: bool) -> None:
        """An optimizer has made its step, or not."""


class NoGuard:
    """Nobody looks."""

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is."""
        return loss

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Nothing is computed."""
        return None

    def after_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Nothing is noted."""

    def permits(self) -> bool:
        """Always."""
        return True

    def after_step(self, did_step: bool) -> None:
        """Nothing is counted."""


@dataclass
class Moments:
    """Who hears of a step's moments: lists of functions, empty while nothing is measured or watched.

    Attributes:
        before_learning: a micro-batch is about to begin, or a backward comes outside of any.
        before_begin: a micro-batch is about to begin.
        begun: it has, as (number of its window, its number in it).
        before_backward: a loss is about to run backward.
        phases: the name of the phase that begins: "forward", "backward", "step".
    """

    before_learning: list[Callable[[], None]] = field(default_factory=list)
    before_begin: list[Callable[[], None]] = field(default_factory=list)
    begun: list[Callable[[int, int], None]] = field(default_factory=list)
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    phases: list[Callable[[str], None]] = field(default_factory=list)


class Step(ABC):
    """What both kinds of a step share.

    Args:
        windows: the state of the run's windows.
        prepared: the objects that are trained.
        strategy: runs backward and reduces.
        precision: scales losses.
        policy: how losses are divided.
        guard: watches losses and gradients.
        moments: who hears of them.
    """

    def __init__(
        self,
        windows: Windows,
        prepared: Prepared,
        strategy: Strategy,
        precision: Precision,
        policy: LossPolicy,
        guard: Guard,
        moments: Moments,
    ) -> None:
        self.windows = windows
        self.prepared = prepared
        self.strategy = strategy
        self.precision = precision
        self.guard = guard
        self.moments = moments
        self._policy = policy

    # ---------------------------------------------------------------- micro-batches

    def begin(self, models: Sequence[torch.nn.Module]) -> bool:
        """A micro-batch begins; returns whether gradients travel in it."""
        windows, moments = self.windows, self.moments
        for check in moments.before_learning:
            check()
        for check in moments.before_begin:
            check()
        if windows.num_windows == 1 and windows.is_forsaken and windows.current.models == tuple(models):
            self._note_leftover()
        if windows.begin(models):
            self.precision.adjust()
        for listener in moments.begun:
            listener(windows.current.number, windows.current.num_done)
        return windows.is_last or windows.sync_each

    def _note_leftover(self) -> None:
        learning = islice(self.prepared.parameters_of(self.windows.current), _MOST_WITNESSES)
        if self.prepared.optimizers and any(p.grad is not None for p in learning):
            log.warning_once(_LEFTOVER, self.windows.num_steps)

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

    # ---------------------------------------------------------------- weights

    def weigh(self, weight: float | None) -> tuple[float, float | None]:
        """This rank's weight, and all ranks' together where that is known without asking them."""
        loader, shard = self.windows.loader, self.strategy.data_shard
        counts = None if loader is None else loader.valid_counts
        if weight is not None:
            is_filler = counts is not None and counts[shard.index] == 0
            return (0.0 if is_filler else weight), (None if shard.count > 1 else weight)
        if counts is None:
            log.info_once(
                "backward outside a prepared loader: each loss weighs 1; pass weight= where micro-batches differ"
            )
            counts = (1,) * shard.count
        # A mean over a piece weighs its part of the whole batch.
        piece = self.windows.piece
        rows, total = piece.num_rows, piece.total_rows
        return counts[shard.index] * rows / total, sum(counts) * rows / total

    def weigh_micro_batch(self, window: Window, weight: float | None) -> float:
        """Count the micro-batch once, by its first loss; later losses of it are further terms over the same items."""
        if window.micro_weight is None:
            local, total = self.weigh(weight)
            window.add(local, total)
            return local
        if self.windows.holds_several:
            raise LossError(
                "backward() was called again in one accumulate() block after several batches were read in it, which would count as "
                "one micro-batch. Give each a block of its own: `for batch in loader: with accelerator.accumulate(model): ...`"
            )
        local = window.micro_weight[0]
        if weight is not None and self.weigh(weight)[0] != local:
            raise LossError(
                f"two losses of one micro-batch weigh {local:g} and {weight:g}; their gradients land in the same tensors "
                "and cannot be told apart. Add the losses up and call backward once, or give both the same weight"
            )
        return local

    # ---------------------------------------------------------------- backward

    def backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Add the loss's gradient with its weight; the window's last one makes gradients final."""
        check_loss(loss, weight, reduction)
        if self.windows.is_inside:
            if self.windows.num_windows == 1:
                look_for_division(loss, self.windows.num_steps)
            self._backward_inside(loss, weight, reduction, **kwargs)
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
        try:
            with block:
                strategy.backward(loss, factor, self.precision, **kwargs)
        finally:
            for measure in moments.phases:
                measure("step" if windows.current.is_last else "forward")

    def close(
        self, window: Window, total: float, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False
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

    # ---------------------------------------------------------------- final gradients

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip at the end of a window; inside one only the norm so far is returned."""
        chosen = self._present(parameters)
        if self.windows.is_final:
            return self.act(lambda: self._clip(chosen, max_norm, norm_type))  # type: ignore[no-any-return]
        return self.precision.unscaled_norm(self.strategy.total_norm(chosen, norm_type))

    def _clip(self, chosen: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
        """Where the guard looks at gradients, it has read them: clipping reads them no second time."""
        self._unscaled(chosen)
        known = self.guard.before_clip(chosen, norm_type)
        norm = self.strategy.clip(chosen, max_norm, norm_type, known)
        self.guard.after_clip(chosen)
        return norm

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clamp final gradients element by element; inside a window they are left alone."""
        if self.windows.is_final:
            chosen = self._present(parameters)
            self.act(lambda: self._clip_value(chosen, clip_value))

    def _clip_value(self, chosen: list[Any], clip_value: float) -> None:
        self._unscaled(chosen)
        if self.strategy.capabilities.whole_gradients:
            torch.nn.utils.clip_grad_value_(chosen, clip_value)
            return
        for grad in self.strategy.local_gradients(chosen):
            grad.clamp_(-clip_value, clip_value)

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
        """Let the optimizer step at a closed window.

        Args:
            optimizer: torch's own.
            strategy: by which its parameters were set up.
            closure: as torch's optimizers take it.

        Returns:
            Did the update happen?
        """

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

    # ---------------------------------------------------------------- batches

    @abstractmethod
    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch in pieces that fit into memory."""

    @abstractmethod
    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch; returns the loss over all ranks."""

    def run_task(self, task: Task, piece: Tree) -> None:
        """A piece of a batch that is held as a function, or all of it."""
        with MicroBatch(self, self.prepared.models):
            weigh = task.weigher(piece)
            loss = self.strategy.compute(task.fn, piece, task.weight, task.reduction)
            self.backward(loss, weigh(), task.reduction)
            weighed = self.windows.current.micro_weight
            task.add(loss.detach(), 1.0 if weighed is None else weighed[0])

    def release(self) -> None:
        """Forget the batch in hand and all windows."""
        self.windows.reset()


class WholeStep(Step):
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
        if not is_first and all(p.grad is None for p in window.witnesses) and window.witnesses:
            raise StateError(_CLEARED)
        if not window.is_last:
            self.run(loss, local, nominal, reduction, **kwargs)
            if is_first:
                learning = islice(self.prepared.parameters_of(window), _MOST_WITNESSES)
                window.witnesses = tuple(p for p in learning if p.grad is not None)
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

    def _agree_nominal(self, window: Window) -> float | None:
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
            log.warning_once(_BY_HAND, num_steps, num_steps)
        for check in moments.before_learning:
            check()
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

    def act(self, action: Callable[[], Any]) -> Any:
        """Do it."""
        return action()

    def update(self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None) -> bool:
        """Where the guard permits it."""
        return self.guard.permits() and strategy.step(optimizer, self.precision, closure)

    def tick(self, call: Callable[[], None]) -> None:
        """Every call is one."""
        call()

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch."""
        yield batch

    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """All of it at once."""
        task = Task(batch, fn, weight, reduction)
        self.run_task(task, batch)
        return task.loss(self.strategy.data_group)


class MicroBatch:
    """The context of one micro-batch (`accelerator.accumulate`)."""

    __slots__ = ("_contexts", "_models", "_step")

    def __init__(self, step: Step, models: Sequence[torch.nn.Module]) -> None:
        self._step = step
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        step, contexts = self._step, self._contexts
        sync = step.begin(self._models)
        for model in self._models:
            context = step.strategy.accumulate(model, sync)
            context.__enter__()
            contexts.append(context)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        for context in reversed(self._contexts):
            context.__exit__(kind, error, trace)
        return self._step.end(error)
