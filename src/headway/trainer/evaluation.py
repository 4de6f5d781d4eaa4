"""Evaluation and prediction, in a training or by itself: the model in evaluation mode, passes over a loader, and a sanity check.

The check tries the evaluation before the first update: what would fail after an epoch of training fails before it.
A few rows of the evaluation data, spread over all of it, go through the model and `compute_metrics`. Some metrics raise on few
rows (an area under the curve where only one class occurs) or name what they find (a score of each class); so one that raises, or
lacks the name that is sought, is tried on many more rows before that counts.

What is put back: modules' modes and buffers, the global RNG states. What is not touched: loaders, callbacks, the log, files,
the optimizer. A metric that keeps something is copied, and left out where it cannot be. What cannot be undone is what the user's own
code does elsewhere when it is called once more: the dataset, the collator, `compute_loss`, `prediction_step`, a metric that is a
function. `TrainingArguments(eval_sanity_check=False)` skips it.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.accelerator import Accelerator
from headway.data.loader import PreparedLoader
from headway.errors import MetricError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree, to_device
from headway.runtime.seed import read_rng_states, write_rng_states
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events
from headway.trainer.data import IGNORED, Batch, length_of
from headway.trainer.loss import take_count
from headway.trainer.metrics import Accumulated, Measure, StreamingMetric, check_wanted, named_metrics
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
        return None if mean != mean and (self._loss is None or not self._weight) else mean


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


# -------------------------------------------------------------------- the sanity check


log = get_logger(__name__)

MOST_BATCHES = 32
_SPEED = ("runtime", "samples_per_second", "steps_per_second")
_NEVER_OF_THE_DATA = (NameError, ImportError)


def spread_rows(num_rows: int, batch_size: int, num_batches: int) -> list[list[int]]:
    """Numbers of rows for that many batches (fewer where there are not so many rows), each spread over all rows."""
    wanted = min(num_rows, batch_size * num_batches)
    count = max(1, -(-wanted // batch_size))
    rows = [index * num_rows // wanted for index in range(wanted)]
    return [rows[first::count] for first in range(count)]


def read_rows(loader: PreparedLoader, num_batches: int) -> Iterator[tuple[Batch, int]] | None:
    """Batches of the loader's data and their rows, read past it; None where that cannot be done without a trace (a stream)."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    num_rows = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if not num_rows or type(sampler) is not BatchSampler:
        return None
    batches = spread_rows(num_rows, sampler.batch_size, num_batches)
    return ((loader.collate_fn([dataset[index] for index in batch]), len(batch)) for batch in batches)


