"""What training, evaluation and prediction return, and the table at the end."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.units import format_bytes, format_seconds


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns.

    Attributes:
        global_step: updates made, over all attempts of the run.
        training_loss: the mean over all updates.
        metrics: train_runtime (s), train_samples_per_second, train_steps_per_second (of this attempt), train_loss, epoch,
            train_memory_peak (bytes on this process's device).
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is given: arrays, or tuples of arrays, with one row for each sample.

    Attributes:
        predictions: the model's outputs without the loss, or what `preprocess_logits_for_metrics` made of them.
        label_ids: the labels; None where there are none.
    """

    predictions: Any
    label_ids: Any


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns.

    Attributes:
        predictions, label_ids: as in `EvalPrediction`; None where only the loss was asked for.
        metrics: by name.
        num_samples: rows of all ranks.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns.

    Attributes:
        predictions, label_ids: as in `EvalPrediction`.
        metrics: their names begin with "test_".
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


def speed(prefix: str, seconds: float, num_samples: int, num_steps: int) -> dict[str, float]:
    """The runtime in seconds, and samples and steps per second."""
    span = max(seconds, 1e-9)
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(num_samples / span, 3),
        f"{prefix}_steps_per_second": round(num_steps / span, 3),
    }


def format_value(name: str, value: Any) -> str:
    """A value as a person reads it, by what its name says of its unit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if "memory" in name:
        return format_bytes(int(value))
    if name.endswith("runtime"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def format_line(values: Mapping[str, Any]) -> str:
    """Values in one line."""
    return " | ".join(f"{name} {format_value(name, value)}" for name, value in values.items())
