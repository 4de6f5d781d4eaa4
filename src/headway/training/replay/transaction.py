"""A batch as a transaction: memory that runs out is caught, nothing travels before a vote, and until the second all can go back.

::

    begin -> pieces, each computed alone -> vote 1 -> gradients and buffers travel -> clip, reads
          -> optimizer state is there, temporaries are reserved -> vote 2 -> commit -> the update
    memory runs out on any rank before vote 2: all ranks learn it at their next vote, go back to `begin`,
    and run the batch again in smaller pieces; after vote 2 it ends the run.

A vote is the collectives' handshake of numbers: legal, because nothing else is in flight, and a rank that calls something else
meanwhile is told so instead of waiting.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.errors import CollectiveError, MemoryExhausted, StateError, UnsupportedError
from headway.log import get_logger
from headway.memory.oom import free_after, is_out_of_memory
from headway.runtime.collective_log import VOTE
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, tensors
from headway.runtime.events import notify
from headway.runtime.transfers import Readback
from headway.strategies.base import Strategy
from headway.training.prepared.objects import PreparedObjects
from headway.training.replay.piece_size import AllocatorPressure, PieceSize
from headway.training.replay.rounds import Rounds
from headway.training.replay.snapshot import BatchSnapshot, Materialised, StepUndo

log = get_logger(__name__)

_PHASES = ("gradients", "step", "end", "no vote yet")
_GRADIENTS, _STEP, _END, _FAILED = range(4)
_IGNORED = -100
_NUM_PADDING_CHECKS = 4


class TransactionReplay(BaseException):
    """Memory ran out on some rank, and the batch is run again. It never leaves Headway.

    No Exception, so that an `except Exception` in the loop's body does not take it for an error.
    """


@dataclass(eq=False)
class BatchTransaction:
    """The batch in hand.

    Args:
        strategy: reduces gradients.
        snapshot: the way back.
        allocator: watches the device's memory.
        prepared: whose optimizers step.
        rounds: where forwards are exchanges, brings a rank whose memory ran out to the others' vote.

    Attributes:
        size: how large pieces may be.
        is_open: a batch has begun and is not committed.
        must_replay: a vote has told that it must be run again.
        again: runs the batch's pieces again where the batch is held as a function; None: the caller's loop does that.
        tree: the piece in hand.
        num_rows: rows of the largest piece so far.
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
        self._group: Collectives = self.strategy.everyone
        self._materialised: dict[int, Materialised] = {}
        self._undo: StepUndo | None = None
        self._actions: list[Callable[[], Any]] = []
        self._waiting: list[Callable[[], None]] = []
        self._marks: list[tuple[torch.Tensor, int]] = []
        self._is_changed_by_hand = False
        self._spare = 1.0
        self._is_thrashing = False
        self._longest = 1
        self._num_padding_checks = 0
        self._padding: Readback | None = None

    # ---------------------------------------------------------------- begin and end

    def begin(self, again: Callable[[], None] | None = None) -> None:
        """A batch begins; one before it whose update was never made is committed as it is."""
        if self.is_open:
            self.finish()
        self.snapshot.take()
        self.is_open, self.must_replay, self.again = True, False, again
        self.num_rows = 1
        self._actions.clear()
        if self.rounds is not None:
            self.rounds.open()

    def hand_out(self, tree: Tree, num_rows: int) -> None:
        """This piece is run next."""
        self.tree = tree
        self.num_rows = max(self.num_rows, num_rows)

    def stands(self) -> bool:
        """All pieces have run: is the batch committed? If not, the caller runs it again, after `rollback`."""
        again, self.again = self.again, None
        try:
            if not self.must_replay:
                self.finish()
        except TransactionReplay:
            return False
        finally:
            self.again = again if self.is_open else None
        return not self.must_replay

    def finish(self) -> None:
        """The batch is over, and no step has committed it: the last vote.

        Raises:
            Replay: the caller's loop has to run it again.
        """
        while self.is_open and self._attempt(self._end) is None:
            self._replay()

    def _end(self) -> None:
        self.snapshot.merge()
        self._agree(_END)
        self._commit()

    def rollback(self) -> None:
        """Go back to the batch's begin."""
        if self._undo is not None:
            self._undo.restore()
            self._undo = None
        self.snapshot.restore()
        self._waiting.clear()
        self.must_replay = False
        self.num_rows = 1

    def abandon(self, is_window_dropped: bool) -> None:
        """The caller left the batch before its end, by `break` or an error: it never happened."""
        if self.is_open:
            if is_window_dropped:
                self.snapshot.drop()
            else:
                self.rollback()
                self.snapshot.give_back()
        self.is_open, self.must_replay, self.again = False, False, None
        self._waiting.clear()
        self._undo = None
        self._close_rounds()

    def _close_rounds(self) -> None:
        if self.rounds is not None:
            self.rounds.close()

    def _commit(self) -> None:
        self._tell_padding()
        self._close_rounds()
        self.snapshot.drop()
        self._undo, self.is_open, self.again = None, False, None
        self._actions.clear()
        self._marks.clear()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        is_thrashing, self._is_thrashing = self._is_thrashing, False
        smaller = self.size.below(self._longest)
        if is_thrashing and smaller:
            log.warning_once("the device's allocator keeps emptying its cache to find memory: pieces become smaller")
            self.allocator.start_over()
            self.size.shrink(smaller, self._longest)
            return
        before, num_clean = self.size.limit, self.size.num_clean
        self.size.succeeded(self._longest, self._spare > 0)
        if self.size.num_clean < num_clean:
            self.allocator.forget_peak()
        if self.size.limit != before:
            log.info("pieces of up to %s rows are tried", self.size.limit)

    # ---------------------------------------------------------------- votes

    def _agree(self, phase: int, *numbers: float) -> list[list[float]]:
        """Vote that all is well here; returns every rank's `numbers`.

        Raises:
            Replay: it is not everywhere.
        """
        rows = self._vote(phase, *numbers)
        if self.must_replay:
            raise TransactionReplay
        return rows

    def _vote(self, phase: int, *numbers: float) -> list[list[float]]:
        factor = self.size.next_limit() / self.num_rows
        is_waiting = self.size.limit is not None and self.size.num_clean + 1 >= self.size.patience
        spare = float(not is_waiting or self.allocator.has_room(factor))
        below = float(self.size.below(self.num_rows)) if phase == _FAILED else -1.0
        filled = [*numbers, 0.0, 0.0, 0.0][:3]
        thrashing = float(phase != _FAILED and self.allocator.is_thrashing())
        rows = self._group.gather_numbers([float(phase), below, float(self.num_rows), spare, thrashing, *filled], VOTE)
        if self.rounds is not None:
            self.rounds.voted()
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        if failed:
            self._shrink(rows, failed)
        elif any(row[0] != phase for row in rows):
            told = ", ".join(f"rank {rank}: {_PHASES[int(row[0])]}" for rank, row in enumerate(rows))
            raise CollectiveError(
                f"ranks are at different votes of one batch ({told}). Every rank must run the same loop: the same accumulate, "
                "backward, step, in the same order"
            )
        self._longest = int(max(row[2] for row in rows))
        self._spare = min(row[3] for row in rows)
        # Until the batch is committed, as either of its votes may tell; or run again, in smaller pieces, of which it says nothing.
        self._is_thrashing = not failed and (self._is_thrashing or any(row[4] for row in rows))
        return [row[5:] for row in rows]

    def _shrink(self, rows: list[list[float]], failed: list[int]) -> None:
        limit = int(min(rows[rank][1] for rank in failed))
        num_rows = int(min(rows[rank][2] for rank in failed))
        self.must_replay = True
        self.allocator.start_over()
        if limit < 1:
            raise MemoryExhausted(
                f"memory ran out on rank {', '.join(map(str, failed))} with pieces of one row: there is nothing smaller to try. "
                "Checkpoint activations, use a lower precision, shard the model or shorten the rows"
            )
        self.size.shrink(limit, num_rows)
        log.warning(
            "memory ran out on rank %s with pieces of %d rows: the batch is run again in pieces of at most %d",
            ", ".join(map(str, failed)),
            num_rows,
            limit,
        )
        notify("out_of_memory", ranks=failed, rows=num_rows, pieces=limit)

    def takes(self, error: BaseException) -> bool:
        """Is the block that raised this to be run again? Then what the error held is free."""
        if isinstance(error, TransactionReplay):
            traceback.clear_frames(error.__traceback__)
            return True
        self._check_rounds(error)
        if not self.is_open or self.must_replay or not is_out_of_memory(error):
            return False
        self._fail(error)
        return True

    def _check_rounds(self, error: BaseException) -> None:
        """Did an exchange end because a rank cannot go on? Then that is said instead.

        Raises:
            MemoryExhausted: it did.
        """
        if self.rounds is not None and self.is_open:
            self.rounds.check(error)

    def _fail(self, error: BaseException) -> None:
        """Memory ran out here: free what the attempt holds, and tell the others at their next vote.

        Raises:
            MemoryExhausted: smaller pieces cannot be had.
        """
        log.info("out of memory: %s", error, main_process_only=False)
        free_after(error)
        if self.rounds is not None:
            self.rounds.catch_up()
        try:
            self._vote(_FAILED)
        except MemoryExhausted as exhausted:
            raise exhausted from error

    # ---------------------------------------------------------------- gradients

    def agree_gradients(self, weight: float, parameters: Sequence[torch.nn.Parameter]) -> tuple[float, bool]:
        """Vote 1, all pieces having run: (all ranks' weights, whether gradients are missing anywhere).

        Raises:
            Replay: memory ran out somewhere.
        """
        self.snapshot.merge()
        num_gaps = self.strategy.ready(parameters)
        rows = self._agree(_GRADIENTS, weight, float(num_gaps), float(self.strategy.data_shard.index))
        weights = {row[2]: row[0] for row in rows}  # several ranks may read one part of the data
        return sum(weights.values()), any(row[1] for row in rows)

    def put_aside(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Take out gradients that have travelled, before another loss of the same piece."""
        travelled = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in travelled:
            parameter.grad = None
        return travelled

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """zero_grad was called before the window's first backward."""
        self.snapshot.forget_gradients(optimizer)

    def act(self, action: Callable[[], Any]) -> Any:
        """Do something to final gradients; after a replay of a batch held as a function it is done again."""
        if not self.is_open or self.again is None:
            return action()
        self._look_for_hands()
        while True:
            done = self._attempt(action)
            if done is not None:
                self._actions.append(action)
                was_changed = self._is_changed_by_hand
                self.mark()
                self._is_changed_by_hand = was_changed
                return done[0]
            self._run_again()

    def _attempt(self, action: Callable[[], Any]) -> tuple[Any] | None:
        """What `action` returned; None where memory ran out and the batch is to be run again."""
        try:
            return (action(),)
        except (TransactionReplay, Exception) as error:
            if not self.takes(error):
                raise
            return None

    def mark(self) -> None:
        """Note what gradients look like, to notice if they are changed by hand."""
        self._marks = [(p.grad, p.grad._version) for p in self.snapshot.parameters() if p.grad is not None]
        self._is_changed_by_hand = False

    def _look_for_hands(self) -> None:
        """Have gradients been changed since the mark? Asked before each of Headway's own changes."""
        if any(grad._version != version for grad, version in self._marks):
            self._is_changed_by_hand = True

    def _replay(self) -> None:
        if self.again is None:
            raise TransactionReplay
        self._run_again()

    def _run_again(self) -> None:
        """Run the batch's pieces and all that was done to its gradients again.

        Raises:
            StateError: gradients were changed by hand since, which cannot be done again.
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
            if all(self._attempt(action) is not None for action in self._actions):
                self.mark()
                return

    # ---------------------------------------------------------------- the step

    def step(
        self, optimizer: torch.optim.Optimizer, attempt: Callable[[], Callable[[], bool]], closure: object = None
    ) -> bool:
        """Make the update, or the batch again.

        Args:
            optimizer: torch's own.
            attempt: what comes before each attempt; it returns the step.
            closure: none is taken.

        Raises:
            Replay: the caller's loop has to run the batch again.
            UnsupportedError: a closure was given.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) computes gradients of its own, which microbatching='auto' cannot take back; leave the "
                "closure out, or microbatching off"
            )
        self._look_for_hands()
        while True:
            done = self._attempt(lambda: self._step(optimizer, attempt()))
            if done is not None:
                return bool(done[0])
            self._replay()

    def _step(self, optimizer: torch.optim.Optimizer, run: Callable[[], bool]) -> bool:
        own = self._materialised_of(optimizer)
        if not self.is_open:
            did_step = run()
        else:
            others = [each.optimizer for each in self.prepared.optimizers if each.optimizer is not optimizer]
            done = self._prepare(own, optimizer, others, run)
            self._agree(_STEP)
            self._commit()
            did_step = run() if done is None else done
        if did_step:
            own.confirm()
        return did_step

    def _prepare(
        self,
        own: Materialised,
        optimizer: torch.optim.Optimizer,
        others: list[torch.optim.Optimizer],
        run: Callable[[], bool],
    ) -> bool | None:
        """Make memory run out now rather than after the vote; whether the step happened, where it was made already."""
        for other in others:
            known = self._materialised_of(other)
            if known.is_complete:
                known.reserve()
            else:
                self._undo = StepUndo(other)
                known.measure(lambda step=other.step: step() is None)  # type: ignore[misc]
                self._undo.restore()
                self._undo = None
        if own.is_complete:
            own.reserve()
            return None
        self._undo = StepUndo(optimizer)
        return own.measure(run)

    def _materialised_of(self, optimizer: torch.optim.Optimizer) -> Materialised:
        return self._materialised.setdefault(id(optimizer), Materialised(optimizer))

    def release(self) -> None:
        """Forget the batch and what is known of optimizers."""
        self.abandon(is_window_dropped=True)
        self._materialised.clear()
        self.tree = None

    # ---------------------------------------------------------------- what else a body calls

    def tick(self, call: Callable[[], None], is_last: bool) -> None:
        """A schedule's own tick: once a batch, and only when the batch stands."""
        if not self.is_open:
            call()
        elif is_last and not self.must_replay:
            self._waiting.append(call)

    def look_for_padding(self) -> None:
        """Warn once where pieces are weighed by rows, but their labels hold padding.

        On an accelerator the warning comes with a later piece or batch, when the device has looked: nobody waits for it.
        """
        if self._padding is None and self._num_padding_checks < _NUM_PADDING_CHECKS:
            self._num_padding_checks += 1
            labels = [t for t in tensors(self.tree) if t.dtype == torch.int64]
            looks = [(t == _IGNORED).any() for t in labels if t.device == labels[0].device]
            self._padding = Readback(torch.stack(looks).any()) if looks else None
        self._tell_padding()

    def _tell_padding(self) -> None:
        asked = self._padding
        if asked is None or not asked.is_there:
            return
        self._padding = None
        if asked.read():
            self._num_padding_checks = _NUM_PADDING_CHECKS
            log.warning_once(
                "labels of this batch contain -100, and its pieces are weighed by their rows: a mean over the other tokens needs "
                "weight=, the number of labels that count (docs/microbatching.md)"
            )
