"""Evaluation and prediction, during training or standalone: one pass over a loader, and the sessions around it."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from headway.accelerator import Accelerator
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.extras.moving_average import ExponentialMovingAverage
from headway.trainer.callbacks import CallbackHandler
from headway.trainer.collation import IGNORED
from headway.trainer.data import Batch
from headway.trainer.logs import Log
from headway.trainer.loss import split_label_count, unpack_single
from headway.trainer.metrics import (
    AccumulatedMetric,
    MetricSettings,
    StreamingMetric,
    check_padding,
    make_named_metrics,
    share_metrics,
)
from headway.trainer.results import EvalLoopOutput, Metrics, compute_speed
from headway.trainer.schedule_free import set_optimizer_mode

StepOutput = tuple[torch.Tensor | None, Tree, Tree]
"""Triple of (loss, predictions, labels) of a batch. Missing parts are None."""

Step = Callable[[Batch], StepOutput]
"""Function that processes one batch of an evaluation, such as `Trainer.prediction_step` with its other arguments bound."""

SPEED_NAMES = ("runtime", "samples_per_second", "steps_per_second")
"""Names, without prefix, of the speeds that an evaluation adds to its metrics."""


class PredictionMethods(Protocol):
    """Interface of the Trainer's methods that an evaluation calls and that a subclass may override."""

    def prediction_step(
        self, model: torch.nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> StepOutput:
        """Return the loss, the predictions and the labels of one batch. Missing parts are None.

        Args:
            model: Model in evaluation mode.
            inputs: Batch on the device.
            prediction_loss_only: Whether to omit predictions and labels.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
        """


class Evaluation:
    """One pass over a loader without updates, which computes the mean loss and yields predictions.

    Args:
        accelerator: Accelerator whose ranks process the data together.
        loader: Prepared loader.
        step: Function that returns the loss, the predictions and the labels of a batch.
        metric_settings: Settings that select the predictions to keep.

    Attributes:
        num_samples: Number of rows of all ranks so far, without padding. A batch whose rows cannot be counted counts as
            one row per data shard.
        num_batches: Number of batches of this rank so far.
    """

    def __init__(
        self, accelerator: Accelerator, loader: PreparedLoader, step: Step, metric_settings: MetricSettings
    ) -> None:
        self.num_samples = 0
        self.num_batches = 0
        self._accelerator = accelerator
        self._loader = loader
        self._step = step
        self._metric_settings = metric_settings
        # Over this rank's batches: sum of the losses times their weights, on the device (None: no batch had a loss), and
        # sum of the weights
        self._weighted_loss: torch.Tensor | None = None
        self._total_weight = 0.0

    @torch.no_grad()  # as a decorator, it does not affect the caller between two batches
    def iterate_batches(self) -> Iterator[tuple[Tree, Tree]]:
        """Yield a pair of (predictions, labels) for each batch, gathered from all ranks. Missing parts are None.

        Every rank must iterate to the end. If ranks differ in the size of dim 1, values are padded with -100.
        """
        for batch in self._loader:
            batch, num_items = split_label_count(batch)
            loss, predictions, labels = self._step(batch)
            self._add_loss(loss, num_items)
            yield (
                self._gather_values(self._metric_settings.select_predictions(predictions, labels)),
                self._gather_values(labels),
            )

    def _add_loss(self, loss: torch.Tensor | None, num_items: int | None) -> None:
        """Count the loader's current batch, and add its loss.

        Args:
            loss: Mean loss of the batch, or None.
            num_items: Number of labels that are not ignored. None: the loss is a mean over samples.
        """
        counts = self._loader.valid_counts
        num_valid = 1 if self._loader.num_valid is None else self._loader.num_valid
        self.num_batches += 1
        self.num_samples += sum(counts) if counts is not None else self._accelerator.strategy.data_shard.count
        # A batch that consists of padding rows alone has no weight, although its labels were counted.
        weight = num_valid if num_items is None or not num_valid else num_items
        if loss is not None and weight:
            weighted = loss.detach().float().reshape(()) * weight
            self._weighted_loss = weighted if self._weighted_loss is None else self._weighted_loss + weighted
            self._total_weight += weight

    def _gather_values(self, values: Tree) -> Tree:
        """Return the values of all ranks for the current batch, without padding rows. Return None for None."""
        if values is None:
            return None
        if self._accelerator.num_processes > 1:
            self._check_widths(values)
            values = self._accelerator.pad_across_processes(values, dim=1, pad_index=IGNORED)
        return self._accelerator.gather_for_metrics(values, loader=self._loader)

    def _check_widths(self, values: Tree) -> None:
        """Raise `MetricError` on all ranks if values whose dtype has no -100 differ in width between ranks."""
        unsigned = [tensor for tensor in list_tensors(values) if tensor.ndim > 1 and not tensor.dtype.is_signed]
        if not unsigned:
            return
        widths = [tensor.shape[1] for tensor in unsigned]
        # The minimum is the negative maximum of the negative widths, so one collective is enough.
        bounds = self._accelerator.collectives.reduce_numbers([*widths, *(-width for width in widths)], "max")
        max_widths, min_widths = bounds[: len(unsigned)], [-bound for bound in bounds[len(unsigned) :]]
        for tensor, max_width, min_width in zip(unsigned, max_widths, min_widths):
            if max_width != min_width:
                check_padding(tensor.dtype)

    def compute_mean_loss(self) -> float | None:
        """Return the mean loss over all ranks: per sample, or per label if labels were counted.

        Every rank must call it. Return None if no batch had a loss.
        """
        total = 0.0 if self._weighted_loss is None else self._weighted_loss.item()
        mean = self._accelerator.reduce_mean(total, self._total_weight).item()
        has_loss = self._weighted_loss is not None and bool(self._total_weight)
        # A rank can have no sample of its own. All ranks must return the same, also if the mean is NaN.
        return mean if self._accelerator.collectives.reduce_numbers([has_loss], "max")[0] else None


class EvaluationSession:
    """Evaluation or prediction in progress: its model, and the number of rows in its current batch.

    Attributes:
        model: Model in evaluation mode.
        get_num_rows: Function that returns the number of rows of the current batch, or None if unknown.
    """

    def __init__(self, model: torch.nn.Module, get_num_rows: Callable[[], int | None] = lambda: None) -> None:
        self.model = model
        self.get_num_rows = get_num_rows


class Evaluator:
    """Runner of a Trainer's evaluations and predictions with one Accelerator.

    Args:
        accelerator: Accelerator whose ranks process the data together.
        callback_handler: Handler that calls the callbacks for each batch.
        log: Log that measures peak memory.
        methods: Trainer, whose methods a subclass may override.
        is_in_training: Whether a training run is in progress. The model is then already prepared, and the Trainer's own
            loaders are prepared once and kept.

    Attributes:
        average: Average of the model's weights, with which the model is evaluated. None: the model's own weights.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        callback_handler: CallbackHandler,
        log: Log,
        methods: PredictionMethods,
        is_in_training: bool,
    ) -> None:
        self._accelerator = accelerator
        self._callback_handler = callback_handler
        self._log = log
        self._methods = methods
        self._is_in_training = is_in_training
        self.average: ExponentialMovingAverage | None = None
        self._own_loaders: dict[str, PreparedLoader] = {}  # of the current training run, by name of the dataset
        self._sessions: list[EvaluationSession] = []  # in progress, the innermost one last

    # ---------------------------------------------------------------- the model and its data

    @contextmanager
    def open_session(self, model: torch.nn.Module, optimizer: object) -> Iterator[EvaluationSession]:
        """Return a context manager that yields a session, in which the model is in evaluation mode.

        If there is an average of the weights, the model contains it in the block. Outside of a training run, the model
        is prepared first, and released at the end. A session inside another one uses the outer session's model, and
        changes nothing.

        Args:
            model: The Trainer's model.
            optimizer: Optimizer. A schedule-free one is set to evaluation mode, too, and stays in it. The next training
                step ends this mode.
        """
        if self._sessions:
            with self._enter_session(EvaluationSession(self._sessions[-1].model)) as session:
                yield session
            return
        set_optimizer_mode(optimizer, is_training=False)  # before the average replaces the weights
        if not self._is_in_training:
            model = self._accelerator.prepare_model(model, evaluation_mode=True)
        weights: AbstractContextManager[Any] = nullcontext() if self.average is None else self.average.swap_weights()
        try:
            with (
                use_evaluation_mode(model),
                self._log.measure_phase("evaluation"),
                weights,
                self._enter_session(EvaluationSession(model)) as session,
            ):
                yield session
        finally:
            if not self._is_in_training:
                self._accelerator.free_memory()

    @contextmanager
    def use_num_rows(self, model: torch.nn.Module, num_rows: int) -> Iterator[None]:
        """Return a context manager in which `get_num_rows()` returns the given number of rows.

        It is used for a batch that does not come from a loader.

        Args:
            model: Model in evaluation mode.
            num_rows: Number of rows in the batch.
        """
        with self._enter_session(EvaluationSession(model, lambda: num_rows)):
            yield

    @contextmanager
    def _enter_session(self, session: EvaluationSession) -> Iterator[EvaluationSession]:
        """Return a context manager in which an evaluation counts as in progress."""
        self._sessions.append(session)
        try:
            yield session
        finally:
            self._sessions.remove(session)  # a session inside a generator can end after one that began later

    def get_num_rows(self) -> int | None:
        """Return the number of rows of the innermost session's current batch, or None if unknown."""
        return self._sessions[-1].get_num_rows() if self._sessions else None

    def prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Return a loader in its prepared form. A loader that is already prepared is returned unchanged.

        In a session, `get_num_rows()` then returns the number of rows in this loader's current batch.
        """
        prepared = self._accelerator.prepare_data_loader(loader)
        self._use_row_count(prepared)
        return prepared

    def get_own_loader(self, name: str, create_loader: Callable[[], DataLoader[Any]]) -> PreparedLoader:
        """Return the prepared loader of one of the Trainer's own datasets.

        During training, each loader is created and prepared only once.

        Args:
            name: Key under which the loader is kept during training.
            create_loader: Function that creates the loader.
        """
        if not self._is_in_training:
            return self.prepare_loader(create_loader())
        if name not in self._own_loaders:
            self._own_loaders[name] = self._accelerator.prepare_data_loader(create_loader())
        self._use_row_count(self._own_loaders[name])
        return self._own_loaders[name]

    def _use_row_count(self, loader: PreparedLoader) -> None:
        """Let the innermost session read its number of rows from this loader. Do nothing if no session is open."""
        if self._sessions:
            self._sessions[-1].get_num_rows = lambda: loader.num_rows

    # ---------------------------------------------------------------- passes

    def run_pass(
        self,
        session: EvaluationSession,
        loader: PreparedLoader,
        metric: StreamingMetric | None,
        metric_settings: MetricSettings,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> tuple[Metrics, int]:
        """Run one pass over the loader. Return the metrics and the number of rows of all ranks.

        The metrics include the mean loss, if there is one, and the speed. Every rank must call it.

        Args:
            session: Session with the model.
            loader: Prepared loader of the data.
            metric: Metric that receives the predictions. None: only the loss is computed.
            metric_settings: Settings that select the predictions to keep.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            prefix: Prefix of the metrics' names, such as "eval".
        """
        start_time = time.monotonic()
        evaluation = Evaluation(
            self._accelerator, loader, self._make_step(session, metric is None, ignore_keys), metric_settings
        )
        for predictions, labels in evaluation.iterate_batches():
            if metric is not None:
                metric.update(predictions, labels)
            self._callback_handler.call_event("on_prediction_step", eval_dataloader=loader)
        metrics: Metrics = {}
        loss = evaluation.compute_mean_loss()
        if loss is not None:
            metrics[f"{prefix}_loss"] = loss
        if metric is not None:
            metrics.update(share_metrics(self._accelerator.collectives, make_named_metrics(metric.compute(), prefix)))
        metrics.update(
            compute_speed(prefix, time.monotonic() - start_time, evaluation.num_samples, evaluation.num_batches)
        )
        return metrics, evaluation.num_samples

    def run_and_collect(
        self,
        session: EvaluationSession,
        loader: PreparedLoader,
        metric_settings: MetricSettings,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """Run one pass, and return all predictions in host memory and the metrics computed from them at the end.

        Every rank must call it. Without labels, `compute_metrics` is not called. If only the loss is requested, the
        predictions and labels in the result are None.

        Args:
            session: Session with the model.
            loader: Prepared loader of the data.
            metric_settings: Metric, and settings that select the predictions to keep.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            prefix: Prefix of the metrics' names, such as "eval".
        """
        collector = None if metric_settings.is_loss_only else AccumulatedMetric(None, count_rows(loader))
        metrics, num_samples = self.run_pass(session, loader, collector, metric_settings, ignore_keys, prefix)
        if collector is None:
            return EvalLoopOutput(None, None, metrics, num_samples)
        predictions, labels = collector.join_all()
        metric = metric_settings.make_metric(None)
        if labels is not None and metric is not None:
            metric.update(_convert_to_tensors(predictions), _convert_to_tensors(labels))
            metrics.update(share_metrics(self._accelerator.collectives, make_named_metrics(metric.compute(), prefix)))
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def iterate_predictions(
        self,
        session: EvaluationSession,
        loader: PreparedLoader,
        metric_settings: MetricSettings,
        ignore_keys: list[str] | None,
    ) -> Iterator[tuple[Tree, Tree]]:
        """Return an iterator over pairs of (predictions, labels), one pair per batch.

        The values are gathered from all ranks and are on the device. Every rank must iterate to the end.

        Args:
            session: Session with the model.
            loader: Prepared loader of the data.
            metric_settings: Settings that select the predictions to keep.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
        """
        return Evaluation(
            self._accelerator, loader, self._make_step(session, False, ignore_keys), metric_settings
        ).iterate_batches()

    def _make_step(self, session: EvaluationSession, is_loss_only: bool, ignore_keys: list[str] | None) -> Step:
        """Return the Trainer's `prediction_step` as a function of the batch alone."""
        return lambda batch: self._methods.prediction_step(session.model, batch, is_loss_only, ignore_keys)


def count_rows(loader: PreparedLoader) -> int | None:
    """Return the number of rows in the loader's dataset, over all ranks, or None if it has no length."""
    try:
        return loader.total_dataset_length
    except TypeError:
        return None


def select_per_sample(values: Tree, num_rows: int | None) -> Tree:
    """Return the tensors that have one row per sample, detached; None if there are none.

    Several tensors are returned as a tuple, and a single one without a tuple.

    Args:
        values: Tensor, or tuple or list of tensors. Other values, and tensors without one row per sample, are left out.
        num_rows: Number of samples. None: unknown, so only 0-d tensors are left out.
    """
    if isinstance(values, torch.Tensor):
        return values.detach() if values.ndim and (num_rows is None or len(values) == num_rows) else None
    if isinstance(values, tuple | list):
        selected = (select_per_sample(value, num_rows) for value in values)
        return unpack_single(tuple(value for value in selected if value is not None))
    return None


def _convert_to_tensors(values: Tree) -> Tree:
    """Return the arrays in a tuple, or a single array, as tensors. None stays None."""
    if isinstance(values, tuple):
        return tuple(map(_convert_to_tensors, values))
    return None if values is None else torch.as_tensor(values)
