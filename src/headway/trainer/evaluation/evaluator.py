"""Evaluation and prediction, in a training or by itself: the model in evaluation mode, and passes over a loader."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from headway.accelerator import Accelerator
from headway.data.loader import PreparedLoader
from headway.runtime.collectives.tree import Tree
from headway.trainer.callbacks import Events
from headway.trainer.data import IGNORED, Batch
from headway.trainer.evaluation.metrics import Accumulated, Measure, StreamingMetric, named_metrics
from headway.trainer.loss import take_count
from headway.trainer.results import EvalLoopOutput, Log, Metrics, speed

StepOutput = tuple[torch.Tensor | None, Tree, Tree]
"""(loss, predictions, labels) of a batch; what is not there is None."""

Step = Callable[[Batch], StepOutput]


class PredictionMethods(Protocol):
    """What an evaluation calls of the Trainer, where a subclass may have a method of its own."""

    def prediction_step(
        self, model: torch.nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> StepOutput:
        """What is done with each batch."""


class Evaluation:
    """One pass over a loader.

    Args:
        accelerator: whose ranks share the data.
        loader: the prepared loader.
        step: what is done with each batch.
        measure: what is kept of the predictions.

    Attributes:
        num_samples: rows of all ranks so far.
        num_batches: batches of this rank so far.
    """

    def __init__(self, accelerator: Accelerator, loader: PreparedLoader, step: Step, measure: Measure) -> None:
        self.num_samples = 0
        self.num_batches = 0
        self._accelerator = accelerator
        self._loader = loader
        self._step = step
        self._measure = measure
        self._loss: torch.Tensor | None = None
        self._weight = 0.0

    def batches(self) -> Iterator[tuple[Tree, Tree]]:
        """(predictions, labels) of all ranks, batch by batch; what is not there is None."""
        for batch in self._loader:
            batch, num_items = take_count(batch)
            loss, predictions, labels = self._step(batch)
            self._count(loss, num_items)
            yield self._gather(self._measure.kept(predictions, labels)), self._gather(labels)

    def _count(self, loss: torch.Tensor | None, num_items: int | None) -> None:
        counts = self._loader.valid_counts
        num_valid = 1 if self._loader.num_valid is None else self._loader.num_valid
        self.num_batches += 1
        self.num_samples += sum(counts) if counts is not None else self._accelerator.strategy.data_shard.count
        weight = num_valid if num_items is None or not num_valid else num_items
        if loss is not None and weight:
            share = loss.detach().float().reshape(()) * weight
            self._loss = share if self._loss is None else self._loss + share
            self._weight += weight

    def _gather(self, values: Tree) -> Tree:
        if values is None:
            return None
        if self._accelerator.num_processes > 1:
            values = self._accelerator.pad_across_processes(values, dim=1, pad_index=IGNORED)
        return self._accelerator.gather_for_metrics(values, loader=self._loader)

    def mean_loss(self) -> float | None:
        """Over all items of all ranks; None where no batch had a loss. Every rank calls it."""
        total = 0.0 if self._loss is None else self._loss.item()
        mean = self._accelerator.reduce_mean(total, self._weight).item()
        return None if mean != mean and not self._has_loss() else mean

    def _has_loss(self) -> bool:
        return self._loss is not None and bool(self._weight)


class Session:
    """One evaluation or prediction in progress.

    Attributes:
        model: in evaluation mode.
        num_rows: asks for the rows of the batch in hand; None where they are not known.
    """

    def __init__(self, model: torch.nn.Module, num_rows: Callable[[], int | None] = lambda: None) -> None:
        self.model = model
        self.num_rows = num_rows


class Evaluator:
    """Evaluates and predicts with one Accelerator.

    Args:
        accelerator: whose ranks share the data.
        events: told of each batch.
        log: counts the memory.
        steps: the Trainer's methods that may be overridden.
        is_in_training: the model is prepared already, and the Trainer's own loaders are prepared once and kept.
    """

    def __init__(
        self, accelerator: Accelerator, events: Events, log: Log, steps: PredictionMethods, is_in_training: bool
    ) -> None:
        self._accelerator = accelerator
        self._events = events
        self._log = log
        self._steps = steps
        self._is_in_training = is_in_training
        self._own_loaders: dict[str, PreparedLoader] = {}
        self._sessions: list[Session] = []

    # ---------------------------------------------------------------- the model and its data

    @contextmanager
    def session(self, model: torch.nn.Module, optimizer: object) -> Iterator[Session]:
        """The model in evaluation mode without gradients; afterwards all is as it was. One in another shares its model.

        Args:
            model: the Trainer's.
            optimizer: one that has modes of its own is switched too.
        """
        if self._sessions:
            with self._entered(Session(self._sessions[-1].model)) as session:
                yield session
            return
        was_training = model.training
        switched: list[Any] = [each for each in (optimizer,) if hasattr(each, "eval") and hasattr(each, "train")]
        if not self._is_in_training:
            model = self._accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        for each in switched:
            each.eval()
        try:
            with torch.no_grad(), self._log.phase("evaluation"), self._entered(Session(model)) as session:
                yield session
        finally:
            model.train(was_training)
            for each in switched:
                each.train()
            if not self._is_in_training:
                self._accelerator.free_memory()

    @contextmanager
    def of_rows(self, model: torch.nn.Module, num_rows: int) -> Iterator[None]:
        """A batch of that many rows is in hand, which no loader has given."""
        with self._entered(Session(model, lambda: num_rows)):
            yield

    @contextmanager
    def _entered(self, session: Session) -> Iterator[Session]:
        self._sessions.append(session)
        try:
            yield session
        finally:
            self._sessions.remove(session)  # a generator may be closed after one that began later

    def num_rows(self) -> int | None:
        """The rows of the batch in hand; None where that is not known."""
        return self._sessions[-1].num_rows() if self._sessions else None

    def prepared(self, loader: DataLoader[Any]) -> PreparedLoader:
        """The loader, prepared; the evaluation in progress reads it."""
        made = self._accelerator.prepare_data_loader(loader)
        self._read(made)
        return made

    def own_loader(self, name: str, make: Callable[[], DataLoader[Any]]) -> PreparedLoader:
        """The loader of the Trainer's own data by that name; in a training it is prepared once."""
        if not self._is_in_training:
            return self.prepared(make())
        if name not in self._own_loaders:
            self._own_loaders[name] = self._accelerator.prepare_data_loader(make())
        self._read(self._own_loaders[name])
        return self._own_loaders[name]

    def _read(self, loader: PreparedLoader) -> None:
        if self._sessions:
            self._sessions[-1].num_rows = lambda: loader.num_rows

    # ---------------------------------------------------------------- passes

    def run(
        self,
        session: Session,
        loader: PreparedLoader,
        metric: StreamingMetric | None,
        measure: Measure,
        ignored: list[str] | None,
        prefix: str,
    ) -> tuple[Metrics, int]:
        """Go through the loader once; returns the metrics, and the number of rows.

        Args:
            session: whose model.
            loader: the data.
            metric: takes the predictions; None: only the loss is looked at.
            measure: what is kept of the predictions.
            ignored: outputs of the model that are not predictions.
            prefix: what the metrics' names begin with.
        """
        began = time.monotonic()
        evaluation = Evaluation(self._accelerator, loader, self._step(session, metric is None, ignored), measure)
        for predictions, labels in evaluation.batches():
            if metric is not None:
                metric.update(predictions, labels)
            self._events.tell("on_prediction_step", eval_dataloader=loader)
        found: Metrics = {}
        loss = evaluation.mean_loss()
        if loss is not None:
            found[f"{prefix}_loss"] = loss
        if metric is not None:
            found.update(named_metrics(metric.compute(), prefix))
        found.update(speed(prefix, time.monotonic() - began, evaluation.num_samples, evaluation.num_batches))
        return found, evaluation.num_samples

    def collect(
        self, session: Session, loader: PreparedLoader, measure: Measure, ignored: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """The same with all predictions, in host memory; the metrics are computed of them at the end."""
        everything = None if measure.is_loss_only else Accumulated(None, num_rows_of(loader))
        found, num_samples = self.run(session, loader, everything, measure, ignored, prefix)
        if everything is None:
            return EvalLoopOutput(None, None, found, num_samples)
        predictions, labels = everything.everything()
        metric = measure.metric(None)
        if labels is not None and metric is not None:
            metric.update(_as_tensors(predictions), _as_tensors(labels))
            found.update(named_metrics(metric.compute(), prefix))
        return EvalLoopOutput(predictions, labels, found, num_samples)

    def iterate(
        self, session: Session, loader: PreparedLoader, measure: Measure, ignored: list[str] | None
    ) -> Iterator[tuple[Tree, Tree]]:
        """(predictions, labels) of all ranks batch by batch, on the device."""
        return Evaluation(self._accelerator, loader, self._step(session, False, ignored), measure).batches()

    def _step(self, session: Session, is_loss_only: bool, ignored: list[str] | None) -> Step:
        return lambda batch: self._steps.prediction_step(session.model, batch, is_loss_only, ignored)


def num_rows_of(loader: PreparedLoader) -> int | None:
    """The rows of all ranks in a pass over the loader; None for a stream."""
    try:
        return loader.total_dataset_length
    except TypeError:
        return None


def per_sample(values: Tree, num_rows: int | None) -> Tree:
    """What has one row for each sample: of a tuple, the items that do; None where nothing does."""
    if isinstance(values, torch.Tensor):
        return values.detach() if values.ndim and (num_rows is None or len(values) == num_rows) else None
    if isinstance(values, tuple | list):
        kept = tuple(found for found in (per_sample(value, num_rows) for value in values) if found is not None)
        return None if not kept else kept[0] if len(kept) == 1 else kept
    return None


def _as_tensors(values: Tree) -> Tree:
    if isinstance(values, tuple):
        return tuple(map(_as_tensors, values))
    return None if values is None else torch.as_tensor(values)
