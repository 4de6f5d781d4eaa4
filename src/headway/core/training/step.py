"""Training step, which implements the Accelerator's methods for one micro-batch.

An update uses the gradients of all micro-batches in its accumulation window. The gradient is the exact mean over all
items (samples or tokens) of the window on all ranks. The step therefore multiplies each loss by its number of items, its
weight. It divides the loss by the nominal weight: the number of items that the whole window is predicted to have. If the
window turns out to have another number, its gradients are multiplied once by a correction. `windows.py` explains the
formula, and holds the state of the windows.

A loop usually calls the methods in this order::

    with accumulate:  `MicroBatch` enters: finds the window, and whether this micro-batch reduces gradients over ranks
        backward      `backward` checks the loss, `weigh_micro_batch` counts its items, and `run_backward` multiplies the
                      loss by its factor (`_compute_loss_factor`) and runs autograd. In the window's last backward,
                      `close_window` applies the correction and makes gradients final
        clip          `clip` or `clip_value`, once gradients are final
        step          `PreparedOptimizer` calls `apply_update`, once gradients are final
        zero_grad     `PreparedOptimizer` calls `clear_gradients`, once gradients are final
    (block ends)      `MicroBatch` exits: `handle_error` drops the window's gradients after an error

A backward outside any `accumulate` block is called a standalone backward. It has no micro-batch, and runs in a window of
its own (`_run_standalone_backward`).

clip, step and zero_grad have an effect only if the gradients of their parameters are final. They must not simply look at
the current window. If a generator and a discriminator train in turns, each has its own window, and the optimizer of one
may step after a micro-batch of the other. So these methods first find the window in which their parameters trained last
(`find_window_of_optimizer`, `_find_window_of_parameters`). With a single optimizer, it is always the current one, and
the search is skipped.

The file contains four classes:

- `StepGuard` watches losses and gradients, and may refuse an update. This base class only warns.
- `MicroBatch` is the context manager that `accumulate` returns.
- `TrainingStep` is the base class of the steps. A step receives all objects that it needs in its constructor.
- `WholeStep` runs each batch once. Another step, in `headway.extras.replay`, splits a batch into pieces (smaller
  micro-batches), and repeats the batch if memory ran out.

This code runs for every micro-batch of every run, so disabled features must cost nothing. A disabled feature is an
empty list or a flag that is set at construction, not a call that does nothing.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from headway.core.runtime.collectives.tree import Tree, find_batch_size
from headway.core.strategies.base import Strategy, does_override
from headway.core.training.checks.first_window import STANDALONE_BACKWARDS, FirstWindow
from headway.core.training.checks.loss_errors import refuse_loss, refuse_weight
from headway.core.training.checks.notices import NonFiniteNotice, SkippedUpdates
from headway.core.training.model_turns import BACKWARD_AFTER_STEP, ModelTurns
from headway.core.training.run import Run
from headway.core.training.task import BatchTask, Weigher
from headway.core.training.windows import UNSPLIT, AccumulationWindow, BatchPiece, LossPolicy, LossWeight
from headway.errors import LossError, StateError
from headway.log import get_logger

log = get_logger(__name__)

_NO_CONTEXT = nullcontext()


class StepGuard:
    """Object that watches losses and gradients, and may refuse an update.

    This base class only reports non-finite losses.

    Args:
        run: Run of the Accelerator.
        notice: Object that warns of non-finite losses. None in a dry run, whose tensors have no values.

    Attributes:
        non_finite_guard: The guard itself if it applies the policy `on_non_finite`, else None.
        spike_guard: The guard itself if it applies the policy `on_spike`, else None.
    """

    can_refuse_updates: ClassVar[bool] = False
    """Whether the guard may refuse updates.

    If False, the training step does not call `watch`, `before_clip` and `after_clip`, and it calls `after_step` only
    for a skipped update.
    """
    non_finite_guard: "StepGuard | None" = None
    spike_guard: "StepGuard | None" = None

    def __init__(self, run: Run, notice: NonFiniteNotice | None = None) -> None:
        self._run = run
        self._notice = notice
        self._skips = SkippedUpdates(run.clock)
        self._has_delayed_losses = False

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss on which to run backward. Called before each backward if `can_refuse_updates` is set.

        This base class checks nothing and returns `loss` unchanged.
        """
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        """Record the loss for the warning about non-finite losses, unless it is on the CPU and finite.

        This is done after backward, because in a pipeline a loss has no value before. In a dry run, do nothing. The
        training step does not call this method for losses with weight 0.
        """
        if self._notice is not None and (not loss.is_cpu or not math.isfinite(loss.item())):
            self._has_delayed_losses = True
            self._notice.check_loss(loss)

    def before_clip(
        self, window: AccumulationWindow, parameters: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """Examine final gradients before they are clipped. This base class does nothing and returns None.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients are about to be clipped.
            norm_type: Order of the norm by which they are clipped.

        Returns:
            The total norm of the gradients if the guard has computed it, else None.
        """
        return None

    def after_clip(self, window: AccumulationWindow, parameters: Sequence[torch.Tensor]) -> None:
        """Examine final gradients after they were clipped. This base class does nothing.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients were clipped.
        """

    def can_update(self, window: AccumulationWindow) -> bool:
        """Whether an optimizer may step on the gradients of a closed accumulation window.

        The result is equal on all ranks. This base class always returns True, and checks recorded losses that have
        arrived on the host, for the warning about non-finite losses.

        Args:
            window: Window in which the optimizer's models trained last.
        """
        if self._notice is not None and self._has_delayed_losses:
            self._notice.check_arrived_losses()
        return True

    def after_step(self, window: AccumulationWindow, did_step: bool) -> None:
        """Record the update as skipped if the optimizer did not step.

        Args:
            window: Accumulation window of the update.
            did_step: Whether the optimizer has stepped.
        """
        if not did_step:
            self._skips.record_skip(window)


class MicroBatch:
    """Context manager for one micro-batch. `accelerator.accumulate` returns it.

    Args:
        step: Training step of the run.
        models: Models that train in the block.
    """

    __slots__ = ("_contexts", "_models", "_step")

    def __init__(self, step: "TrainingStep", models: Sequence[torch.nn.Module]) -> None:
        self._step = step
        self._models = models
        self._contexts: list[AbstractContextManager[Any]] | None = None

    def __enter__(self) -> None:
        """Begin the micro-batch: run the checks that may forbid it, and find its accumulation window."""
        step = self._step
        windows = step.windows
        hooks = step.hooks
        # There are two lists, because `before_learning` is also called for a standalone backward.
        for check in hooks.before_learning:
            check()
        for check in hooks.before_micro_batch:
            check()
        opened_with_none_unfinished = windows.begin_micro_batch(self._models)
        window = windows.current
        # All gradients of a window must have the same loss scale, so it changes only while no window is unfinished.
        if opened_with_none_unfinished and step.precision.scaler is not None:
            step.precision.update_scale()
        if windows.has_several_windows:
            step.turns.restore_window_gradients(window)
        for listener in hooks.micro_batch_begun:
            listener(window.number, window.num_done)
        if step.can_defer:
            reduces = windows.is_last or windows.sync_each or step.reduces_pieces
            self._contexts = step.enter_models(self._models, reduces)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        """End the micro-batch. The return value is whether an error is suppressed, because the batch is run again."""
        if self._contexts is not None:
            for context in reversed(self._contexts):
                context.__exit__(kind, error, trace)
        step = self._step
        if error is not None:
            return step.handle_error(error)
        step.windows.end_block()
        return False


class TrainingStep(ABC):
    """Base class of the training steps, which implement the Accelerator's methods for one step of the training loop.

    Args:
        run: Run of the Accelerator.
        policy: Policy for averaging losses.
        guard: Guard that watches losses and gradients.

    Attributes:
        run: Run of the Accelerator.
        windows, prepared, strategy, precision, hooks: Shortcuts to the attributes of `run` with the same names.
        guard: Guard that watches losses and gradients.
        turns: Record of the accumulation window in which each model trains. Needed if a loop trains several sets of
            models alternately, such as a GAN.
        weighs_losses: Whether losses are multiplied by a factor that depends on the accumulation window. Every backward
            must then go through `Accelerator.backward`.
        can_defer: Whether the strategy can leave gradients unreduced on their rank until the accumulation window's last
            micro-batch.
        grad_norm: Total norm of the final gradients before they were last clipped. None before the first clipping.
    """

    micro_batch: ClassVar[type[MicroBatch]] = MicroBatch
    """Class of the context managers that `accumulate` returns, one for each micro-batch."""
    reduces_pieces: bool = False
    """Whether gradients are reduced over ranks in every micro-batch, not only at the end of the accumulation window."""

    def __init__(self, run: Run, policy: LossPolicy, guard: StepGuard) -> None:
        self.run = run
        self.windows = run.windows
        self.prepared = run.prepared
        self.hooks = run.hooks
        self.strategy = run.strategy
        self.precision = run.precision
        self.guard = guard
        self.grad_norm: torch.Tensor | None = None
        self.turns = ModelTurns(run)
        self.weighs_losses = policy.weighs_losses
        self._policy = policy
        self._first_window = FirstWindow(run)
        # Find out once which methods the strategy overrides, so that micro-batches skip calls that would do nothing.
        self.can_defer = does_override(run.strategy, Strategy.micro_batch_context)
        self._has_engine_losses = does_override(run.strategy, Strategy.unshard_loss)
        self._replaces_parameters = does_override(run.strategy, Strategy.find_current)
        self._reduces_late = does_override(run.strategy, Strategy.reduce_gradients)
        self._keeps_gradients = does_override(run.strategy, Strategy.discard_update)

    # ---------------------------------------------------------------- accumulate

    def enter_models(self, models: Sequence[torch.nn.Module], reduces: bool) -> list[AbstractContextManager[Any]]:
        """Enter the strategy's contexts for all models that a micro-batch can run, and return the contexts.

        Models of other optimizers are included, because a loss can depend on them, as a generator's loss depends on the
        discriminator. Their gradients would be dropped, so they are never reduced in this micro-batch.

        Args:
            models: Models that train in the micro-batch.
            reduces: Whether gradients of these models are reduced over ranks in the micro-batch.
        """
        other_models = self.turns.find_other_models(models).models if len(self.prepared.optimizers) > 1 else ()
        contexts = []
        for model in (*models, *other_models):
            context = self.strategy.micro_batch_context(model, reduces and model not in other_models)
            context.__enter__()
            contexts.append(context)
        return contexts

    def handle_error(self, error: BaseException) -> bool:
        """End a micro-batch after an error in its block.

        The gradients of its accumulation window are dropped, unless the window has closed and an optimizer has already
        stepped on them. The next micro-batch then starts a new window.

        Returns:
            Whether the error is suppressed. This base class always returns False.
        """
        self.windows.end_block()
        window = self.windows.current
        if not window.is_closed or window.has_pending_gradients:
            window.close_after_error()
            self._drop_gradients(list(self.prepared.list_parameters_of(window)))
        return False

    def drop_all_gradients(self) -> None:
        """Drop the gradients of all models, because the run continues from a loaded state, which has none."""
        self._drop_gradients(self.prepared.list_parameters())

    def _drop_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Drop the gradients of these parameters, so that no update uses them. fp16 forgets that they were unscaled."""
        self.strategy.drop_gradients(parameters)
        if self.precision.scaler is not None:
            for optimizer in self._list_optimizers_of(parameters):
                self.precision.discard_gradients(optimizer)

    # ---------------------------------------------------------------- backward

    def backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Run backward on a weighted loss. The last backward of an accumulation window makes gradients final.

        Args:
            loss: Scalar loss with a graph.
            weight: Number of items that the loss was taken over. None: the weight of the micro-batch's first loss, or for
                that loss the batch's number of rows.
            reduction: Whether the loss is the "mean" or the "sum" over those items.
            **kwargs: Passed to the strategy's backward.

        Raises:
            LossError: If the loss is not a scalar tensor with a graph, if `weight` or `reduction` is invalid, or if two
                losses of one micro-batch have different weights.
            StateError: If step() or zero_grad() was called earlier in this micro-batch, and its window has several
                micro-batches. Also if the first window reveals a mistake of the training loop, such as gradients that
                were cleared within it. With automatic micro-batching, also outside `microbatches` and
                `forward_backward`. Also if ranks have diverged.
        """
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            refuse_loss(loss)
        if reduction not in ("mean", "sum") or (weight is not None and not 0 <= weight < float("inf")):
            refuse_weight(weight, reduction)
        if not self.windows.is_inside:
            self._run_standalone_backward(loss, weight, reduction, **kwargs)
            return
        window = self.windows.current
        if window.was_step_called_early and not (window.is_last and window.num_done == 1):
            raise StateError(BACKWARD_AFTER_STEP)
        is_checked = window.is_first and self.weighs_losses
        if is_checked:
            self._first_window.before_backward(loss, weight is None)
        self._run_block_backward(window, loss, weight, reduction, **kwargs)
        if is_checked:
            self._first_window.after_backward()

    @abstractmethod
    def _run_block_backward(
        self, window: AccumulationWindow, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any
    ) -> None:
        """Run backward inside the `accumulate` block of a micro-batch.

        Args:
            window: Accumulation window of the micro-batch.
            loss: Scalar loss with a graph.
            weight: Number of items that the loss was taken over. None: the weight of the micro-batch's first loss, or for
                that loss the batch's number of rows.
            reduction: Whether the loss is the "mean" or the "sum" over those items.
            **kwargs: Passed to the strategy's backward.
        """

    @abstractmethod
    def _run_standalone_backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Run backward outside of any `accumulate` block.

        Args:
            loss: Scalar loss with a graph.
            weight: Number of items that the loss was taken over. None: the batch's number of rows, or an equal weight
                for every loss if the run accumulates gradients.
            reduction: Whether the loss is the "mean" or the "sum" over those items.
            **kwargs: Passed to the strategy's backward.

        Raises:
            StateError: If this step runs backward only inside such a block.
        """

    def weigh_micro_batch(self, window: AccumulationWindow, weight: float | None) -> float:
        """Record the micro-batch's loss weight at its first loss, and return it.

        Later losses of the micro-batch get the recorded weight.

        Args:
            window: Accumulation window of the micro-batch.
            weight: Weight that the caller passed, or None.

        Returns:
            Loss weight on this rank.

        Raises:
            LossError: If the caller passed a weight for a later loss that differs from the recorded one.
        """
        if window.micro_weight is None:
            window.micro_weight = self.weigh_loss(weight)
            local, over_ranks = window.micro_weight
            window.has_gradient = True
            window.local_weight += local
            if over_ranks is None or window.global_weight is None:
                window.global_weight = None  # only a collective over the ranks' local weights can provide the sum
            else:
                window.global_weight += over_ranks
            return local
        local = window.micro_weight.local
        if weight is not None and self.weigh_loss(weight).local != local:
            raise LossError(
                f"two losses of one micro-batch weigh {local:g} and {weight:g}; their gradients are summed in the same tensors, so "
                "each cannot get its own weight. Add the losses and call backward once, or give both the same weight"
            )
        return local

    def weigh_loss(self, weight: float | None) -> LossWeight:
        """Return the weight of a loss on this rank and over all ranks.

        Without `weight`, the prepared loader provides the numbers of rows on all ranks, without padding. A batch that
        the script passed to `microbatches` or `forward_backward` is weighted by its rows. For any other batch, the
        weight is 1, which is logged once. The loss of a batch that contains only padding has weight 0, even if the
        caller passed a weight.

        Args:
            weight: Weight that the caller passed, or None.
        """
        windows = self.windows
        shard = self.strategy.data_shard
        loader = windows.loader
        counts = None if loader is None else loader.pass_position.rank_batch.valid_counts
        if weight is not None:
            is_only_padding = counts is not None and counts[shard.index] == 0
            return LossWeight(0.0 if is_only_padding else weight, None if shard.count > 1 else weight)
        piece = windows.piece
        if counts is None:
            if piece is not UNSPLIT:
                num_rows = float(piece.num_rows)
                return LossWeight(num_rows, None if shard.count > 1 else num_rows)
            for listener in self.hooks.unweighed:
                listener()
            log.info_once(
                "backward outside a prepared loader: each loss weighs 1; pass weight= where micro-batches differ"
            )
            counts = (1,) * shard.count
        # A piece of a batch gets a share of the batch's weight, in proportion to its rows. For UNSPLIT, it is all.
        num_rows, total_rows = piece.num_rows, piece.total_rows
        return LossWeight(counts[shard.index] * num_rows / total_rows, sum(counts) * num_rows / total_rows)

    def run_backward(
        self,
        window: AccumulationWindow,
        loss: torch.Tensor,
        weight: float,
        nominal_weight: float,
        reduction: str,
        **kwargs: Any,
    ) -> None:
        """Multiply a loss by its factor (`_compute_loss_factor`) and run its backward, with the step's hooks.

        A loss with weight 0, which can be NaN, gives all parameters zero gradients, and the guard does not see it.

        Args:
            window: Accumulation window of the micro-batch.
            loss: Scalar loss with a graph.
            weight: Weight of the loss on this rank.
            nominal_weight: Predicted total weight of the window.
            reduction: Whether the loss is the "mean" or the "sum" over its items.
            **kwargs: Passed to the strategy's backward.
        """
        strategy, hooks = self.strategy, self.hooks
        factor = self._compute_loss_factor(weight, nominal_weight, reduction)
        if self._has_engine_losses:
            loss, factor = strategy.unshard_loss(loss, factor)
        block: AbstractContextManager[object] = _NO_CONTEXT
        if not factor:
            # A mean over nothing is 0/0: a loss of weight zero must not spread its NaN into sums or to other ranks.
            block = strategy.silence_gradients(self.prepared.list_parameters())
        elif self.guard.can_refuse_updates:
            loss = self.guard.watch(loss)
        for listener in hooks.before_backward:
            listener()
        for measure in hooks.phases:
            measure("backward")
        if len(self.prepared.optimizers) > 1:
            block = self.turns.protect_other_models(block)
        try:
            with block:
                strategy.backward(loss, factor, self.precision, **kwargs)
        finally:
            for measure in hooks.phases:
                measure("step" if window.is_last else "forward")
        if factor:
            self.guard.after_backward(loss)

    def _compute_loss_factor(self, weight: float, nominal_weight: float, reduction: str) -> float:
        """Return the factor by which backward multiplies a loss: with Headway's policy, weight / nominal weight.

        The factor also undoes the division by which DDP or another engine averages gradients over ranks. It is 0 if the
        loss has weight 0, for example because the batch contains only padding rows.

        Args:
            weight: Weight of this rank's loss, such as its number of samples or tokens.
            nominal_weight: Predicted total weight of the window.
            reduction: Reduction that the loss function used: "mean" or "sum".
        """
        windows = self.windows
        divisor = self.strategy.gradient_divisor
        if reduction == "mean":
            multiplier = weight
        else:  # a sum over the items is already multiplied by their number
            multiplier = 1.0 if weight else 0.0
        piece = windows.piece
        if piece is UNSPLIT:
            return self._policy.factor(multiplier, nominal_weight, divisor, windows.num_steps)
        # A policy that counts micro-batches instead of weights must count a piece as a fraction of one. A sum needs no
        # fraction, because it contains only the piece's items.
        share = 1.0 if reduction == "sum" and piece.num_rows else piece.share
        if not share:  # a filler piece, which contains only padding
            return 0.0
        return self._policy.factor(multiplier / share, nominal_weight, divisor, windows.num_steps) * share

    def close_window(
        self,
        window: AccumulationWindow,
        total_weight: float,
        parameters: Sequence[torch.nn.Parameter] = (),
        has_gaps: bool = False,
    ) -> None:
        """Finalize the gradients of an accumulation window after its last backward.

        Multiply them by the correction, because losses were divided by the nominal weight, and reduce them over ranks if
        the strategy has not done so during backward. A full window's total weight becomes the next nominal weight.

        Args:
            window: Window to close.
            total_weight: Sum of the window's loss weights over all ranks. If it is 0, no update follows.
            parameters: Trainable parameters of the window, for `Strategy.reduce_gradients`. Default: ().
            has_gaps: Whether any rank has reported parameters without a gradient, for `Strategy.reduce_gradients`.
                Default: False.
        """
        window.close(total_weight)
        if window.nominal_weight is not None and total_weight > 0:
            correction = self._policy.correction(window.nominal_weight, total_weight)
            if abs(correction - 1.0) > 1e-12:
                self.strategy.scale_gradients(self.prepared.list_parameters_of(window), correction)
                # Gradients of later losses in the last micro-batch are added to the corrected ones.
                window.nominal_weight = total_weight
            # The weight of a short window does not predict that of the next one.
            if window.num_done >= self.windows.num_steps:
                window.next_nominal_weight = total_weight
        if self._reduces_late:
            self.strategy.reduce_gradients(parameters, has_gaps)
        for listener in self.hooks.gradients_final:
            listener()

    # ---------------------------------------------------------------- clip

    def clip(self, parameters: Any, max_norm: float | str, norm_type: float | str) -> torch.Tensor:
        """Clip final gradients by their global norm, and return the norm before clipping, as a 0-d tensor.

        Before the accumulation window closes, return the norm of the partial gradients. These are clipped only if
        `windows.clips_partial_gradients` is true. The returned norm is that of unscaled gradients, even under fp16.

        Args:
            parameters: One parameter, or an iterable of parameters.
            max_norm: Largest norm after clipping, as a number or as text.
            norm_type: Order of the norm: a number, or text such as "inf".
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        current = self._find_current_parameters(parameters)
        if self._are_gradients_final(current):
            return self._clip_final(current, max_norm, norm_type)
        norm = self.precision.unscale_norm(self.strategy.compute_total_norm(current, norm_type))
        if self.windows.clips_partial_gradients:
            # Gradients stay scaled (fp16): the window's later micro-batches will be added to them.
            self.strategy.clip_gradients(current, max_norm, norm_type, norm)
        return norm

    def _clip_final(self, parameters: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip final gradients by their global norm. Return the norm before clipping, and store it as `grad_norm`.

        fp16 gradients are unscaled first. If the guard has already computed the norm, reuse it.
        """
        if self.precision.scaler is not None:
            self._unscale_all(parameters)
        guard, guard_norm = self.guard, None
        if guard.can_refuse_updates:
            window = self._find_window_of_parameters(parameters) or self.windows.current
            guard_norm = guard.before_clip(window, parameters, norm_type)
        norm = self.strategy.clip_gradients(parameters, max_norm, norm_type, guard_norm)
        if guard.can_refuse_updates:
            guard.after_clip(window, parameters)
        self.grad_norm = norm
        return norm

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of final gradients to `[-clip_value, clip_value]`.

        Before the accumulation window closes, gradients are partial. They are clamped only if
        `windows.clips_partial_gradients` is true.

        Args:
            parameters: One parameter, or an iterable of parameters.
            clip_value: Largest absolute value of an element after clamping.
        """
        current = self._find_current_parameters(parameters)
        if self._are_gradients_final(current):
            self._clamp_final(current, clip_value)
        elif self.windows.clips_partial_gradients and self.precision.scaler is None:
            self._clamp_gradients(current, clip_value)
        elif self.windows.clips_partial_gradients:
            # The gradients stay scaled (fp16), so the limit is scaled instead.
            limit = clip_value * self.precision.get_gradient_scale()
            for grad in self.strategy.get_local_gradients(current):
                # Do not clamp infinite entries, so that an overflow is found at the window's end.
                grad.copy_(torch.where(grad.isinf(), grad, grad.clamp(-limit, limit)))

    def _clamp_final(self, parameters: list[Any], clip_value: float) -> None:
        """Clamp each element of final gradients to `[-clip_value, clip_value]`. fp16 gradients are unscaled first."""
        if self.precision.scaler is not None:
            self._unscale_all(parameters)
        self._clamp_gradients(parameters, clip_value)

    def _clamp_gradients(self, parameters: list[Any], clip_value: float) -> None:
        """Clamp each element of the gradients as they are. If they are sharded, each rank clamps its own shards."""
        if self.strategy.capabilities.whole_gradients:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        for grad in self.strategy.get_local_gradients(parameters):
            grad.clamp_(-clip_value, clip_value)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's final gradients by the loss scale, which only fp16 uses."""
        self.precision.unscale(optimizer)

    def _unscale_all(self, parameters: list[Any]) -> None:
        """Unscale the gradients of all optimizers that hold one of these parameters.

        The gradients are divided by the loss scale, which only fp16 uses.
        """
        for optimizer in self._list_optimizers_of(parameters):
            self.precision.unscale(optimizer)

    def _list_optimizers_of(self, parameters: list[Any]) -> list[torch.optim.Optimizer]:
        """Return the wrapped optimizers (not Headway's wrappers) that hold at least one of these parameters."""
        ids = set(map(id, parameters))
        optimizers = [prepared.optimizer for prepared in self.prepared.optimizers]
        return [
            each for each in optimizers if any(id(p) in ids for group in each.param_groups for p in group["params"])
        ]

    def _find_current_parameters(self, parameters: Any) -> list[Any]:
        """Return the current parameters as a list, because `prepare()` may have replaced those that the script refers to.

        Args:
            parameters: One parameter, or an iterable of parameters.
        """
        old = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return list(map(self.strategy.find_current, old)) if self._replaces_parameters else list(old)

    def _are_gradients_final(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the accumulation window that trains these parameters is closed, so that their gradients are final.

        False if the script has disabled optimizer steps until the next micro-batch (`sync_gradients = False`).
        """
        window = self._find_window_of_parameters(parameters)
        return window is not None and self.windows.can_step(window)

    # ---------------------------------------------------------------- windows

    def _find_window_of_parameters(self, parameters: Sequence[torch.Tensor]) -> AccumulationWindow | None:
        """Return the accumulation window in which the models of these parameters trained last, or None.

        As long as all micro-batches train the same models, it is the current window.
        """
        return (
            self.turns.find_window_of_parameters(parameters)
            if self.windows.has_several_windows
            else self.windows.current
        )

    def find_window_of_optimizer(self, optimizer: torch.optim.Optimizer) -> AccumulationWindow | None:
        """Return the accumulation window in which an optimizer's models trained last, or None if there is none.

        It is the current window if only one optimizer is prepared.

        Args:
            optimizer: torch's own optimizer.
        """
        return (
            self.windows.current
            if len(self.prepared.optimizers) < 2
            else self.turns.find_window_of_optimizer(optimizer)
        )

    # ---------------------------------------------------------------- step, zero_grad, scheduler

    @abstractmethod
    def apply_update(
        self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None
    ) -> bool:
        """Make torch's optimizer step on the gradients of a closed accumulation window, unless the guard refuses.

        Args:
            optimizer: torch's own optimizer.
            strategy: Strategy that set up the optimizer's parameters.
            closure: Closure as for a torch optimizer, or None.

        Returns:
            Whether the parameters were updated. False if the guard refused the update, or fp16's gradient scaler
                skipped it.
        """

    def clear_gradients(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Clear the optimizer's gradients.

        Args:
            optimizer: torch's own optimizer.
            set_to_none: Whether to set gradients to None instead of zero. Sharded gradients are always set to None.
        """
        if self.precision.scaler is not None:
            self.precision.discard_gradients(optimizer)
        set_to_none = set_to_none or not self.strategy.capabilities.whole_gradients
        if set_to_none and self._keeps_gradients:
            self.strategy.discard_update([optimizer])
        else:
            optimizer.zero_grad(set_to_none=set_to_none)

    @abstractmethod
    def tick_scheduler(self, step_scheduler: Callable[[], None]) -> None:
        """Advance a learning rate scheduler by calling `step_scheduler`, once for each batch whose results are kept.

        A batch that is run again in smaller micro-batches does not advance the scheduler a second time.
        """

    # ---------------------------------------------------------------- batches

    @abstractmethod
    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """Yield the batch in pieces (groups of rows) that fit into memory, from the start again if memory runs out.

        Without automatic micro-batching, yield the batch itself.
        """

    @abstractmethod
    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch, and return the mean loss per item over all ranks as a 0-d tensor.

        With automatic micro-batching, the batch is split into pieces if it does not fit into memory.

        Args:
            batch: Batch to train on.
            fn: Function from the batch, or a piece of it, to its loss.
            weight: Function from the batch, or a piece of it, to the number of items that the loss was taken over.
                None: the number of rows.
            reduction: Whether `fn` returns the "mean" or the "sum" of the loss over these items.

        Raises:
            LossError: If `fn` or `weight` is not callable, or if backward cannot use a loss.
        """

    def run_task(self, task: BatchTask, piece: Tree) -> None:
        """Run forward and backward on a piece of a task's batch, or on all of it, and add its loss to the task.

        Args:
            task: Call of `forward_backward`, with its loss function.
            piece: Piece of the batch, or the whole batch.
        """
        with self.micro_batch(self, self.prepared.models):
            weigh = task.make_weigher(piece)
            loss = self.strategy.compute_loss(task.fn, piece, task.weight, task.reduction)
            self.backward(loss, weigh(), task.reduction)
            micro_weight = self.windows.current.micro_weight
            task.add(loss.detach(), 1.0 if micro_weight is None else micro_weight.local)

    @property
    def pieces(self) -> Any:
        """Object that limits the rows per micro-batch (`headway.extras.replay.piece_size.PieceSize`).

        None if this step never splits batches.
        """
        return None

    def forget_windows(self) -> None:
        """Discard the current batch and all accumulation windows."""
        self.windows.reset()
        self.turns.forget_models()


class WholeStep(TrainingStep):
    """Training step that runs each batch once, without splitting it."""

    def _run_block_backward(
        self, window: AccumulationWindow, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any
    ) -> None:
        """Run backward in a micro-batch. In the window's last one, also close the window.

        Args:
            window: Accumulation window of the micro-batch.
            loss: Scalar loss with a graph.
            weight: Weight that the caller passed, or None.
            reduction: Whether the loss is the "mean" or the "sum" over its items.
            **kwargs: Passed to the strategy's backward.
        """
        is_only_backward = window.is_last and not window.has_gradient
        local_weight = self.weigh_micro_batch(window, weight)
        if is_only_backward and window.global_weight:
            # The window's total weight is known before its only backward, so gradients need no correction.
            window.nominal_weight = window.global_weight
        elif window.nominal_weight is None:
            window.nominal_weight = self._agree_on_nominal_weight(window)
        nominal_weight = window.nominal_weight or 1.0  # None: all weights so far are zero, and so are the factors
        if not window.is_last:
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
        elif window.is_closed:  # a further loss of the last micro-batch, whose first loss has closed the window
            self.strategy.expect_backward(window.models)
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            self.strategy.reduce_gradients()
        elif window.global_weight is not None:
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            self.close_window(window, window.global_weight)
        else:
            # The sum of the weights over ranks overlaps with backward.
            group = self.strategy.data_group
            pending = group.start_sum([window.local_weight])
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            self.close_window(window, group.finish_sum(pending)[0])

    def _agree_on_nominal_weight(self, window: AccumulationWindow) -> float | None:
        """Return the predicted total weight of a window that no full window came before. It is equal on all ranks.

        It is the current micro-batch's weight, summed over ranks, times the number of micro-batches per update. Return
        None if the sum is 0. If the sum is not known locally, this is a collective.
        """
        assert window.micro_weight is not None
        local, over_ranks = window.micro_weight
        total = self.strategy.data_group.reduce_numbers([local])[0] if over_ranks is None else over_ranks
        return total * self.windows.num_steps if total > 0 else None

    def _run_standalone_backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Run backward outside any `accumulate` block, in an accumulation window of its own, and close the window.

        The loss is divided by `num_steps`, because the script may add up the gradients of that many backwards. The script
        can step after any of them, so gradients cannot be corrected later. So the window's total weight is found before
        the backward, if necessary in a collective.
        """
        windows, hooks, num_steps = self.windows, self.hooks, self.windows.num_steps
        if num_steps > 1:
            log.warning_once(STANDALONE_BACKWARDS, num_steps, num_steps)
        for check in hooks.before_learning:
            check()
        previous = windows.current
        if previous.models and previous.micro_weight is None and self.strategy.capabilities.lone_forward:
            # The forward may have run in the latest block, without gradient reduction, and only its backward outside.
            self.strategy.expect_backward(previous.models)
        window = windows.begin_standalone_window()
        for listener in hooks.micro_batch_begun:
            listener(window.number, window.num_done)
        if windows.are_closed and self.precision.scaler is not None:
            self.precision.update_scale()
        # If the script defines windows itself, batches may have been read ahead, so that the loader's counts belong to
        # another batch. All processes therefore get the same weight.
        has_equal_weights = num_steps > 1 and weight is None
        loss_weight = LossWeight(1.0, self.strategy.data_shard.count) if has_equal_weights else self.weigh_loss(weight)
        total_weight = loss_weight.over_ranks
        if total_weight is None:
            total_weight = self.strategy.data_group.reduce_numbers([loss_weight.local])[0]
        window.close(total_weight)
        self.run_backward(window, loss, loss_weight.local, total_weight * num_steps or 1.0, reduction, **kwargs)
        self.strategy.reduce_gradients()
        for notify in hooks.gradients_final:
            notify()

    def apply_update(
        self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None
    ) -> bool:
        """Make the optimizer step, unless the `StepGuard` refuses the update.

        Args:
            optimizer: torch's own optimizer.
            strategy: Strategy that set up the optimizer's parameters.
            closure: Closure as for a torch optimizer, or None.

        Returns:
            Whether the parameters were updated. False if the guard refused the update, or if the gradient scaler (fp16)
                skipped the step because of an overflow.
        """
        for check in self.hooks.before_update:
            check()
        window = self.find_window_of_optimizer(optimizer) or self.windows.current
        return self.guard.can_update(window) and strategy.step_optimizer(optimizer, self.precision, closure)

    def tick_scheduler(self, step_scheduler: Callable[[], None]) -> None:
        """Advance the scheduler at once by calling `step_scheduler`, because no batch is run again."""
        step_scheduler()

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """Yield the whole batch, without splitting it."""
        with self._count_rows(batch):
            yield batch

    @contextmanager
    def _count_rows(self, batch: Tree) -> Iterator[None]:
        """Return a context in which losses are weighted by the number of rows of `batch`.

        A batch from a prepared loader is weighted by the loader's row counts instead.
        """
        num_rows = find_batch_size(batch) if self.windows.loader is None else None
        self.windows.set_piece(UNSPLIT if num_rows is None else BatchPiece(0, num_rows, num_rows, True))
        try:
            yield
        finally:
            self.windows.set_piece(UNSPLIT)

    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """Run `fn` and backward on the whole batch, and return the mean loss per item over all ranks as a 0-d tensor."""
        task = BatchTask(batch, fn, weight, reduction)
        with self._count_rows(batch):
            self.run_task(task, batch)
        return task.loss(self.strategy.data_group)