@dataclass(frozen=True)
class EvaluationSanityCheck:
    """Tries the evaluations that a training will make.

    Attributes:
        args: which metric the training goes by.
        accelerator: whose ranks try together.
        model: prepared.
        evaluator: is told which batch is in hand.
        steps: the Trainer's methods that may be overridden.
        measure: what is made of predictions.
        shared: objects that a metric may hold, and that are not copied with it; nor is the model.
    """

    args: TrainingArguments
    accelerator: Accelerator
    model: torch.nn.Module
    evaluator: Evaluator
    steps: PredictionMethods
    measure: Measure
    shared: Sequence[object]

    def run(self, loaders: dict[str, PreparedLoader]) -> None:
        """Try them; every rank calls it, and all fail if one does.

        Args:
            loaders: of each evaluation, prepared, by what its metrics' names begin with; nothing is taken from them.

        Raises:
            MetricError: `compute_metrics` raises.
            ConfigError: `metric_for_best_model` is not among the metrics.
        """
        hardware = self.accelerator.runtime.hardware
        rng_states, failure, error = read_rng_states(hardware), None, None
        try:
            with preserve_modes_and_buffers(self.model):
                self._check_all(loaders)
        except Exception as raised:
            failure, error = f"{type(raised).__name__}: {raised}", raised
        finally:
            write_rng_states(rng_states, hardware)
        told = [text for text in self.accelerator.collectives.gather_objects(failure) if text is not None]
        if error is not None:
            raise error
        if told:
            raise MetricError(f"the evaluation failed on another rank: {told[0]}")

    def _check_all(self, loaders: dict[str, PreparedLoader]) -> None:
        wanted = self.args.wanted_metric
        found: Metrics = {}
        is_all = True
        for prefix, loader in loaders.items():
            is_here = prefix == "eval" or (wanted or "").startswith(f"{prefix}_")
            metrics = self._check_one(loader, prefix, wanted if is_here else None)
            found |= metrics or {}
            is_all = is_all and metrics is not None
        if wanted is not None and (is_all or wanted in found):
            check_wanted(wanted, self.args.metric_for_best_model or wanted, found)

    def _check_one(self, loader: PreparedLoader, prefix: str, wanted: str | None) -> Metrics | None:
        """The metrics of a few rows; None where they cannot be known."""
        try:
            found = self._run_batches(loader, prefix, 1)
            if found is None or wanted is None or wanted in found or self.measure.is_of_loss:
                return found
        except MetricError as error:
            if isinstance(error.__cause__, _NEVER_OF_THE_DATA):
                raise
        return self._run_batches(loader, prefix, MOST_BATCHES)

    def _run_batches(self, loader: PreparedLoader, prefix: str, num_batches: int) -> Metrics | None:
        batches = read_rows(loader, num_batches)
        if batches is None:
            return None
        measure, is_complete = self._copy_measure()
        metric = measure.metric(None)
        found: Metrics = dict.fromkeys((f"{prefix}_{name}" for name in _SPEED), 0.0)
        num_rows = 0
        for batch, rows in batches:
            num_rows += rows
            inputs, _ = take_count(to_device(batch, self.accelerator.device))
            with self.evaluator.of_rows(self.model, rows):
                loss, predictions, labels = self.steps.prediction_step(self.model, inputs, metric is None)
            predictions = measure.kept(predictions, labels)
            if loss is not None:
                found[f"{prefix}_loss"] = 0.0
            if metric is not None:
                with _explain_failure(num_rows):
                    metric.update(predictions, labels)
        if metric is not None:
            with _explain_failure(num_rows):
                found |= named_metrics(metric.compute(), prefix)
        return found if is_complete else None

    def _copy_measure(self) -> tuple[Measure, bool]:
        """(what is made of predictions, by a copy of a metric that may keep something; is the metric among it?)."""
        measure = self.measure
        try:
            shared = [*self.shared, *self.model.modules(), *self.model.parameters(), *self.model.buffers()]
            return replace(measure, compute=_copy_metric(measure.compute, shared)), True
        except Exception as error:  # whatever the user's object raises
            if callable(getattr(measure.compute, "reset", None)):  # each evaluation resets it first
                return measure, True
            log.info("compute_metrics cannot be copied (%s), so the evaluation is checked without it", error)
            return replace(measure, is_loss_only=True), False


@contextmanager
def _explain_failure(num_rows: int) -> Iterator[None]:
    """An error of the user's metric says when it was tried, and how that is switched off."""
    try:
        yield
    except Exception as error:
        raise MetricError(
            f"compute_metrics raised {type(error).__name__}: {error}. It was tried on {num_rows} rows of the evaluation data "
            "before the training, not after its first epoch. Fix it, or skip this check: eval_sanity_check=False"
        ) from error


def _copy_metric(metric: Any, shared: Sequence[object]) -> Any:
    """A copy of what may keep something from call to call; a function is itself."""
    kept = [*shared, *(metric.parameters() if isinstance(metric, torch.nn.Module) else ())]
    return copy.deepcopy(metric, {id(each): each for each in kept})


@contextmanager
def preserve_modes_and_buffers(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode without gradients; afterwards each module has its own mode, and each buffer its value."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
