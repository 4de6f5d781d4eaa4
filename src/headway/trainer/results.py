"""Types of the results of the Trainer's methods, and of the argument of `compute_metrics`."""

from typing import Any, NamedTuple

from headway.core.runtime.collectives.tree import Tree

Metrics = dict[str, Any]
"""Values by name. They are usually numbers, but a user's metric may return other values."""


class TrainOutput(NamedTuple):
    """Result of `Trainer.train`.

    Attributes:
        global_step: Number of completed updates, including those before a resume.
        training_loss: Mean loss over all updates.
        metrics: train_runtime in seconds, train_samples_per_second and train_steps_per_second since the last start or
            resume, train_loss, epoch, and train_memory_peak in bytes on this process's device. With
            `skip_memory_metrics=False`, also train_memory_peak_<phase> for each phase.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """Argument of `compute_metrics`: NumPy arrays in host memory, or tuples of arrays, with one row per sample.

    They contain the samples of all ranks, in the order of the data, without padding samples.

    Example::

        def compute_metrics(prediction):
            labels = prediction.predictions.argmax(-1)
            return {"accuracy": (labels == prediction.label_ids).mean()}

    Attributes:
        predictions: Outputs of the model without the loss, or the result of `preprocess_logits_for_metrics`.
        label_ids: Labels; None if the data has none.
    """

    predictions: Tree
    label_ids: Tree


class EvalLoopOutput(NamedTuple):
    """Result of `Trainer.evaluation_loop`.

    Attributes:
        predictions: Outputs of the model without the loss. None if only the loss was requested.
        label_ids: Labels. None if the data has none, or only the loss was requested.
        metrics: Metrics by name.
        num_samples: Number of rows on all ranks.
    """

    predictions: Tree
    label_ids: Tree
    metrics: dict[str, float]
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """Result of `Trainer.predict`.

    Attributes:
        predictions: Outputs of the model without the loss.
        label_ids: Labels. None if the data has none.
        metrics: Metrics by name, with the prefix "test_" by default.
    """

    predictions: Tree
    label_ids: Tree
    metrics: dict[str, float]


def compute_speed(prefix: str, seconds: float, num_samples: int, num_steps: int) -> dict[str, float]:
    """Return the runtime in seconds, and the samples and steps per second, by name.

    Args:
        prefix: Prefix of the names, as in "train_runtime".
        seconds: Runtime in seconds.
        num_samples: Number of processed samples.
        num_steps: Number of steps.
    """
    span = max(seconds, 1e-9)
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(num_samples / span, 3),
        f"{prefix}_steps_per_second": round(num_steps / span, 3),
    }
