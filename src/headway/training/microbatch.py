"""Automatic micro-batching: a batch is cut into pieces that fit into memory, and run again where they did not."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch

from headway.errors import LossError, StateError
from headway.ops.tree import Tree, find_batch_size, tensors
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.training.accumulation import Accumulation, MicroBatch, Piece
from headway.training.clock import Clock
from headway.training.headroom import Headroom
from headway.training.prepare import Preparation
from headway.training.snapshot import Snapshot
from headway.training.transaction import Replay, Transaction

Weigher = Callable[[Tree], float | torch.Tensor]
"""Over how many items the loss of a piece was taken."""


class Microbatching:
    """Both forms of running a batch in pieces.

    Args:
        accumulation: windows and their weights; its `transaction` is what runs a batch again. None: batches stay whole.
        preparation: the prepared models.
        strategy: among whom losses are reduced.
    """

    def __init__(self, accumulation: Accumulation, preparation: Preparation, strategy: Strategy) -> None:
        self._accumulation = accumulation
        self._preparation = preparation
        self._strategy = strategy
        self._num_batches = 0

    def microbatches(self, batch: Tree) -> Iterator[Tree]:
        """The batch's pieces; all of them again, and smaller, where memory ran out."""
        transaction = self._accumulation.transaction
        if transaction is None:
            yield batch
            return
        self._check_not_inside("microbatches")
        transaction.begin()
        self._num_batches += 1
        try:
            while True:
                yield from self._attempt(transaction, batch)
                if self._stands(transaction):
                    return
                transaction.rollback()
        finally:
            self._leave(transaction)

    def _check_not_inside(self, name: str) -> None:
        """Refuse to begin a batch while a piece of another one is in hand."""
        if self._accumulation.piece is not None:
            raise StateError(
                f"{name} inside a piece of accelerator.microbatches (or of forward_backward): pieces are not cut again by hand, "
                "smaller ones come by themselves where memory runs out. Call accelerator.backward on the piece"
            )

    @staticmethod
    def _stands(transaction: Transaction) -> bool:
        if not transaction.must_replay:
            try:
                transaction.finish()
            except Replay:
                return False
        return not transaction.must_replay

    def _leave(self, transaction: Transaction) -> None:
        self._accumulation.piece = transaction.tree = None
        window = self._accumulation.current
        transaction.abandon(is_window_dropped=window.is_closed and window.is_empty)

    def _attempt(self, transaction: Transaction, batch: Tree) -> Iterator[Tree]:
        num_rows = self._num_rows(batch)
        cuts = [(0, 1)] if num_rows is None else transaction.size.cuts(num_rows)
        for index, (start, stop) in enumerate(cuts):
            is_last = index == len(cuts) - 1
            self._accumulation.piece = Piece(self._num_batches, stop - start, num_rows or 1, is_last)
            transaction.num_rows = max(transaction.num_rows, stop - start)
            whole = num_rows is None or len(cuts) == 1
            transaction.tree = batch if whole else cut_rows(batch, start, stop, num_rows or 1)
            yield transaction.tree
            if transaction.must_replay:
                return

    def _num_rows(self, batch: Tree) -> int | None:
        """The loader's count where it is that of the batch's tensors, else their first dimension."""
        found = find_batch_size(batch)
        active = self._accumulation.active
        known = active[-1].num_rows if active else None
        if known and any(t.ndim > 0 and t.shape[0] == known for t in tensors(batch)):
            return known
        return found or None

    # ---------------------------------------------------------------- as a function

    def forward_backward(
        self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str
    ) -> torch.Tensor:
        """Run `fn` and backward on the batch, in pieces where it must be; returns the loss over all ranks."""
        if weight is not None and not callable(weight):
            raise LossError(
                f"forward_backward got weight={weight!r}; give a function from a piece to the number of items that its loss was "
                "taken over, weight=lambda piece: ... (a number is for accelerator.backward)"
            )
        self._check_not_inside("forward_backward")
        transaction = self._accumulation.transaction
        task = _Task(batch, fn, weight, reduction)
        if transaction is None:
            self._run_piece(task, batch)
        else:
            self._num_batches += 1
            run = partial(self._run, transaction, task, self._num_batches)
            transaction.begin(again=run)
            try:
                run()
            except BaseException:
                self._leave(transaction)
                raise
        return self._reduced(task)

    def _run(self, transaction: Transaction, task: "_Task", number: int) -> None:
        """Until an attempt stands, or, at the end of a window, until gradients are final."""
        accumulation = self._accumulation
        self._num_batches = number
        while True:
            task.start_over()
            for piece in self._attempt(transaction, task.batch):
                self._run_piece(task, piece)
            if not transaction.must_replay and accumulation.is_final:
                transaction.mark()
                break
            if self._stands_without_step(transaction):
                break
            transaction.rollback()
        accumulation.piece = transaction.tree = None

    @staticmethod
    def _stands_without_step(transaction: Transaction) -> bool:
        """A batch that does not end its window is committed at once; this loop runs it again, not the transaction."""
        again, transaction.again = transaction.again, None
        try:
            return Microbatching._stands(transaction)
        finally:
            transaction.again = again if transaction.is_open else None

    def _run_piece(self, task: "_Task", piece: Tree) -> None:
        with MicroBatch(self._accumulation, tuple(self._preparation.models)):
            loss = task.fn(piece)
            weight = None if task.weight is None else float(task.weight(piece))
            self._accumulation.backward(loss, weight, task.reduction)
            weighed = self._accumulation.current.micro_weight
            task.add(loss.detach(), 1.0 if weighed is None else weighed[0])

    def _reduced(self, task: "_Task") -> torch.Tensor:
        group = self._strategy.data_group
        if group.world_size == 1:
            return task.total / task.total_weight if task.total_weight else task.total * float("nan")
        pair = torch.stack([task.total, task.total.new_tensor(task.total_weight)])
        group.sum_in_place([pair])
        return pair[0] / pair[1]


