"""Test the Trainer with `ema_decay`: evaluations, the best checkpoint and the final model use averaged weights."""

from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.errors import ConfigError
from tests.unit.trainer.models import Points, make, weights

DECAY = 0.5


class Recorder(TrainerCallback):
    """Callback that averages after each update independently of Headway, and records the weights in evaluations."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None
        self.averages: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.average = weights(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.average = DECAY * self.average + (1 - DECAY) * weights(model)
        self.averages.append(self.average)

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.seen.append(weights(model))


def train(folder: Any, scores: list[float], **more: Any) -> tuple[Any, Recorder]:
    values = iter(scores)
    recorder = Recorder()
    trainer = make(
        folder, callbacks=[recorder], evaluation=Points(4), metrics=lambda found: {"score": next(values)},
        ema_decay=DECAY, eval_strategy="steps", eval_steps=1, eval_sanity_check=False, metric_for_best_model="score", **more,
    )  # fmt: skip
    trainer.train()
    return trainer, recorder


def test_evaluations_and_the_final_model_use_averages(tmp_path: Any) -> None:
    trainer, recorder = train(tmp_path, [0.1] * 5)
    assert len(recorder.averages) == 5
    for found, expected in zip(recorder.seen, recorder.averages, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights(trainer.model), recorder.averages[-1])


@pytest.mark.parametrize(("scores", "best"), [([0.1, 0.9, 0.2, 0.3, 0.4], 2), ([0.1, 0.2, 0.3, 0.4, 0.9], 5)])
def test_best_averages_are_restored(tmp_path: Any, scores: list[float], best: int) -> None:
    kept = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True}
    trainer, recorder = train(tmp_path, scores, **kept)
    assert trainer.state.best_global_step == best
    torch.testing.assert_close(weights(trainer.model), recorder.averages[best - 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_decay": 2.0}, "ema_decay=2.0; give a number"),
        ({"ema_kwargs": {"every": 2}}, "needs ema_decay"),
        ({"ema_decay": 0.9, "ema_kwargs": {"evry": 2}}, "does not fit ExponentialMovingAverage"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options).train()
