"""Transaction of a batch, which can be undone and replayed in smaller pieces if memory runs out on any rank.

A piece is a micro-batch of the batch. In a vote, all ranks gather a few numbers, such as whether each has succeeded.

::

    begin -> pieces, each computed alone -> vote 1 -> gradients and buffers are reduced -> gradients are clipped or read
          -> optimizer state exists, temporaries are reserved -> vote 2 -> commit -> the update

If memory runs out on any rank before vote 2, all ranks learn it at their next vote. They restore the state from
`begin_batch`, and run the batch again in smaller pieces. If memory runs out after vote 2, the run ends.

Gradients are not reduced before vote 1. No other collective runs during a vote, and a rank that calls another one gets
an error instead of waiting.

If an error is not replayed, look for the reason in this order:

- The layout does not support replays. See `_check_replayed` in `headway.core.strategies.build`.
- The error is not recognized as an out-of-memory error. See `headway.core.memory.oom`.
- The batch was no longer open. `BatchTransaction.handles` is false after vote 2.
- This rank could not join the collectives in which the others wait. See `rounds.py`, and `clean_up_failure` and
  `join_collective` of the strategy (`headway.core.strategies.fully_sharded`).
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.memory.oom import free_after, is_out_of_memory
from headway.core.runtime.collective_log import VOTE
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.core.runtime.events import notify_listeners
from headway.core.runtime.readback import Readback
from headway.core.strategies.base import Strategy
from headway.core.training.prepared.objects import PreparedObjects
from headway.errors import CollectiveError, MemoryExhausted, StateError, UnsupportedError
from headway.extras.replay.piece_size import AllocatorPressure, PieceSize
from headway.extras.replay.rounds import Rounds
from headway.extras.replay.snapshot import BatchSnapshot, OptimizerRecord, StepUndo
from headway.log import get_logger

log = get_logger(__name__)

_PHASES = ("gradients", "step", "end", "no vote yet")
_GRADIENTS, _STEP, _END, _FAILED = range(4)
_IGNORED = -100
_NUM_PADDING_CHECKS = 4


class TransactionReplay(BaseException):
    """Raised to return to the start of a batch after memory ran out on some rank. Headway always catches it.

    It is not an `Exception`, so that an `except Exception` in the user's loop does not catch it.
    """


def _read_prediction(rows: list[list[float]]) -> int | None:
    """Return the largest number of rows that is predicted to fit into the memory of every rank.

    Return None if some rank's memory is not measured.

    Args:
        rows: Numbers that each rank has reported in a vote.
    """
    most = int(min(row[3] for row in rows))
    return None if most < 0 else most


@dataclass(eq=False)
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
        size: Limit on the rows per micro-batch.
        is_open: Whether a batch has begun and is not committed.
        must_replay: Whether a vote has decided that the batch must be replayed.
        again: Function that runs the batch's micro-batches again. None if the caller's loop runs them again.
        tree: Current micro-batch.
        num_rows: Rows of the largest micro-batch so far.
        batch_rows: Rows of the whole batch.
    """

    strategy: Strategy
    snapshot: BatchSnapshot
    allocator: AllocatorPressure
    prepared: PreparedObjects
    rounds: Rounds | None

    def __post_init__(self) -> None:
        self.size = PieceSize()
        self.is_open = False
        self.must_replay = False
        self.again: Callable[[], None] | None = None
        self.tree: Tree = None
        self.num_rows = 1
        self.batch_rows = 1
        self._group: Collectives = self.strategy.everyone
        self._optimizer_records: dict[int, OptimizerRecord] = {}
        self._undo: StepUndo | None = None
        self._actions: list[Callable[[], Any]] = []
        self._waiting: list[Callable[[], None]] = []
        self._marks: list[tuple[torch.Tensor, int]] = []
        self._is_changed_by_hand = False
        self._most: int | None = None
        self._longest_batch = 1
        self._has_update = False
        self._num_pieces = 0
        self._last_rows = 0
        self._is_thrashing = False
        self._longest = 1
        self._num_padding_checks = 0
        self._padding: Readback | None = None

    # ---------------------------------------------------------------- begin and end

    def set_batch_rows(self, num_rows: int) -> None:
        """Set the number of rows of the whole batch, from which the next micro-batch size is predicted.

        Args:
            num_rows: Rows of the batch that is about to run.
        """
        self.batch_rows = num_rows

    def begin_batch(self, again: Callable[[], None] | None = None) -> None:
        """Begin a batch.

        If the previous batch is still open, because no optimizer step has committed it, commit it first.

        Args:
            again: Function that runs the batch's micro-batches again, or None if the caller's loop does.
        """
        if self.is_open:
            self.finish_batch()
        self.snapshot.save_state()
        self.is_open, self.must_replay, self.again = True, False, again
        self.num_rows, self._num_pieces = 1, 0
        self._actions.clear()
        if self.rounds is not None:
            self.rounds.open()

    def set_piece(self, tree: Tree, num_rows: int) -> None:
        """Record the micro-batch that runs next.

        Args:
            tree: Tensors of the micro-batch.
            num_rows: Number of rows in the micro-batch.
        """
        if self.size.is_calibrating and self.is_open:
            # The first piece of several does not count, because gradients do not exist yet.
            self.allocator.record_piece(self._last_rows if self._num_pieces > 1 else 0)
        self.tree = tree
        self.num_rows = max(self.num_rows, num_rows)
        self._num_pieces += 1
        self._last_rows = num_rows

    def try_commit(self) -> bool:
        """Commit the batch after all of its micro-batches have run, if they succeeded on all ranks.

        Returns:
            Whether the batch was committed. If not, the caller must call `rollback` and run the micro-batches again.
        """
        again, self.again = self.again, None
        try:
            if not self.must_replay:
                self.finish_batch()
        except TransactionReplay:
            return False
        finally:
            self.again = again if self.is_open else None
        return not self.must_replay

    def finish_batch(self) -> None:
        """Commit the batch if all ranks report success, unless an optimizer step has committed it already.

        Raises:
            TransactionReplay: If the caller's loop must replay the batch.
        """
        while self.is_open and self._try_action(self._vote_and_commit) is None:
            self._replay_batch()

    def _vote_and_commit(self) -> None:
        self.snapshot.merge_gradients()
        self._vote_success(_END)
        self._commit_batch()

    def rollback(self) -> None:
        """Restore the state that the run had at the beginning of the batch."""
        if self._undo is not None:
            self._undo.restore()
            self._undo = None
        self.snapshot.restore()
        self._waiting.clear()
        self.must_replay = False
        self.num_rows, self._num_pieces = 1, 0

    def abandon_batch(self, is_window_dropped: bool) -> None:
        """End the batch. If it is not committed, the caller left it early, with `break` or because of an error.

        Args:
            is_window_dropped: Whether an uncommitted batch is left as it is, and the stored gradients of earlier
                batches in the accumulation window are dropped. If False, the batch is undone, and these gradients are
                restored.
        """
        if self.is_open:
            if is_window_dropped:
                self.snapshot.drop_gradients()
            else:
                self.rollback()
                self.snapshot.restore_gradients()
        self.is_open, self.must_replay, self.again = False, False, None
        self._waiting.clear()
        self._undo = None
        self._close_rounds()

    def _close_rounds(self) -> None:
        if self.rounds is not None:
            self.rounds.close()

    def _commit_batch(self) -> None:
        self._warn_of_padding()
        self._close_rounds()
        self.snapshot.drop_gradients()
        self._undo, self.is_open, self.again = None, False, None
        self._actions.clear()
        self._marks.clear()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        is_thrashing, self._is_thrashing = self._is_thrashing, False
        smaller = self.size.get_smaller_size(self._longest)
        if is_thrashing and smaller:
            log.warning_once(
                "the device's allocator keeps emptying its cache to find memory: the next pieces are smaller"
            )
            self.allocator.reset_statistics()
            self.size.shrink(smaller, self._longest)
            return
        before, is_due = self.size.limit, self.size.is_try_due(self._has_update)
        was_calibrating = self.size.is_calibrating
        self.size.record_success(self._longest, self._most, self._longest_batch, self._has_update)
        if is_due or (was_calibrating and self._has_update):
            self.allocator.reset_peak()
        if self.size.limit != before:
            self.allocator.release_cache()
            self.allocator.reset_peak()
            log.info("pieces of up to %s rows are tried", self.size.limit)

    # ---------------------------------------------------------------- votes

    def _vote_success(self, phase: int, *numbers: float) -> list[list[float]]:
        """Report to all ranks that this rank's batch has succeeded so far, and find out whether theirs have.

        Such an exchange of reports is called a vote.

        Args:
            phase: Number that identifies the vote within the batch, such as `_GRADIENTS`.
            numbers: Numbers of this rank to gather in the vote.

        Returns:
            The numbers of every rank.

        Raises:
            TransactionReplay: If a rank has failed.
        """
        rows = self._vote_on_phase(phase, *numbers)
        if self.must_replay:
            raise TransactionReplay
        return rows

    def _vote_on_phase(self, phase: int, *numbers: float) -> list[list[float]]:
        most = 0 if self.allocator.is_measured else -1
        if phase != _FAILED and self.size.is_calibrating:
            self.allocator.record_piece(self._last_rows)
            self._last_rows = 0  # the optimizer step that follows is not part of a piece
        if phase != _FAILED and self.size.is_try_due(phase == _STEP):
            most = self.allocator.predict_rows(self.num_rows)
        below = -1.0
        if phase == _FAILED:
            below = float(self.size.get_smaller_size(self.num_rows, self.allocator.is_measured))
        filled = [*numbers, 0.0, 0.0, 0.0][:3]
        thrashing = float(phase != _FAILED and self.allocator.is_thrashing())
        own = [float(phase), below, float(self.num_rows), float(most), thrashing, float(self.batch_rows)]
        rows = self._group.gather_numbers([*own, *filled], VOTE)
        if self.rounds is not None:
            self.rounds.end_round()
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        if failed:
            self._shrink_pieces(rows, failed)
        elif any(row[0] != phase for row in rows):
            votes = ", ".join(f"rank {rank}: {_PHASES[int(row[0])]}" for rank, row in enumerate(rows))
            raise CollectiveError(
                f"ranks are at different votes of one batch ({votes}). Every rank must run the same loop: the same accumulate, "
                "backward, step, in the same order"
            )
        self._longest = int(max(row[2] for row in rows))
        self._longest_batch = int(max(row[5] for row in rows))
        self._most = _read_prediction(rows)
        self._has_update = phase == _STEP
        # The statistics count until the batch is committed or replayed; they do not apply to smaller pieces.
        self._is_thrashing = not failed and (self._is_thrashing or any(row[4] for row in rows))
        return [row[6:] for row in rows]

    def _shrink_pieces(self, rows: list[list[float]], failed: list[int]) -> None:
        limit = int(min(rows[rank][1] for rank in failed))
        num_rows = int(min(rows[rank][2] for rank in failed))
        self.must_replay = True
        self.allocator.release_cache()
        self.allocator.reset_statistics()
        if limit < 1:
            raise MemoryExhausted(
                f"memory ran out on rank {', '.join(map(str, failed))} with pieces of one row: there is nothing smaller to try. "
                "Checkpoint activations, use a lower precision, shard the model or shorten the rows"
            )
        self.size.shrink(limit, num_rows, _read_prediction(rows) is not None)
        log.warning(
            "memory ran out on rank %s with pieces of %d rows: the batch is run again in pieces of at most %d",
            ", ".join(map(str, failed)),
            num_rows,
            limit,
        )
        notify_listeners("out_of_memory", ranks=failed, rows=num_rows, pieces=limit)

    def handles(self, error: BaseException) -> bool:
        """Whether `error` makes the ranks replay the batch.

        This holds for an out-of-memory error before the commit, and for `TransactionReplay`. If so, the memory that
        the error keeps alive is freed. After an out-of-memory error, the other ranks are informed in a vote.

        Raises:
            MemoryExhausted: If micro-batches cannot become smaller, or some rank cannot join the remaining collectives
                of the batch.
        """
        if isinstance(error, TransactionReplay):
            traceback.clear_frames(error.__traceback__)
            return True
        self._check_rounds(error)
        if not self.is_open or self.must_replay or not is_out_of_memory(error):
            return False
        self._report_failure(error)
        return True

    def _check_rounds(self, error: BaseException) -> None:
        """Raise an error if some rank cannot join the remaining collectives of the batch.

        In that case the collectives of the other ranks are aborted.

        Args:
            error: Error that was caught on this rank, such as the error of the aborted collective.

        Raises:
            MemoryExhausted: If a rank cannot join. The message contains the reason.
        """
        if self.rounds is not None and self.is_open:
            self.rounds.check(error)

    def _report_failure(self, error: BaseException) -> None:
        """Free the memory of the micro-batch that failed, and report the failure to all ranks.

        Raises:
            MemoryExhausted: If micro-batches cannot become smaller.
        """
        log.info("out of memory: %s", error, main_process_only=False)
        free_after(error)
        if self.rounds is not None:
            self.rounds.join_remaining()
        try:
            self._vote_on_phase(_FAILED)
        except MemoryExhausted as exhausted:
            raise exhausted from error

    # ---------------------------------------------------------------- gradients

    def vote_on_gradients(self, weight: float, parameters: Sequence[torch.nn.Parameter]) -> tuple[float, bool]:
        """Report that this rank has run its micro-batches, and find out whether all ranks have.

        This is the first vote on the batch. It takes place before gradients are reduced.

        Args:
            weight: Sum of the weights of this rank's losses.
            parameters: Parameters whose gradients are checked.

        Returns:
            Sum of all ranks' weights, and whether gradients are missing on any rank.

        Raises:
            TransactionReplay: If memory ran out on some rank.
        """
        self.snapshot.merge_gradients()
        num_gaps = self.strategy.prepare_reduction(parameters)
        rows = self._vote_success(_GRADIENTS, weight, float(num_gaps), float(self.strategy.data_shard.index))
        weights = {row[2]: row[0] for row in rows}  # ranks that read one part of the data count once
        return sum(weights.values()), any(row[1] for row in rows)

    def set_gradients_aside(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Set `grad` of each parameter to None, and return pairs of (parameter, reduced gradient).

        Called before another loss of the current micro-batch runs backward, so that reduced gradients are not
        reduced again.
        """
        reduced = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in reduced:
            parameter.grad = None
        return reduced

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients of earlier batches in the accumulation window.

        Needed if `zero_grad` is called before the first backward of the window.
        """
        self.snapshot.forget_gradients(optimizer)

    def run_action(self, action: Callable[[], Any]) -> Any:
        """Run a function that changes reduced gradients, such as clipping, and return its result.

        If the batch is replayed without returning to the caller's loop, the function is run again.

        Args:
            action: Function to run.
        """
        if not self.is_open or self.again is None:
            return action()
        self._detect_user_changes()
        while True:
            done = self._try_action(action)
            if done is not None:
                self._actions.append(action)
                was_changed = self._is_changed_by_hand
                self.mark_gradients()
                self._is_changed_by_hand = was_changed
                return done[0]
            self._rerun_pieces()

    def _try_action(self, action: Callable[[], Any]) -> tuple[Any] | None:
        """Run `action`, and return its result in a tuple of one item.

        Return None if memory ran out and the batch must be replayed.
        """
        try:
            return (action(),)
        except (TransactionReplay, Exception) as error:
            if not self.handles(error):
                raise
            return None

    def mark_gradients(self) -> None:
        """Record the version counters of all gradients, to detect later changes by the user's code."""
        self._marks = [(p.grad, p.grad._version) for p in self.snapshot.parameters() if p.grad is not None]
        self._is_changed_by_hand = False

    def _detect_user_changes(self) -> None:
        """Record whether the user's code has changed gradients since `mark_gradients` was called.

        This must be called before Headway changes any gradient itself.
        """
        if any(grad._version != version for grad, version in self._marks):
            self._is_changed_by_hand = True

    def _replay_batch(self) -> None:
        if self.again is None:
            raise TransactionReplay
        self._rerun_pieces()

    def _rerun_pieces(self) -> None:
        """Repeat the micro-batches of the batch, and all actions on its gradients, until they succeed.

        The state from the beginning of the batch is restored first.

        Raises:
            StateError: If the user's code has changed gradients, because such a change cannot be repeated.
        """
        assert self.again is not None
        if self._is_changed_by_hand:
            raise StateError(
                "memory ran out after gradients had been changed by hand between forward_backward and step, which cannot be "
                "repeated; use clip_grad_norm_, or the loop form (accelerator.microbatches)"
            )
        while True:
            self._marks.clear()
            self.rollback()
            self.again()
            if all(self._try_action(action) is not None for action in self._actions):
                self.mark_gradients()
                return

    # ---------------------------------------------------------------- the step

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, attempt: Callable[[], Callable[[], bool]], closure: object = None
    ) -> bool:
        """Run the optimizer step, or replay the batch if memory runs out. Return whether the update happened.

        Args:
            optimizer: torch's own optimizer, not the prepared one.
            attempt: Function that is called before each attempt and returns the step function.
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
            done = self._try_action(lambda: self._try_step(optimizer, attempt()))
            if done is not None:
                return bool(done[0])
            self._replay_batch()

    def _try_step(self, optimizer: torch.optim.Optimizer, run: Callable[[], bool]) -> bool:
        own = self._get_optimizer_record(optimizer)
        if not self.is_open:
            did_step = run()
        else:
            others = [each.optimizer for each in self.prepared.optimizers if each.optimizer is not optimizer]
            done = self._prepare_step(own, optimizer, others, run)
            self._vote_success(_STEP)
            self._commit_batch()
            did_step = run() if done is None else done
        if did_step:
            own.confirm_step()
        return did_step

    def _prepare_step(
        self,
        own: OptimizerRecord,
        optimizer: torch.optim.Optimizer,
        others: list[torch.optim.Optimizer],
        run: Callable[[], bool],
    ) -> bool | None:
        """Reserve the memory for an optimizer step, before all ranks report that their batch has succeeded.

        After these reports, the batch can no longer be replayed if memory runs out. If the optimizer has no state
        yet, the step itself is run, so that it can still be undone.

        Args:
            own: Record of the optimizer.
            optimizer: Optimizer that steps now.
            others: Optimizers that step later.
            run: Step function.

        Returns:
            Whether the update happened, or None if the step has not run yet.
        """
        for other in others:
            known = self._get_optimizer_record(other)
            if known.is_complete:
                known.reserve_memory()
            else:
                self._undo = StepUndo(other)
                known.measure_step(lambda step=other.step: step() is None)  # type: ignore[misc]
                self._undo.restore()
                self._undo = None
        if own.is_complete:
            own.reserve_memory()
            return None
        self._undo = StepUndo(optimizer)
        return own.measure_step(run)

    def _get_optimizer_record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        return self._optimizer_records.setdefault(id(optimizer), OptimizerRecord(optimizer))

    def release(self) -> None:
        """End an uncommitted batch without restoring its state, and drop all records about optimizers."""
        self.abandon_batch(is_window_dropped=True)
        self._optimizer_records.clear()
        self.tree = None

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
            self._waiting.append(call)

    def check_padding(self) -> None:
        """Warn once if losses are weighted by the number of rows although the labels contain padding (-100).

        On an accelerator, the warning appears with a later micro-batch, because the host does not wait for the device.
        """
        if self._padding is None and self._num_padding_checks < _NUM_PADDING_CHECKS:
            self._num_padding_checks += 1
            labels = [t for t in list_tensors(self.tree) if t.dtype == torch.int64]
            looks = [(t == _IGNORED).any() for t in labels if t.device == labels[0].device]
            self._padding = Readback(torch.stack(looks).any()) if looks else None
        self._warn_of_padding()

    def _warn_of_padding(self) -> None:
        asked = self._padding
        if asked is None or not asked.is_ready:
            return
        self._padding = None
        if asked.read():
            self._num_padding_checks = _NUM_PADDING_CHECKS
            log.warning_once(
                "labels of this batch contain -100, and its pieces are weighed by their rows: a mean over the other tokens needs "
                "weight=, the number of labels that count (docs/microbatching.md)"
            )
