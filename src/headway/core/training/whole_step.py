"""`WholeStep`, the training step that runs each batch once, without splitting it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.core.runtime.collectives.tree import Tree, find_batch_size
from headway.core.strategies.base import Strategy
from headway.core.training.checks.first_window import STANDALONE_BACKWARDS
from headway.core.training.guard import StepGuard
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.run import Run
from headway.core.training.step import TrainingStep
from headway.core.training.task import BatchTask, RowSplitter, Weigher, check_splitter
from headway.core.training.windows import UNSPLIT, AccumulationWindow, BatchPiece, LossWeight
from headway.errors import UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)


class WholeStep(TrainingStep):
    """Training step that runs each batch once, without splitting it.

    Args:
        run: Run of the Accelerator.
        policy: Policy for averaging losses.
        guard: Guard that watches losses and gradients.
    """

    def __init__(self, run: Run, policy: LossPolicy, guard: StepGuard) -> None:
        super().__init__(run, policy, guard)
        # Whether the weights of standalone backwards are summed in a collective. None before the first of them.
        self._sums_standalone_weights: bool | None = None

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
        is_first_backward = not window.has_gradient
        if window.is_first and is_first_backward and self.weighs_losses:
            window.sums_weights = self._weight_sums.compare_calls(weight is not None, reduction)
        local_weight = self.weigh_micro_batch(window, weight)
        is_only_backward = window.is_last and is_first_backward
        if is_only_backward and window.global_weight:
            # The window's total weight is known before its only backward, so gradients need no correction.
            window.nominal_weight = window.global_weight
        elif window.nominal_weight is None:
            window.nominal_weight = self._agree_on_nominal_weight(window)
        nominal_weight = window.nominal_weight or 1.0  # None: all weights so far are zero, and so are the factors
        if not window.is_last:
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            return
        if window.is_closed:  # a further loss of the last micro-batch, whose first loss has closed the window
            self.strategy.expect_backward(window.models)
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            self.strategy.reduce_gradients()
            for listener in self.hooks.gradients_changed:
                listener()
            return
        if window.global_weight is not None:
            self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
            self.close_window(window, window.global_weight)
            return
        # The sum of the weights over ranks overlaps with backward.
        pending = self._weight_sums.start(window)
        self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
        self.close_window(window, self._weight_sums.finish(window, pending))

    def _agree_on_nominal_weight(self, window: AccumulationWindow) -> float | None:
        """Return the predicted total weight of a window that no full window came before. It is equal on all ranks.

        It is the current micro-batch's weight, summed over ranks, times the number of micro-batches per update. Return
        None if the sum is 0. If the sum is not known locally, this is a collective.
        """
        assert window.micro_weight is not None
        total = window.micro_weight.over_ranks
        if total is None or window.sums_weights:
            total = self._weight_sums.finish(window, self._weight_sums.start(window))
        return total * self.windows.num_steps if total > 0 else None

    def _run_standalone_backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        """Run backward outside any `accumulate` block, in a separate accumulation window, and close the window.

        If the run accumulates gradients over `num_steps` micro-batches, the loss is divided by `num_steps`, because the
        script may add up the gradients of that many backwards. The script can step after any of them, so gradients
        cannot be corrected later. So the window's total weight is found before the backward, if necessary in a
        collective.

        Args:
            loss: Scalar loss with a graph.
            weight: Weight that the caller passed, or None.
            reduction: Whether the loss is the "mean" or the "sum" over its items.
            **kwargs: Passed to the strategy's backward.
        """
        num_steps = self.windows.num_steps
        if num_steps > 1:
            log.warning_once(STANDALONE_BACKWARDS, num_steps, num_steps)
        window = self._begin_standalone_window()
        local_weight, total_weight = self._weigh_standalone_loss(window, weight, reduction)
        assert window.global_weight is not None
        window.global_weight += total_weight
        window.close(window.global_weight)
        # If the loss has weight 0 on all ranks, so is its factor, and 1.0 avoids a division by 0.
        nominal_weight = total_weight * num_steps or 1.0
        self.run_backward(window, loss, local_weight, nominal_weight, reduction, **kwargs)
        self.strategy.reduce_gradients()
        for notify in self.hooks.gradients_final:
            notify()

    def _begin_standalone_window(self) -> AccumulationWindow:
        """Run the checks before a backward outside any `accumulate` block, and return a new window for it."""
        windows, hooks = self.windows, self.hooks
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
        return window

    def _weigh_standalone_loss(
        self, window: AccumulationWindow, weight: float | None, reduction: str
    ) -> tuple[float, float]:
        """Return the weight of a loss outside any `accumulate` block: (on this rank, sum over all ranks).

        If losses are weighted, the first call is a collective, in which ranks compare their arguments. Other calls are
        collectives only if the sum over the ranks is not known locally.

        Args:
            window: Accumulation window of the loss.
            weight: Weight that the caller passed, or None.
            reduction: Whether the loss is the "mean" or the "sum" over its items.
        """
        if self._sums_standalone_weights is None:
            self._sums_standalone_weights = self.weighs_losses and self._weight_sums.compare_calls(
                weight is not None, reduction
            )
        if self.windows.num_steps > 1 and weight is None:
            # The script defines windows itself, so batches may have been read ahead, and the loader's counts may belong
            # to another batch. All ranks therefore get the same weight.
            loss_weight = LossWeight(1.0, self.strategy.data_shard.count)
        else:
            loss_weight = self.weigh_loss(weight)
        if loss_weight.over_ranks is not None and not self._sums_standalone_weights:
            return loss_weight.local, loss_weight.over_ranks
        window.local_weight = loss_weight.local
        window.has_given_weights = weight is not None
        window.has_default_weights = weight is None
        total_weight = self._weight_sums.finish(window, self._weight_sums.start(window))
        self._sums_standalone_weights = window.sums_weights
        return loss_weight.local, total_weight

    def apply_update(
        self,
        optimizer: torch.optim.Optimizer,
        window: AccumulationWindow,
        strategy: Strategy,
        closure: Callable[[], Any] | None,
    ) -> bool:
        """Run the checks that come before an update, and make torch's optimizer step unless the guard refuses it.

        Args:
            optimizer: torch's own optimizer, which `PreparedOptimizer` wraps.
            window: Closed window in which the optimizer's models trained last.
            strategy: Strategy that set up the optimizer's parameters.
            closure: Function that computes the loss again, as for torch's `step`. None: the optimizer needs none.

        Returns:
            Whether the parameters were updated. False if the guard refused the update, or if fp16's gradient scaler
                skipped it because gradients overflowed.

        Raises:
            NonFiniteError: If the loss or a gradient is NaN or infinite, and `on_non_finite` demands an error.
        """
        for check in self.hooks.before_update:
            check()
        if not self.guard.can_update(window):
            return False
        return strategy.step_optimizer(optimizer, self.precision, closure)

    def tick_scheduler(self, step_scheduler: Callable[[], None]) -> None:
        """Advance a learning rate scheduler at once, because this step never runs a batch again.

        Args:
            step_scheduler: Function that calls the scheduler's own `step`.
        """
        step_scheduler()

    def microbatches(self, batch: Tree, split: RowSplitter | None) -> Iterator[Tree]:
        """Yield the whole batch, without splitting it.

        Until the loop asks for the next item, losses are weighted by the batch's number of rows. A batch from a prepared
        loader is weighted by the loader's row counts instead.

        Args:
            batch: Batch to train on.
            split: Function that would slice the batch. It is only checked, because the batch is not sliced. None: no
                such function.

        Raises:
            ConfigError: If `split` is not callable.
            UnsupportedError: If `split` is given, and the strategy would split the model's calls without it.
        """
        check_splitter(split, "microbatches")
        if split is not None and self.strategy.capabilities.splits_calls:
            raise UnsupportedError(
                f"microbatches(batch, split=...) with the {self.strategy.name} strategy: here, each call of the model is split by "
                "rows, without this function. Use accelerator.forward_backward(batch, fn, split=split)"
            )
        with self._count_rows(batch):
            yield batch

    @contextmanager
    def _count_rows(self, batch: Tree) -> Iterator[None]:
        """Return a context in which losses are weighted by the number of rows of `batch`.

        A batch from a prepared loader is weighted by the loader's row counts instead.
        """
        num_rows = find_batch_size(batch) if self.windows.reads.loader is None else None
        self.windows.set_piece(UNSPLIT if num_rows is None else BatchPiece(0, num_rows, num_rows, True))
        try:
            yield
        finally:
            self.windows.set_piece(UNSPLIT)

    def forward_backward(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Weigher | None,
        reduction: str,
        split: RowSplitter | None,
    ) -> torch.Tensor:
        """Run `fn` and backward on the whole batch, and return the mean loss per item over all ranks as a 0-d tensor.

        Args:
            batch: Batch to train on.
            fn: Function from the batch to its loss.
            weight: Function from the batch to the number of items that the loss was taken over. None: the number of
                rows.
            reduction: Whether `fn` returns the "mean" or the "sum" of the loss over these items.
            split: Function that slices the batch, for a strategy that splits each call of the model. None: it slices
                all tensors that have as many rows as the batch.

        Raises:
            LossError: If `fn` or `weight` is not callable, or if backward cannot use the loss.
            ConfigError: If `split` is not callable.
        """
        task = BatchTask(batch, fn, weight, reduction, split)
        with self._count_rows(batch):
            self.run_task(task, batch)
        return task.loss(self.strategy.data_group)
