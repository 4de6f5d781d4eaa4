"""Training step with automatic micro-batching: each batch runs in micro-batches, and is replayed if memory runs out."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from headway.core.runtime.collectives.tree import Tree, find_batch_size, list_tensors, slice_rows
from headway.core.strategies.base import Strategy
from headway.core.training.guard import StepGuard
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.run import Run
from headway.core.training.step import MicroBatch, TrainingStep
from headway.core.training.task import BatchTask, RowSplitter, Weigher, check_splitter
from headway.core.training.windows import UNSPLIT, AccumulationWindow, BatchPiece, LossWeight
from headway.errors import StateError
from headway.extras.replay.allocator_pressure import AllocatorPressure
from headway.extras.replay.image_rows import has_images, make_image_slicer
from headway.extras.replay.piece_size import PieceSize
from headway.extras.replay.rounds import Rounds
from headway.extras.replay.snapshot import BatchSnapshot
from headway.extras.replay.transaction import BatchTransaction
from headway.extras.replay.unsplit_check import UnsplitCheck

_NO_PIECE = (
    "under microbatching='auto' every accumulate and backward belongs to a batch that can be split: loop with `for piece in "
    "accelerator.microbatches(batch): with accelerator.accumulate(model): ...`, or use accelerator.forward_backward(batch, fn)"
)

_IN_TURN = (
    "two accumulate() blocks with different models are in one loop over accelerator.microbatches(batch): if the batch is "
    "split, the second model would be trained with weights of the first one that are not updated yet. Loop over "
    "microbatches(batch) once for each "
    "(docs/several_models.md)"
)


class PieceBlock(MicroBatch):
    """Context manager in which one micro-batch of a split batch runs forward and backward."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Begin a micro-batch of a batch.

        Raises:
            StateError: If the code is not inside `microbatches` or `forward_backward`, or if another micro-batch of
                this batch trains other models.
        """
        windows = self._step.windows
        if not windows.is_in_splittable_batch:
            raise StateError(_NO_PIECE)
        if windows.current.batch == windows.piece.batch and windows.current.models != tuple(self._models):
            raise StateError(_IN_TURN)
        super().__enter__()


class PieceStep(TrainingStep):
    """Training step that runs each batch in micro-batches, as a transaction that can be undone and replayed.

    Gradients are not reduced over ranks before all ranks have reported that their micro-batches succeeded.

    Args:
        run: Run of the Accelerator.
        policy: Policy that determines how losses are divided in an accumulation window.
        guard: Guard that checks losses and gradients for problems such as NaNs.

    Attributes:
        transaction: Transaction of the current batch.
        reduces_pieces: Whether each micro-batch reduces its gradients at once, because its forward or backward contains
            collectives. All ranks then run the same number of micro-batches.

    Raises:
        UnsupportedError: If the strategy cannot undo a step.
    """

    micro_batch = PieceBlock

    def __init__(self, run: Run, policy: LossPolicy, guard: StepGuard) -> None:
        super().__init__(run, policy, guard)
        strategy, runtime = run.strategy, run.runtime
        strategy.capabilities.require("rollback", strategy.name, "leave microbatching off")
        states = run.windows, run.clock, run.seen, run.precision, strategy
        snapshot = BatchSnapshot(run.prepared, states, runtime.hardware)
        self.reduces_pieces = not strategy.capabilities.lone_pieces
        rounds = Rounds(strategy, runtime) if self.reduces_pieces else None
        allocator = AllocatorPressure(runtime.hardware, runtime.device)
        self.transaction = BatchTransaction(strategy, snapshot, allocator, run.prepared, rounds)
        self._unsplit_check = UnsplitCheck()
        self._num_batches = 0
        self._rows_by_rank: list[int] = []  # of the batch, if `reduces_pieces`

    # ---------------------------------------------------------------- micro-batches

    def handle_error(self, error: BaseException) -> bool:
        """Handle an error that was raised while a micro-batch ran. If memory ran out, prepare the replay.

        Returns:
            Whether the error is suppressed, because the batch will be replayed.
        """
        if self.transaction.handle_error(error):
            self.windows.withdraw_piece()
            return True
        return super().handle_error(error)

    def weigh_loss(self, weight: float | None) -> LossWeight:
        """Return the weight of a loss on this rank and over all ranks.

        Without `weight`, the weight is the number of rows, and a warning is given if the labels contain padding. Row
        counts do not take padding into account.
        """
        if weight is None:
            self.transaction.check_padding()
        loss_weight = super().weigh_loss(weight)
        # A micro-batch that only repeats rows has the total of a real one, but a local weight of zero.
        is_repeated = self.windows.piece.num_rows == 0
        return LossWeight(0.0, loss_weight.over_ranks) if is_repeated else loss_weight

    def _run_block_backward(
        self, window: AccumulationWindow, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any
    ) -> None:
        """Run the backward of a micro-batch's loss, and complete the gradients after the window's last micro-batch.

        Args:
            window: Accumulation window of the micro-batch.
            loss: Scalar loss with a graph.
            weight: Weight that the script has passed, or None.
            reduction: Whether the loss is the "mean" or the "sum" over its items.
            **kwargs: Passed to the strategy's backward.
        """
        if self.reduces_pieces and window.is_first and not window.has_gradient and self.weighs_losses:
            window.sums_weights = self._weight_sums.compare_calls(weight is not None, reduction)
        local_weight = self.weigh_micro_batch(window, weight)
        if window.nominal_weight is None:
            window.nominal_weight = self._estimate_nominal(window)
        parameters = [p for p in self.prepared.list_parameters_of(window) if p.requires_grad]
        reduced_grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        if window.is_closed:
            # A further loss of the last piece: gradients already reduced must not be reduced again.
            reduced_grads = _take_gradients(parameters)
            self.strategy.expect_backward(window.models)
        self.run_backward(window, loss, local_weight, window.nominal_weight or 1.0, reduction, **kwargs)
        if not window.is_last:
            return
        total_weight, has_gaps = self.transaction.vote_on_gradients(window, parameters)
        if not window.is_closed:
            self.close_window(window, total_weight, parameters, has_gaps)
            return
        self.strategy.reduce_gradients(parameters, has_gaps)
        for parameter, grad in reduced_grads:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for listener in self.hooks.gradients_changed:
            listener()

    def _estimate_nominal(self, window: AccumulationWindow) -> float | None:
        """Return the expected total weight of the accumulation window, or None if it is zero.

        If gradients are reduced in each micro-batch's backward, the value is equal on all ranks. It is computed from
        the loader's row counts, or in a collective if the total weight of the micro-batch is unknown. Otherwise each
        rank uses its own estimate, because gradients are corrected before they are reduced.
        """
        assert window.micro_weight is not None
        local, over_ranks = window.micro_weight
        share = self.windows.piece.share  # fraction of the batch's rows that are in this micro-batch
        if not self.reduces_pieces:
            micro_batch_weight = local * self.strategy.data_shard.count if over_ranks is None else over_ranks
            batch_weight = micro_batch_weight / share
        elif over_ranks is None or window.sums_weights:
            batch_weight = self.strategy.data_group.reduce_numbers([local / share])[0]
        else:
            loader = self.windows.reads.loader
            row_counts = None if loader is None else loader.valid_counts
            batch_weight = float(self.strategy.data_shard.count if row_counts is None else sum(row_counts))
        return batch_weight * self.windows.num_steps if batch_weight > 0 else None

    def _run_standalone_backward(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        raise StateError(_NO_PIECE)

    # ---------------------------------------------------------------- final gradients

    # A replay of the batch repeats these changes of its final gradients.

    def _compare_clipping(self, operation: str, arguments: str) -> None:
        # Otherwise, a rank whose memory ran out while gradients were reduced would not join the handshake.
        if self.reduces_pieces:
            super()._compare_clipping(operation, arguments)

    def _clip_final(self, parameters: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
        clip = partial(super()._clip_final, parameters, max_norm, norm_type)
        return self.transaction.run_gradient_action(clip)  # type: ignore[no-any-return]

    def _clamp_final(self, parameters: list[Any], clip_value: float) -> None:
        self.transaction.run_gradient_action(partial(super()._clamp_final, parameters, clip_value))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's reduced gradients by the loss scale (fp16)."""
        self.transaction.run_gradient_action(partial(super().unscale, optimizer))

    def apply_update(
        self,
        optimizer: torch.optim.Optimizer,
        window: AccumulationWindow,
        strategy: Strategy,
        closure: Callable[[], Any] | None,
    ) -> bool:
        """Run the optimizer step, or replay the batch if memory runs out. Return whether the update happened.

        The guard, which checks losses and gradients for problems such as NaNs, can forbid the update. All ranks still
        report to each other whether the batch has succeeded. A replay asks the guard again, because ranks that
        failed before this point have not asked it yet.

        Args:
            optimizer: Prepared optimizer, without its wrapper.
            window: Accumulation window that the update ends.
            strategy: Strategy that makes the step.
            closure: Closure that the script has passed to `step`. Must be None.

        Raises:
            UnsupportedError: If a closure is given.
            TransactionReplay: If the caller's loop over `microbatches` must replay the batch.
        """

        def make_step() -> Callable[[], bool]:
            # Find the window again, because a replay may have replaced it.
            current_window = self.find_window_of_optimizer(optimizer) or self.windows.current
            # The guard's collective must not run inside the step, which can be measured and undone.
            is_permitted = self.guard.can_update(current_window)
            return lambda: is_permitted and strategy.step_optimizer(optimizer, self.precision, None)

        for check in self.hooks.before_update:
            check()
        return self.transaction.step_optimizer(optimizer, make_step, closure)

    def clear_gradients(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Clear the optimizer's gradients.

        This includes the gradients of earlier batches of the accumulation window, which the batch's snapshot stores.

        Args:
            optimizer: Optimizer whose parameters' gradients are cleared.
            set_to_none: Whether to set gradients to None instead of zero. Sharded gradients are always set to None.
        """
        self.transaction.forget_gradients(optimizer)
        super().clear_gradients(optimizer, set_to_none)

    def tick_scheduler(self, step_scheduler: Callable[[], None]) -> None:
        """Defer a scheduler's step until the batch is committed, so that it steps once per batch.

        For a batch that was split, the loop calls this method once per micro-batch.

        Args:
            step_scheduler: Function that steps the scheduler.
        """
        self.transaction.tick_scheduler(step_scheduler, self.windows.piece.is_last)

    @property
    def pieces(self) -> PieceSize:
        """Adaptive limit on the number of rows per micro-batch.

        The limit affects which random numbers a forward draws, so checkpoints contain it.
        """
        return self.transaction.size

    def drop_all_gradients(self) -> None:
        """Drop the gradients of all models, and those of an uncommitted batch, because the run's state was loaded."""
        self.transaction.abandon_batch(is_window_dropped=True)
        super().drop_all_gradients()

    def forget_windows(self) -> None:
        """Drop the current batch and all accumulation windows whose update has not been made."""
        self.transaction.release()
        super().forget_windows()

    # ---------------------------------------------------------------- batches

    def microbatches(self, batch: Tree, split: RowSplitter | None) -> Iterator[Tree]:
        """Yield the batch's micro-batches. If memory ran out, yield the whole batch again, in smaller micro-batches.

        Args:
            batch: Batch of this rank.
            split: Function that slices the batch. None: slice all tensors that have as many rows as the batch, and
                the images of vision-language models.

        Raises:
            StateError: If a micro-batch is being processed already.
            ConfigError: If `split` is not callable.
            DataError: If the images of a batch that must be split cannot be assigned to its rows.
        """
        check_splitter(split, "microbatches")
        self._check_not_inside("microbatches")
        self.transaction.begin_batch()
        self._gather_rows(batch)
        self._num_batches += 1
        try:
            while True:
                yield from self._iterate_pieces(batch, split)
                if self.transaction.try_commit():
                    return
                self.transaction.rollback()
        finally:
            self._end_batch()

    def _check_not_inside(self, name: str) -> None:
        """Raise an error if a method that begins a batch is called while a micro-batch is being processed.

        Args:
            name: Name of the called method, for the message.

        Raises:
            StateError: If a micro-batch is being processed.
        """
        if self.windows.is_in_splittable_batch:
            raise StateError(
                f"{name} inside a micro-batch of accelerator.microbatches (or forward_backward): micro-batches are not split "
                "further; smaller ones follow automatically if memory runs out. Call accelerator.backward on the micro-batch"
            )

    def _end_batch(self) -> None:
        """End a batch. If it was left early, undo it, unless its accumulation window is complete and discarded."""
        self._clear_piece()
        window = self.windows.current
        self.transaction.abandon_batch(is_window_dropped=window.is_closed and window.is_discarded)

    def _clear_piece(self) -> None:
        """Record that no micro-batch of a batch is being processed."""
        self.windows.set_piece(UNSPLIT)
        self.transaction.set_piece(None, 0)

    def _iterate_pieces(self, batch: Tree, split: RowSplitter | None) -> Iterator[Tree]:
        """Yield the batch's micro-batches once. Stop early if the batch must be replayed.

        Args:
            batch: Batch of this rank. A batch without a batch dimension counts as one row, and is not split.
            split: Function that slices the batch, or None for the default.
        """
        num_rows, size = self._find_num_rows(batch), self.transaction.size
        total_rows = num_rows or 1
        # Of the rank with the most rows, because all ranks must run the same number of pieces.
        min_pieces = max((size.count_pieces(rows) for rows in self._rows_by_rank), default=1)
        ranges = [(0, 1)] if num_rows is None else size.split_rows(num_rows, min_pieces)
        num_pieces = max(min_pieces, len(ranges))
        if split is None and not has_images(batch, num_rows, self.prepared.models):
            self._unsplit_check.check(batch, num_rows)
        slice_batch = self._make_slicer(batch, num_rows, split) if len(ranges) > 1 else None
        self.transaction.set_batch_rows(total_rows)
        for index in range(num_pieces):
            # A rank with fewer rows than another rank has pieces repeats its first piece with weight zero.
            is_repeated = index >= len(ranges)
            start, stop = ranges[0] if is_repeated else ranges[index]
            counted_rows = 0 if is_repeated else stop - start
            self.windows.set_piece(BatchPiece(self._num_batches, counted_rows, total_rows, index == num_pieces - 1))
            piece = batch if slice_batch is None else slice_batch(start, stop)
            self.transaction.set_piece(piece, stop - start)
            yield piece
            if self.transaction.must_replay:
                return

    def _make_slicer(self, batch: Tree, num_rows: int | None, split: RowSplitter | None) -> Callable[[int, int], Tree]:
        """Return the function from (start, stop) to these rows of a batch that must be split.

        Args:
            batch: Batch of this rank.
            num_rows: Number of rows of the batch. None if its tensors have no common number of rows.
            split: Function that slices the batch, or None for the default.

        Raises:
            DataError: If the images of the batch cannot be assigned to its rows.
        """
        if split is not None:
            return partial(split, batch)
        if has_images(batch, num_rows, self.prepared.models):
            # FSDP gathers the parameters of the image encoder, in which all ranks must take part.
            return make_image_slicer(batch, self.prepared.models, needs_images=self.reduces_pieces)
        return partial(slice_rows, batch, num_rows=num_rows or 1)

    def _gather_rows(self, batch: Tree) -> None:
        """Gather and store the row counts of all ranks if forward or backward of a micro-batch contains collectives.

        In that case, all ranks must run an equal number of micro-batches, which depends on these counts.
        """
        if self.reduces_pieces:
            rows = self.strategy.everyone.gather_numbers([float(self._find_num_rows(batch) or 0)])
            self._rows_by_rank = [int(row[0]) for row in rows]

    def _find_num_rows(self, batch: Tree) -> int | None:
        """Return the number of rows (samples) in a batch, or None if its tensors have no batch dimension.

        The loader's count is used if it equals the first dimension of any tensor. Otherwise the batch size is found
        from the tensors' first dimensions.
        """
        active_loaders = self.windows.reads.active_loaders
        loader_rows = active_loaders[-1].num_rows if active_loaders else None
        if loader_rows and any(t.ndim > 0 and t.shape[0] == loader_rows for t in list_tensors(batch)):
            return loader_rows
        return find_batch_size(batch) or None

    def forward_backward(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Weigher | None,
        reduction: str,
        split: RowSplitter | None,
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch, in micro-batches if necessary, and return the loss over all ranks.

        Args:
            batch: Batch of this rank.
            fn: Function that returns the loss of a micro-batch.
            weight: Function that returns the number of items in a micro-batch over which its loss was taken. None: the
                number of rows.
            reduction: Reduction of the loss over its items: "mean" or "sum".
            split: Function that slices the batch. None: slice all tensors that have as many rows as the batch, and
                the images of vision-language models.
        """
        task = BatchTask(batch, fn, weight, reduction, split)
        self._check_not_inside("forward_backward")
        self._num_batches += 1
        run_pieces = partial(self._run_task_pieces, task, self._num_batches)
        self.transaction.begin_batch(run_pieces)
        try:
            self._gather_rows(batch)
            run_pieces()
        except BaseException:
            self._end_batch()
            raise
        return task.loss(self.strategy.data_group)

    def _run_task_pieces(self, task: BatchTask, number: int) -> None:
        """Run a batch in micro-batches until all of them have succeeded.

        If memory runs out, run the whole batch again in smaller micro-batches. Afterwards, the batch is committed,
        unless it ends an accumulation window. In that case, the optimizer step commits it.

        Args:
            task: Batch and function to run.
            number: Number of the batch.
        """
        transaction = self.transaction
        self._num_batches = number
        while True:
            task.start_over()
            for piece in self._iterate_pieces(task.batch, task.split):
                self.run_task(task, piece)
            if not transaction.must_replay and self.windows.are_gradients_final:
                transaction.record_gradient_versions()
                break
            # A batch that does not end its window is committed at once.
            if transaction.try_commit():
                break
            transaction.rollback()
        self._clear_piece()


def _take_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Set `grad` of each parameter to None, and return pairs of (parameter, former gradient) for those that had one."""
    pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in pairs:
        parameter.grad = None
    return pairs
