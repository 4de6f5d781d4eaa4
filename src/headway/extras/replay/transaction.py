"""Run each batch as a transaction: if memory runs out on any rank, undo and replay it in smaller micro-batches.

A piece is a micro-batch of the batch. In a vote, all ranks gather a few numbers, such as whether each has succeeded.

::

    begin -> pieces, each computed alone -> vote 1 -> gradients and buffers are reduced -> gradients are clipped or read
          -> optimizer state exists, temporaries are reserved -> vote 2 -> commit -> the update

If memory runs out on any rank before vote 2, all ranks learn of it at their next vote. They restore the state from
`begin_batch`, and run the batch again in smaller pieces. If memory runs out after vote 2, the run ends.

Gradients are not reduced before vote 1. No other collective runs during a vote, and a rank that calls another
collective gets an error instead of waiting.

If a batch is not replayed after an out-of-memory error, check these causes in this order:

- The layout does not support replays. See `_check_automatic_microbatching` in `headway.core.strategies.build`.
- The error is not recognized as an out-of-memory error. See `headway.core.memory.oom`.
- The batch was no longer open. `BatchTransaction.handle_error` returns False after vote 2.
- This rank could not join the collectives in which the others wait. See `rounds.py`, and `clean_up_failure` and
  `join_collective` of the strategy (`headway.core.strategies.fully_sharded`).
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.core.memory.oom import free_memory_of_failure, is_out_of_memory
from headway.core.runtime.collective_log import VOTE
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree
from headway.core.runtime.events import notify_listeners
from headway.core.strategies.base import Strategy
from headway.core.training.checks.loss_weights import raise_difference
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.windows import AccumulationWindow
from headway.errors import CollectiveError, MemoryExhausted, StateError, UnsupportedError
from headway.extras.replay.allocator_pressure import AllocatorPressure
from headway.extras.replay.padding_check import PaddingCheck
from headway.extras.replay.piece_size import PieceSize
from headway.extras.replay.rounds import Rounds
from headway.extras.replay.snapshot import BatchSnapshot
from headway.extras.replay.step_undo import OptimizerRecord, StepUndo
from headway.extras.replay.votes import Phase, Vote, VoteResult
from headway.log import get_logger

log = get_logger(__name__)


class TransactionReplay(BaseException):
    """Raised to return to the start of a batch after memory ran out on some rank. Headway always catches it.

    It is not an `Exception`, so that an `except Exception` in the user's loop does not catch it.
    """


class BatchTransaction:
    """Transaction of one batch: it runs completely on all ranks, or it is undone and replayed in smaller micro-batches.

    `PieceStep` uses it for automatic micro-batching. After each phase of the batch, all ranks report whether they have
    succeeded, which is called a vote. If memory ran out on any rank, all ranks replay the batch.

    Args:
        strategy: Strategy that reduces gradients.
        snapshot: Snapshot that `rollback` restores.
        allocator: Monitor of the device's memory.
        prepared: Registry of the prepared optimizers.
        rounds: Replay of collectives, for a rank that ran out of memory. None if forward passes contain no collectives.

    Attributes:
        allocator: Monitor of the device's memory.
        size: Limit on the rows per micro-batch.
        is_open: Whether a batch has begun and is not committed.
        must_replay: Whether a vote has decided that the batch must be replayed.
    """

    def __init__(
        self,
        strategy: Strategy,
        snapshot: BatchSnapshot,
        allocator: AllocatorPressure,
        prepared: PreparedObjects,
        rounds: Rounds | None,
    ) -> None:
        self.allocator = allocator
        self.size = PieceSize()
        self.is_open = False
        self.must_replay = False
        self._strategy = strategy
        self._snapshot = snapshot
        self._prepared = prepared
        self._rounds = rounds
        self._collectives: Collectives = strategy.everyone
        self._padding_check = PaddingCheck()
        self._optimizer_records: dict[int, OptimizerRecord] = {}  # by `id` of the optimizer
        # The current batch
        self._run_pieces: Callable[[], None] | None = None  # None: the caller's loop runs the micro-batches
        self._piece: Tree = None
        self._piece_rows = 0  # of the current micro-batch; 0 after its peak memory has been recorded
        self._max_piece_rows = 1
        self._batch_rows = 1
        self._num_pieces = 0
        self._step_undo: StepUndo | None = None  # undoes the optimizer step that was made before its vote
        self._deferred_ticks: list[Callable[[], None]] = []  # scheduler steps to make after the commit
        # Changes of the reduced gradients. A replay repeats those of Headway, and is impossible after those of the user.
        self._gradient_actions: list[Callable[[], Any]] = []
        self._gradient_versions: list[tuple[torch.Tensor, int]] = []
        self._has_user_changes = False
        self._last_result = VoteResult()
        self._has_thrashed = False  # in any vote on the batch

    # ---------------------------------------------------------------- begin and end

    def set_batch_rows(self, num_rows: int) -> None:
        """Set the number of rows of the whole batch, from which the next micro-batch size is predicted.

        Args:
            num_rows: Rows of the batch that is about to run.
        """
        self._batch_rows = num_rows

    def begin_batch(self, run_pieces: Callable[[], None] | None = None) -> None:
        """Begin a batch, and save the state that `rollback` restores.

        If the previous batch is still open, because no optimizer step has committed it, commit it first.

        Args:
            run_pieces: Function that runs the batch's micro-batches again for a replay. None: the caller's loop does.

        Raises:
            TransactionReplay: If the caller's loop must replay the previous batch.
        """
        if self.is_open:
            self.finish_batch()
        self._snapshot.save_state()
        self.is_open, self.must_replay, self._run_pieces = True, False, run_pieces
        self._max_piece_rows, self._num_pieces = 1, 0
        self._gradient_actions.clear()
        if self._rounds is not None:
            self._rounds.open_batch()

    def set_piece(self, piece: Tree, num_rows: int) -> None:
        """Record the micro-batch that runs next.

        Args:
            piece: Tensors of the micro-batch, or None after the last one.
            num_rows: Number of rows in the micro-batch.
        """
        if self.size.is_calibrating and self.is_open:
            # The first piece of several does not count, because gradients do not exist yet.
            self.allocator.record_piece(self._piece_rows if self._num_pieces > 1 else 0)
        self._piece = piece
        self._max_piece_rows = max(self._max_piece_rows, num_rows)
        self._num_pieces += 1
        self._piece_rows = num_rows

    def try_commit(self) -> bool:
        """Commit the batch after all of its micro-batches have run, if they succeeded on all ranks.

        Returns:
            Whether the batch was committed. If not, the caller must call `rollback` and run the micro-batches again.
        """
        # Without the function, `finish_batch` raises an error instead of replaying the batch itself.
        run_pieces, self._run_pieces = self._run_pieces, None
        try:
            if not self.must_replay:
                self.finish_batch()
        except TransactionReplay:
            return False
        finally:
            self._run_pieces = run_pieces if self.is_open else None
        return not self.must_replay

    def finish_batch(self) -> None:
        """Commit the batch if all ranks report success, unless an optimizer step has committed it already.

        Raises:
            TransactionReplay: If the caller's loop must replay the batch.
        """
        while self.is_open:
            is_done, _ = self._try_action(self._vote_and_commit)
            if is_done:
                return
            self._replay_batch()

    def _vote_and_commit(self) -> None:
        """Commit a batch that does not end its accumulation window, if all ranks report success."""
        self._snapshot.merge_gradients()
        self._vote_success(Phase.END)
        self._commit_batch()

    def rollback(self) -> None:
        """Restore the state that the run had at the beginning of the batch."""
        if self._step_undo is not None:
            self._step_undo.restore()
            self._step_undo = None
        self._snapshot.restore()
        self._deferred_ticks.clear()
        self.must_replay = False
        self._max_piece_rows, self._num_pieces = 1, 0

    def abandon_batch(self, is_window_dropped: bool) -> None:
        """End the batch. If it is not committed, the caller left it early, with `break` or because of an error.

        Args:
            is_window_dropped: Whether an uncommitted batch is left as it is, and the stored gradients of earlier
                batches in the accumulation window are dropped. If False, the batch is undone, and these gradients are
                restored.
        """
        if self.is_open:
            if is_window_dropped:
                self._snapshot.drop_gradients()
            else:
                self.rollback()
                self._snapshot.restore_gradients()
        self.is_open, self.must_replay, self._run_pieces = False, False, None
        self._deferred_ticks.clear()
        self._step_undo = None
        if self._rounds is not None:
            self._rounds.close_batch()

    def _commit_batch(self) -> None:
        """End the batch after it has succeeded on all ranks, step schedulers, and adapt the size of micro-batches."""
        self._padding_check.warn_if_found()
        if self._rounds is not None:
            self._rounds.close_batch()
        self._snapshot.drop_gradients()
        self._step_undo, self.is_open, self._run_pieces = None, False, None
        self._gradient_actions.clear()
        self._gradient_versions.clear()
        ticks, self._deferred_ticks = self._deferred_ticks, []
        for tick in ticks:
            tick()
        self._adapt_size()

    def _adapt_size(self) -> None:
        """Choose the micro-batch size of the next batches from the votes on this one. It is equal on all ranks."""
        has_thrashed, self._has_thrashed = self._has_thrashed, False
        result = self._last_result
        smaller_size = self.size.get_smaller_size(result.max_piece_rows)
        if has_thrashed and smaller_size:
            log.warning_once(
                "the device's allocator keeps emptying its cache to find memory: the next micro-batches are smaller"
            )
            self.allocator.reset_statistics()
            self.size.shrink(smaller_size, result.max_piece_rows)
            return
        old_limit, was_calibrating = self.size.limit, self.size.is_calibrating
        is_try_due = self.size.is_try_due(result.is_on_step)
        self.size.record_success(result.max_piece_rows, result.predicted_rows, result.batch_rows, result.is_on_step)
        if is_try_due or (was_calibrating and result.is_on_step):
            self.allocator.reset_peak()
        if self.size.limit != old_limit:
            self.allocator.release_cache()
            self.allocator.reset_peak()
            log.info("trying micro-batches of up to %s rows", self.size.limit)

    # ---------------------------------------------------------------- votes

    def _vote_success(self, phase: Phase, **numbers: float) -> list[Vote]:
        """Report to all ranks that this rank's batch has succeeded so far, and find out whether theirs have.

        Such an exchange of reports is called a vote.

        Args:
            phase: Point of the batch.
            numbers: Further fields of this rank's `Vote`, by name.

        Returns:
            The vote of every rank, by rank.

        Raises:
            TransactionReplay: If a rank has failed.
            CollectiveError: If a rank is at another point of the batch.
            MemoryExhausted: If a rank has failed with micro-batches of one row.
        """
        votes = self._exchange_votes(phase, self._make_vote(phase)._replace(**numbers))
        if self.must_replay:
            raise TransactionReplay
        return votes

    def _make_vote(self, phase: Phase) -> Vote:
        """Return this rank's vote without the fields that only `vote_on_gradients` sets.

        During a calibration, this also records the peak memory of the last micro-batch.
        """
        has_failed = phase == Phase.FAILED
        if not has_failed and self.size.is_calibrating:
            self.allocator.record_piece(self._piece_rows)
            self._piece_rows = 0  # the optimizer step that follows is not part of a piece
        smaller_size = (
            self.size.get_smaller_size(self._max_piece_rows, self.allocator.is_measured) if has_failed else -1
        )
        predicted_rows = 0 if self.allocator.is_measured else -1
        if not has_failed and self.size.is_try_due(is_update=phase == Phase.STEP):
            predicted_rows = self.allocator.predict_rows(self._max_piece_rows)
        return Vote(
            phase=float(phase),
            smaller_size=float(smaller_size),
            max_piece_rows=float(self._max_piece_rows),
            predicted_rows=float(predicted_rows),
            is_thrashing=float(not has_failed and self.allocator.is_thrashing()),
            batch_rows=float(self._batch_rows),
        )

    def _exchange_votes(self, phase: Phase, own_vote: Vote) -> list[Vote]:
        """Gather the votes of all ranks. If any rank has failed, shrink micro-batches and set `must_replay`.

        Args:
            phase: Point of the batch, at which all ranks that have not failed must be.
            own_vote: Vote of this rank.

        Returns:
            The vote of every rank, by rank.

        Raises:
            CollectiveError: If no rank has failed, and ranks are at different points of the batch.
            MemoryExhausted: If a failed rank cannot run smaller micro-batches.
        """
        votes = [Vote(*row) for row in self._collectives.gather_numbers(own_vote, VOTE)]
        if self._rounds is not None:
            self._rounds.end_round()
        result = VoteResult.from_votes(votes, phase)
        failed_ranks = [rank for rank, vote in enumerate(votes) if vote.phase == Phase.FAILED]
        if failed_ranks:
            self._shrink_pieces(votes, failed_ranks, is_measured=result.predicted_rows is not None)
        elif any(vote.phase != phase for vote in votes):
            phases = ", ".join(f"rank {rank}: {Phase(int(vote.phase)).name.lower()}" for rank, vote in enumerate(votes))
            raise CollectiveError(
                f"ranks are at different votes of one batch ({phases}). Every rank must run the same loop: the same accumulate, "
                "backward, step, in the same order"
            )
        self._last_result = result
        # A replay runs in smaller pieces, for which the statistics do not count.
        self._has_thrashed = not failed_ranks and (self._has_thrashed or any(vote.is_thrashing for vote in votes))
        return votes

    def _shrink_pieces(self, votes: Sequence[Vote], failed_ranks: list[int], is_measured: bool) -> None:
        """Lower the limit on the rows of a micro-batch, and request a replay.

        Args:
            votes: Vote of every rank.
            failed_ranks: Ranks that ran out of memory.
            is_measured: Whether the memory of every rank is measured.

        Raises:
            MemoryExhausted: If a failed rank cannot run smaller micro-batches.
        """
        limit = int(min(votes[rank].smaller_size for rank in failed_ranks))
        num_rows = int(min(votes[rank].max_piece_rows for rank in failed_ranks))
        rank_names = ", ".join(map(str, failed_ranks))
        self.must_replay = True
        self.allocator.release_cache()
        self.allocator.reset_statistics()
        if limit < 1:
            raise MemoryExhausted(
                f"memory ran out on rank {rank_names} with micro-batches of one row, which cannot be split further. "
                "Checkpoint activations, use a lower precision, shard the model or shorten the rows"
            )
        self.size.shrink(limit, num_rows, is_measured=is_measured)
        log.warning(
            "memory ran out on rank %s with micro-batches of %d rows: the batch is replayed in micro-batches of at most %d",
            rank_names,
            num_rows,
            limit,
        )
        notify_listeners("out_of_memory", ranks=failed_ranks, rows=num_rows, pieces=limit)

    # ---------------------------------------------------------------- errors

    def handle_error(self, error: BaseException) -> bool:
        """Prepare the replay of the batch if `error` permits it. Otherwise the caller must raise the error.

        An out-of-memory error before the commit permits it, and so does `TransactionReplay`. The memory that the error
        keeps alive is freed. After an out-of-memory error, the other ranks are informed in a vote.

        Returns:
            Whether the batch will be replayed.

        Raises:
            MemoryExhausted: If micro-batches cannot become smaller, or some rank cannot join the remaining collectives
                of the batch.
        """
        if isinstance(error, TransactionReplay):
            traceback.clear_frames(error.__traceback__)
            return True
        if self._rounds is not None and self.is_open:
            # If a rank cannot join, the collectives of the others are aborted. Their error has this reason.
            self._rounds.raise_if_lost(error)
        if not self.is_open or self.must_replay or not is_out_of_memory(error):
            return False
        self._report_failure(error)
        return True

    def _report_failure(self, error: BaseException) -> None:
        """Free the memory of the micro-batch that failed, and report the failure to all ranks.

        Raises:
            MemoryExhausted: If micro-batches cannot become smaller.
        """
        log.info("out of memory: %s", error, main_process_only=False)
        free_memory_of_failure(error)
        if self._rounds is not None:
            self._rounds.join_remaining()
        try:
            self._exchange_votes(Phase.FAILED, self._make_vote(Phase.FAILED))
        except MemoryExhausted as exhausted:
            raise exhausted from error

    def _try_action(self, action: Callable[[], Any]) -> tuple[bool, Any]:
        """Run `action`, unless memory runs out on some rank.

        Returns:
            Whether the action has succeeded, and its result. If it has not, the batch must be replayed.
        """
        try:
            return True, action()
        except (TransactionReplay, Exception) as error:
            if not self.handle_error(error):
                raise
            return False, None

    def _replay_batch(self) -> None:
        """Run the batch again until it succeeds.

        Raises:
            TransactionReplay: If only the caller's loop can run the micro-batches.
            StateError: If the user's code has changed gradients, because such a change cannot be repeated.
        """
        if self._run_pieces is None:
            raise TransactionReplay
        self._replay_pieces(self._run_pieces)

    def _replay_pieces(self, run_pieces: Callable[[], None]) -> None:
        """Run the micro-batches again from the restored state, and all actions on the gradients, until they succeed.

        Raises:
            StateError: If the user's code has changed gradients, because such a change cannot be repeated.
        """
        if self._has_user_changes:
            raise StateError(
                "memory ran out after gradients had been changed by hand between forward_backward and step, which cannot be "
                "repeated; use clip_grad_norm_, or the loop form (accelerator.microbatches)"
            )
        while True:
            self._gradient_versions.clear()
            self.rollback()
            run_pieces()
            if self._repeat_gradient_actions():
                self.record_gradient_versions()
                return

    def _repeat_gradient_actions(self) -> bool:
        """Run all actions on the reduced gradients again. Return False if the batch must be replayed once more."""
        for action in self._gradient_actions:
            is_done, _ = self._try_action(action)
            if not is_done:
                return False
        return True

    # ---------------------------------------------------------------- gradients

    def vote_on_gradients(
        self, window: AccumulationWindow, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[float, bool]:
        """Report that this rank has run its micro-batches, and find out whether all ranks have.

        This is the first vote on the batch. It takes place before gradients are reduced.

        Args:
            window: Accumulation window, with this rank's loss weights.
            parameters: Parameters whose gradients are checked.

        Returns:
            Sum of all ranks' weights, and whether gradients are missing on any rank.

        Raises:
            TransactionReplay: If memory ran out on some rank.
            LossError: On all ranks, if only some of them passed `weight=` to backward.
        """
        self._snapshot.merge_gradients()
        num_gaps = self._strategy.prepare_reduction(parameters)
        votes = self._vote_success(
            Phase.GRADIENTS,
            loss_weight=window.local_weight,
            num_gaps=float(num_gaps),
            data_shard=float(self._strategy.data_shard.index),
            has_given_weights=float(window.has_given_weights),
            has_default_weights=float(window.has_default_weights),
        )
        if len({(vote.has_given_weights, vote.has_default_weights) for vote in votes}) > 1:
            raise_difference(self._collectives, window.has_given_weights and not window.has_default_weights)
        # Ranks that read the same data shard have the same losses, which count once.
        weight_by_shard = {vote.data_shard: vote.loss_weight for vote in votes}
        return sum(weight_by_shard.values()), any(vote.num_gaps for vote in votes)

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients of earlier batches in the accumulation window.

        Needed if `zero_grad` is called before the first backward of the window.
        """
        self._snapshot.forget_gradients(optimizer)

    def run_gradient_action(self, action: Callable[[], Any]) -> Any:
        """Run a function that changes reduced gradients, such as clipping, and return its result.

        If the batch is replayed without returning to the caller's loop, the function is run again.

        Args:
            action: Function to run.
        """
        if not self.is_open or self._run_pieces is None:
            return action()
        self._detect_user_changes()
        while True:
            is_done, result = self._try_action(action)
            if is_done:
                self._gradient_actions.append(action)
                had_user_changes = self._has_user_changes
                self.record_gradient_versions()
                self._has_user_changes = had_user_changes
                return result
            self._replay_pieces(self._run_pieces)

    def record_gradient_versions(self) -> None:
        """Record the version counters of all gradients, to detect later changes by the user's code."""
        gradients = [p.grad for p in self._snapshot.parameters() if p.grad is not None]
        self._gradient_versions = [(grad, grad._version) for grad in gradients]
        self._has_user_changes = False

    def _detect_user_changes(self) -> None:
        """Record whether the user's code has changed gradients since `record_gradient_versions` was called.

        This must be called before Headway changes any gradient itself.
        """
        if any(grad._version != version for grad, version in self._gradient_versions):
            self._has_user_changes = True

    # ---------------------------------------------------------------- the step

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, make_step: Callable[[], Callable[[], bool]], closure: object = None
    ) -> bool:
        """Run the optimizer step, or replay the batch if memory runs out. Return whether the update happened.

        Args:
            optimizer: torch's own optimizer, not the prepared one.
            make_step: Function that returns the function that steps the optimizer. It is called again for each replay.
            closure: Must be None, because closures are not supported.

        Raises:
            TransactionReplay: If the caller's loop must replay the batch.
            UnsupportedError: If a closure is given.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) computes gradients itself, which microbatching='auto' cannot undo; leave the "
                "closure out, or microbatching off"
            )
        self._detect_user_changes()
        while True:
            is_done, did_step = self._try_action(lambda: self._step_and_commit(optimizer, make_step()))
            if is_done:
                return bool(did_step)
            self._replay_batch()

    def _step_and_commit(self, optimizer: torch.optim.Optimizer, step: Callable[[], bool]) -> bool:
        """Commit the batch, if it is open, and step the optimizer before or after that.

        Args:
            optimizer: torch's own optimizer.
            step: Function that steps the optimizer, and returns whether it updated the parameters.

        Returns:
            Whether the parameters were updated.
        """
        record = self._get_optimizer_record(optimizer)
        if not self.is_open:
            did_step = step()
        else:
            self._reserve_other_steps(optimizer)
            if record.is_complete:
                record.reserve_memory()
                self._vote_success(Phase.STEP)
                self._commit_batch()
                did_step = step()
            else:
                # The step creates optimizer state of unknown size. So it is made before the vote, and can be undone.
                self._step_undo = StepUndo(optimizer)
                did_step = record.measure_step(step)
                self._vote_success(Phase.STEP)
                self._commit_batch()
        if did_step:
            record.confirm_step()
        return did_step

    def _reserve_other_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Reserve memory for the steps of all other optimizers, because the batch cannot be replayed when they step.

        Args:
            optimizer: Optimizer that steps now.
        """
        for prepared in self._prepared.optimizers:
            if prepared.optimizer is not optimizer:
                self._reserve_later_step(prepared.optimizer)

    def _reserve_later_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reserve memory for an optimizer's step. If it has no state yet, make a step on trial and undo it."""
        record = self._get_optimizer_record(optimizer)
        if record.is_complete:
            record.reserve_memory()
            return

        def step() -> bool:
            optimizer.step()
            return True

        self._step_undo = StepUndo(optimizer)  # `rollback` uses it if memory runs out
        record.measure_step(step)
        self._step_undo.restore()
        self._step_undo = None

    def _get_optimizer_record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        return self._optimizer_records.setdefault(id(optimizer), OptimizerRecord(optimizer))

    def release(self) -> None:
        """End an uncommitted batch without restoring its state, and drop all records about optimizers."""
        self.abandon_batch(is_window_dropped=True)
        self._optimizer_records.clear()
        self._piece = None

    # ---------------------------------------------------------------- schedulers and padding

    def tick_scheduler(self, call: Callable[[], None], is_last: bool) -> None:
        """Postpone a learning-rate scheduler's step until the batch is committed.

        A call in any micro-batch other than the last one is ignored, and so is a call while a replay is pending.
        Outside of a batch, the scheduler steps at once.

        Args:
            call: Function that steps the scheduler.
            is_last: Whether the current micro-batch is the last one of the batch.
        """
        if not self.is_open:
            call()
        elif is_last and not self.must_replay:
            self._deferred_ticks.append(call)

    def check_padding(self) -> None:
        """Warn once if the labels of the current micro-batch contain padding (-100).

        Called if its loss is weighted by the number of rows. On an accelerator, the warning appears with a later
        micro-batch, because the host does not wait for the device.
        """
        self._padding_check.check(self._piece)