def build_microbatching(accumulation: Accumulation, preparation: Preparation, clock: Clock, runtime: ProcessRuntime,
                        cuts_batches: bool) -> Microbatching:  # fmt: skip
    """Both forms, with transactions where batches may be cut.

    Raises:
        UnsupportedError: the strategy cannot take a step back.
    """
    strategy = accumulation.strategy
    if cuts_batches:
        strategy.capabilities.require("rollback", strategy.name, "leave microbatching off")
        snapshot = Snapshot(accumulation, preparation, accumulation.precision, clock, runtime.hardware)
        accumulation.transaction = Transaction(
            strategy, snapshot, Headroom(runtime.hardware, runtime.device),
            lambda: [prepared.optimizer for prepared in preparation.optimizers],
        )  # fmt: skip
    return Microbatching(accumulation, preparation, strategy)


class _Task:
    """One batch as a function, and the loss of the attempt in progress."""

    def __init__(self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str) -> None:
        self.batch = batch
        self.fn = fn
        self.weight = weight
        self.reduction = reduction
        self.start_over()

    def start_over(self) -> None:
        """Nothing has been computed yet."""
        self.total = torch.zeros(())
        self.total_weight = 0.0

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """A piece went through; what weighs nothing may be NaN."""
        if weight:
            share = loss.reshape(()).float() * (1.0 if self.reduction == "sum" else weight)
            self.total = share if self.total_weight == 0 else self.total + share
        elif self.total_weight == 0:
            self.total = torch.zeros((), device=loss.device)
        self.total_weight += weight


def cut_rows(tree: Tree, start: int, stop: int, num_rows: int) -> Tree:
    """Rows `start` to `stop` of everything in the batch that has one entry a row; the rest passes through whole.

    Tensors and arrays of `num_rows` rows are cut, and lists and tuples of `num_rows` items that are no such tensors
    themselves; other containers keep their type.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        return tree[start:stop] if tree.ndim > 0 and tree.shape[0] == num_rows else tree
    cut = partial(cut_rows, start=start, stop=stop, num_rows=num_rows)
    if isinstance(tree, Mapping):
        return _map_values(cut, tree)
    if isinstance(tree, list | tuple):
        if len(tree) == num_rows and not any(_has_rows(item, num_rows) for item in tree):
            return tree[start:stop]
        items = [cut(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: cut(getattr(tree, field.name)) for field in fields(tree) if field.init})
    return tree


def _map_values(fn: Callable[[Any], Any], tree: Mapping[Any, Any]) -> Any:
    values = {key: fn(value) for key, value in tree.items()}
    if type(tree) is dict:
        return values
    if not isinstance(tree, MutableMapping):
        return type(tree)(values)  # type: ignore[call-arg]
    twin = copy(tree)
    for key, value in values.items():
        twin[key] = value
    return twin


def _has_rows(item: Any, num_rows: int) -> bool:
    return isinstance(item, torch.Tensor | numpy.ndarray) and item.ndim > 0 and item.shape[0] == num_rows
