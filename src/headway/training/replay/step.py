"""Automatic micro-batching: a batch is cut into pieces that fit into memory, and run again where they did not."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from headway.errors import StateError
from headway.runtime.collectives.tree import Tree, cut_rows, find_batch_size, tensors
from headway.strategies.base import Strategy
from headway.training.hooks import RunParts
from headway.training.replay.piece_size import AllocatorPressure, PieceSize
from headway.training.replay.rounds import Rounds
from headway.training.replay.snapshot import BatchSnapshot
from headway.training.replay.transaction import BatchTransaction
from headway.training.step import StepGuard, TrainingStep
from headway.training.task import BatchTask, Weigher
from headway.training.windows import WHOLE, AccumulationWindow, BatchPiece, LossPolicy

_NO_PIECE = (
    "under microbatching='auto' every accumulate and backward belongs to a batch that can be cut: loop with `for piece in "
    "accelerator.microbatches(batch): with accelerator.accumulate(model): ...`, or use accelerator.forward_backward(batch, fn)"
)

_IN_TURN = (
    "two accumulate() blocks with different models are in one loop over accelerator.microbatches(batch): in pieces, the second model "
    "would learn from weights that the first one has not updated yet. Loop over microbatches(batch) once for each "
    "(docs/several_models.md)"
)


class PieceStep(TrainingStep):
    """Each batch in pieces, as a transaction: nothing travels before all ranks have said that their pieces went through.

    Args:
        parts, policy, guard: as for every step.

    Attributes:
        transaction: the batch in hand.

    Raises:
        UnsupportedError: the strategy cannot take a step back.
    """

    def __init__(self, parts: RunParts, policy: LossPolicy, guard: StepGuard) -> None:
        super().__init__(parts, policy, guard)
        strategy, runtime = parts.strategy, parts.runtime
        strategy.capabilities.require("rollback", strategy.name, "leave microbatching off")
        rewound = parts.windows, parts.clock, parts.precision, strategy
        snapshot = BatchSnapshot(parts.prepared, rewound, runtime.hardware)
        # Where each piece is an exchange, its gradients travel at once, and all ranks run as many pieces.
        self._is_joint = not strategy.capabilities.lone_pieces
        rounds = Rounds(strategy, runtime) if self._is_joint else None
        allocator = AllocatorPressure(runtime.hardware, runtime.device)
        self.transaction = BatchTransaction(strategy, snapshot, allocator, parts.prepared, rounds)
        self._num_batches = 0
        self._all_rows: list[int] = []

    # ---------------------------------------------------------------- micro-batches

    def begin(self, models: Any) -> bool:
        """A piece begins.

        Raises:
            StateError: outside a batch that is cut, or other models than before learn in the same batch.
        """
        if not self.windows.is_cut:
            raise StateError(_NO_PIECE)
        window = self.windows.current
        if window.batch == self.windows.piece.batch and window.models != tuple(models):
            raise StateError(_IN_TURN)
        return super().begin(models) or self._is_joint

    def end(self, error: BaseException | None) -> bool:
        """The piece's block is left; memory that ran out is dealt with."""
        if error is not None and self.transaction.takes(error):
            self.windows.withdraw()
            return True
        return super().end(error)

    def weigh(self, weight: float | None) -> tuple[float, float | None]:
        """As for whole batches, with a look at labels that rows do not count."""
        if weight is None:
            self.transaction.look_for_padding()
        local, total = super().weigh(weight)
        # A filling piece, with the weight of one that is there.
        return (local, total) if self.windows.piece.num_rows else (0.0, total)

    def _backward_inside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        window, transaction = self.windows.current, self.transaction
        local = self.weigh_micro_batch(window, weight)
        if window.nominal is None:
            window.nominal = self._estimate_nominal(window)
        parameters = [p for p in self.prepared.parameters_of(window) if p.requires_grad]
        # A further loss of the last piece: what has travelled already must not travel again.
        travelled = transaction.put_aside(parameters) if window.is_closed else []
        if window.is_closed:
            self.strategy.expect_backward(window.models)
        self.run(loss, local, window.nominal or 1.0, reduction, **kwargs)
        if window.is_last:
            total, has_gaps = transaction.agree_gradients(window.local_weight, parameters)
            if window.is_closed:
                self.strategy.reduce_gradients(parameters, has_gaps)
            else:
                self.close(window, total, parameters, has_gaps)
            for parameter, grad in travelled:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def _estimate_nominal(self, window: AccumulationWindow) -> float | None:
        """Nothing may travel now. A rank's own estimate does: gradients are corrected before they are summed.

        Where they are summed in backward all ranks must agree on it, and each piece is an exchange anyway.
        """
        assert window.micro_weight is not None
        local, total = window.micro_weight
        if self._is_joint:
            loader = self.windows.loader
            counts = None if total is None or loader is None else loader.valid_counts
            if total is None:
                weight = self.strategy.data_group.reduce_numbers([local / self.windows.piece.share])[0]
            else:
                weight = float(self.strategy.data_shard.count if counts is None else sum(counts))
            return weight * self.windows.num_steps if weight > 0 else None
        total = (local * self.strategy.data_shard.count if total is None else total) / self.windows.piece.share
        return total * self.windows.num_steps if total > 0 else None

    def _backward_outside(self, loss: torch.Tensor, weight: float | None, reduction: str, **kwargs: Any) -> None:
        raise StateError(_NO_PIECE)

    # ---------------------------------------------------------------- final gradients

    def act(self, action: Callable[[], Any]) -> Any:
        """Do something to final gradients, so that it can be repeated where the batch is run again."""
        return self.transaction.act(action)

    def update(self, optimizer: torch.optim.Optimizer, strategy: Strategy, closure: Callable[[], Any] | None) -> bool:
        """Make the update, or the batch again; what is not permitted is voted on all the same: the batch is over.

        A batch that is run again asks again: other ranks, which failed before they came here, ask for the first time then.
        """

        def attempt() -> Callable[[], bool]:
            is_permitted = self.guard.permits()
            return lambda: is_permitted and strategy.step(optimizer, self.precision, None)

        for check in self.moments.before_update:
            check()
        return self.transaction.step(optimizer, attempt, closure)

    def drop(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Those that were put aside too."""
        self.transaction.forget_gradients(optimizer)
        super().drop(optimizer, set_to_none)

    def tick(self, call: Callable[[], None]) -> None:
        """Once a batch, when it is committed."""
        self.transaction.tick(call, self.windows.piece.is_last)

    @property
    def pieces(self) -> PieceSize:
        """The size that decides what each forward draws."""
        return self.transaction.size

    def release(self) -> None:
        """Forget the batch in hand and all windows."""
        self.transaction.release()
        super().release()

    # ---------------------------------------------------------------- batches

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch's pieces; all of them again, and smaller, where memory ran out."""
        self._check_not_inside("microbatches")
        self.transaction.begin()
        self._tell_rows(batch)
        self._num_batches += 1
        try:
            while True:
                yield from self._attempt(batch)
                if self.transaction.stands():
                    return
                self.transaction.rollback()
        finally:
            self._leave()

    def _check_not_inside(self, name: str) -> None:
        """Refuse to begin a batch while a piece of another one is in hand."""
        if self.windows.is_cut:
            raise StateError(
                f"{name} inside a piece of accelerator.microbatches (or of forward_backward): pieces are not cut again by hand, "
                "smaller ones come by themselves where memory runs out. Call accelerator.backward on the piece"
            )

    def _leave(self) -> None:
        self._take_back()
        window = self.windows.current
        self.transaction.abandon(is_window_dropped=window.is_closed and window.is_empty)

    def _take_back(self) -> None:
        """No piece is in hand any more."""
        self.windows.hand_out(WHOLE)
        self.transaction.hand_out(None, 0)

    def _attempt(self, batch: Tree) -> Iterator[Tree]:
        num_rows, size = self._num_rows(batch), self.transaction.size
        least = max((size.count(rows) for rows in self._all_rows), default=1)
        cuts = [(0, 1)] if num_rows is None else size.cuts(num_rows, least)
        num_pieces = max(least, len(cuts))
        for index in range(num_pieces):
            # A rank whose batch has fewer rows than another's has pieces goes through its first piece again, which weighs nothing.
            start, stop = cuts[index] if index < len(cuts) else cuts[0]
            weighed = stop - start if index < len(cuts) else 0
            self.windows.hand_out(BatchPiece(self._num_batches, weighed, num_rows or 1, index == num_pieces - 1))
            is_whole = num_rows is None or len(cuts) == 1
            tree = batch if is_whole else cut_rows(batch, start, stop, num_rows or 1)
            self.transaction.hand_out(tree, stop - start)
            yield tree
            if self.transaction.must_replay:
                return

    def _tell_rows(self, batch: Tree) -> None:
        """Where pieces are exchanges, all ranks run as many: each says how many rows it has."""
        if self._is_joint:
            rows = self.strategy.everyone.gather_numbers([float(self._num_rows(batch) or 0)])
            self._all_rows = [int(row[0]) for row in rows]

    def _num_rows(self, batch: Tree) -> int | None:
        """The loader's count where it is that of the batch's tensors, else their first dimension."""
        found = find_batch_size(batch)
        active = self.windows.active
        known = active[-1].num_rows if active else None
        if known and any(t.ndim > 0 and t.shape[0] == known for t in tensors(batch)):
            return known
        return found or None

    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """In pieces where it must be."""
        task = BatchTask(batch, fn, weight, reduction)
        self._check_not_inside("forward_backward")
        self._num_batches += 1
        run = partial(self._run, task, self._num_batches)
        self.transaction.begin(again=run)
        try:
            self._tell_rows(batch)
            run()
        except BaseException:
            self._leave()
            raise
        return task.loss(self.strategy.data_group)

    def _run(self, task: BatchTask, number: int) -> None:
        """Until an attempt stands, or, at the end of a window, until gradients are final."""
        transaction = self.transaction
        self._num_batches = number
        while True:
            task.start_over()
            for piece in self._attempt(task.batch):
                self.run_task(task, piece)
            if not transaction.must_replay and self.windows.is_final:
                transaction.mark()
                break
            # A batch that does not end its window is committed at once.
            if transaction.stands():
                break
            transaction.rollback()
        self._take_back()
