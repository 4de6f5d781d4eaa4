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

`WholeStep` (`whole_step.py`) runs each batch once. Another step, in `headway.extras.replay`, splits a batch into pieces
(smaller micro-batches), and repeats the batch if memory ran out. A step receives all objects that it needs in its
constructor.

This code runs for every micro-batch of every run, so disabled features must cost nothing. A disabled feature is an
empty list or a flag that is set at construction, not a call that does nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from headway.core.runtime.collectives.tree import Tree
from headway.core.strategies.base import Strategy, does_override
from headway.core.training.checks.first_window import FirstWindow
from headway.core.training.checks.loss_errors import refuse_loss, refuse_weight
from headway.core.training.checks.loss_weights import LossWeightSums
from headway.core.training.guard import StepGuard
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.model_turns import BACKWARD_AFTER_STEP, ModelTurns
from headway.core.training.run import Run
from headway.core.training.task import BatchTask, RowSplitter, Weigher
from headway.core.training.windows import UNSPLIT, AccumulationWindow, LossWeight
from headway.errors import LossError, StateError
from headway.log import get_logger

log = get_logger(__name__)

_NO_CONTEXT = nullcontext()


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
        self._weight_sums = LossWeightSums(run.strategy)
        # Find out once which methods the strategy overrides, so that micro-batches skip calls that would do nothing.
        self.can_defer = does_override(run.strategy, Strategy.micro_batch_context)
        self._has_engine_losses = does_override(run.strategy, Strategy.unshard_loss)
        self._replaces_parameters = does_override(run.strategy, Strategy.find_current)
        self._reduces_late = does_override(run.strategy, Strategy.reduce_gradients)
        self._has_collective_norm = does_override(run.strategy, Strategy.compute_total_norm)
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
            if weight is None:
                window.has_default_weights = True
            else:
                window.has_given_weights = True
            if over_ranks is None or window.global_weight is None or window.sums_weights:
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
        loader = windows.reads.loader
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
        is_final = self._are_gradients_final(current)
        # The norm of partial gradients is a collective, too, if they are sharded.
        if not self.run.clock.num_updates and (is_final or self._has_collective_norm):
            self._compare_clipping("clip_grad_norm_", f"max_norm={max_norm:.4g}, norm_type={norm_type:g}")
        if is_final:
            return self._clip_final(current, max_norm, norm_type)
        norm = self.precision.unscale_norm(self.strategy.compute_total_norm(current, norm_type))
        if self.windows.clips_partial_gradients:
            # Gradients stay scaled (fp16): the window's later micro-batches will be added to them.
            self.strategy.clip_gradients(current, max_norm, norm_type, norm)
        return norm

    def _compare_clipping(self, operation: str, arguments: str) -> None:
        """Check in a handshake that all ranks clip before the first update, with equal arguments.

        A rank that does not clip raises an error in the handshake of its next collective, which is a comparison before
        its update. Otherwise, the ranks would make different updates, or wait in the collective of a norm until the
        timeout. Do nothing while ranks train separately.

        Args:
            operation: "clip_grad_norm_" or "clip_grad_value_".
            arguments: Arguments of the call as text.

        Raises:
            CollectiveError: On all ranks, if they do not make the same call.
        """
        if self.weighs_losses and self.strategy.get_peers() is not None:
            self.strategy.everyone.gather_numbers((), operation, arguments)

    def _clip_final(self, parameters: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip final gradients by their global norm. Return the norm before clipping, and store it as `grad_norm`.

        fp16 gradients are unscaled first. If the guard has already computed the norm, reuse it.

        Args:
            parameters: Current parameters.
            max_norm: Largest norm after clipping.
            norm_type: Order of the norm.
        """
        if self.precision.scaler is not None:
            self._unscale_all(parameters)
        if self.guard.can_refuse_updates:
            window = self._find_window_of_parameters(parameters) or self.windows.current
            guard_norm = self.guard.before_clip(window, parameters, norm_type)
            norm = self.strategy.clip_gradients(parameters, max_norm, norm_type, guard_norm)
            self.guard.after_clip(window, parameters)
        else:
            norm = self.strategy.clip_gradients(parameters, max_norm, norm_type)
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
            if not self.run.clock.num_updates:
                self._compare_clipping("clip_grad_value_", f"clip_value={clip_value:.4g}")
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
        return window is not None and window.is_closed and not self.windows.are_steps_disabled

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
        self,
        optimizer: torch.optim.Optimizer,
        window: AccumulationWindow,
        strategy: Strategy,
        closure: Callable[[], Any] | None,
    ) -> bool:
        """Make torch's optimizer step on the final gradients of an accumulation window, unless the guard refuses.

        `PreparedOptimizer.step` calls it at the end of each window. Implementations first call `hooks.before_update`.

        Args:
            optimizer: torch's own optimizer, which `PreparedOptimizer` wraps.
            window: Closed window in which the optimizer's models trained last.
            strategy: Strategy that set up the optimizer's parameters. It can differ from that of this step if another
                Accelerator prepared the model.
            closure: Function that computes the loss again, as for torch's `step`. None: the optimizer needs none.

        Returns:
            Whether the parameters were updated. False if the guard refused the update, or fp16's gradient scaler
                skipped it because gradients overflowed.
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
    def microbatches(self, batch: Tree, split: RowSplitter | None) -> Iterator[Tree]:
        """Yield the batch in pieces (groups of rows) that fit into memory, from the start again if memory runs out.

        Without automatic micro-batching, yield the batch itself.

        Args:
            batch: Batch to train on.
            split: Function that slices the batch. None: slice all tensors that have as many rows as the batch.

        Raises:
            ConfigError: If `split` is not callable.
        """

    @abstractmethod
    def forward_backward(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Weigher | None,
        reduction: str,
        split: RowSplitter | None,
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch, and return the mean loss per item over all ranks as a 0-d tensor.

        With automatic micro-batching, the batch is split into pieces if it does not fit into memory.

        Args:
            batch: Batch to train on.
            fn: Function from the batch, or a piece of it, to its loss.
            weight: Function from the batch, or a piece of it, to the number of items that the loss was taken over.
                None: the number of rows.
            reduction: Whether `fn` returns the "mean" or the "sum" of the loss over these items.
            split: Function that slices the batch. None: slice all tensors that have as many rows as the batch.

        Raises:
            LossError: If `fn` or `weight` is not callable, or if backward cannot use a loss.
            ConfigError: If `split` is not callable.
        """

    def run_task(self, task: BatchTask, piece: Tree) -> None:
        """Run forward and backward on a piece of a task's batch, or on all of it, and add its loss to the task.

        Args:
            task: Call of `forward_backward`, with its loss function.
            piece: Piece of the batch, or the whole batch.
        """
        with self.micro_batch(self, self.prepared.models):
            weigh = task.make_weigher(piece)
            loss = self.strategy.compute_loss(task.fn, piece, task.weight, task.reduction, task.split)
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
