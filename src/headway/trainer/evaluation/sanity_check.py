"""A sanity check of the evaluation before the first update: what would fail after an epoch of training fails before it.

A few rows of the evaluation data, spread over all of it, go through the model and `compute_metrics`. Some metrics raise on few
rows (an area under the curve where only one class occurs) or name what they find (a score of each class); so one that raises, or
lacks the name that is sought, is tried on many more rows before that counts.

What is put back: modules' modes and buffers, the global RNG states. What is not touched: loaders, callbacks, the log, files,
the optimizer. A metric that keeps something is copied, and left out where it cannot be. What cannot be undone is what the user's own
code does elsewhere when it is called once more: the dataset, the collator, `compute_loss`, `prediction_step`, a metric that is a
function. `TrainingArguments(eval_sanity_check=False)` skips it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from headway.accelerator import Accelerator
from headway.data.loader import PreparedLoader
from headway.errors import MetricError
from headway.log import get_logger
from headway.runtime.collectives.tree import to_device
from headway.runtime.seed import read_rng_states, write_rng_states
from headway.trainer.arguments import TrainingArguments
from headway.trainer.data import Batch, length_of
from headway.trainer.evaluation.evaluator import Evaluator, PredictionMethods
from headway.trainer.evaluation.metrics import Measure, check_wanted, named_metrics
from headway.trainer.loss import take_count
from headway.trainer.results import Metrics

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
            return replace(
                measure,
                compute=_copy_metric(
                    measure.compute,
                    [*self.shared, *self.model.modules(), *self.model.parameters(), *self.model.buffers()],
                ),
            ), True
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
