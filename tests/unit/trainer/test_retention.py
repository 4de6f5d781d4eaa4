"""`save_total_limit`, `num_best` and `keep_every` keep the checkpoints that transformers' Trainer and the docs promise."""

import pytest
import torch
import transformers

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError
from tests.unit.trainer.models import WithLoss

ROWS = [{"x": torch.ones(5) * index, "labels": index % 2} for index in range(14)]
SAME = {
    "per_device_train_batch_size": 2, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
    "load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True, "use_cpu": True,
    "disable_tqdm": True, "report_to": "none",
}  # fmt: skip


def make_metric(scores):
    remaining = iter(scores)
    return lambda prediction: {"score": next(remaining)}


def train_ours(folder, scores, **given):
    """Train for one update per score, and return the updates whose checkpoints are kept."""
    args = TrainingArguments(folder, eval_sanity_check=False, log_level="error", **{**SAME, **given})
    trainer = Trainer(WithLoss(), args, train_dataset=ROWS, eval_dataset=ROWS[:2], compute_metrics=make_metric(scores))
    trainer.train()
    return sorted(
        int(path.name.removeprefix("checkpoint_")) + 1 for path in (folder / "checkpoints").glob("checkpoint_*")
    )


class DirectoriesBeforeTheEnd(transformers.TrainerCallback):
    """transformers' Trainer deletes the newest checkpoint at the end if `save_total_limit` is 1."""

    def __init__(self, folder):
        self.folder, self.found = folder, []

    def on_save(self, args, state, control, **kwargs):
        self.found = sorted(int(path.name.removeprefix("checkpoint-")) for path in self.folder.glob("checkpoint-*"))


def train_theirs(folder, scores, **given):
    args = transformers.TrainingArguments(folder, log_level="error", **{**SAME, **given})
    callback = DirectoriesBeforeTheEnd(folder)
    transformers.Trainer(
        WithLoss(), args, train_dataset=ROWS, eval_dataset=ROWS[:2], compute_metrics=make_metric(scores),
        callbacks=[callback],
    ).train()  # fmt: skip
    return callback.found


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize(
    "scores",
    [
        [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6],
        [0.9, 0.1, 0.2, 0.95, 0.4, 0.5, 0.6],
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
        [0.9, 0.8, 0.7, 0.6, 0.5, 0.9, 0.4],
    ],
)
def test_total_limit_equals_that_of_transformers(limit, scores, tmp_path):
    given = {"save_total_limit": limit}
    assert train_ours(tmp_path / "ours", scores, **given) == train_theirs(tmp_path / "theirs", scores, **given)


def test_total_limit_without_a_metric_keeps_the_newest(tmp_path):
    given = {
        "save_total_limit": 3,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "greater_is_better": None,
    }
    scores = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6]
    found = train_ours(tmp_path / "ours", scores, **given)
    assert found == train_theirs(tmp_path / "theirs", scores, **given) == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"num_best": 3, "save_total_limit": 5}, [2, 3, 4, 6, 7]),
        ({"num_best": 3, "save_total_limit": 1}, [2, 3, 4, 7]),
        ({"num_best": 2, "save_total_limit": 2}, [2, 4, 7]),
        ({"keep_every": 3, "save_total_limit": 2}, [2, 3, 6, 7]),
        ({"accelerator_config": {"project_config": {"num_best": 2}}, "save_total_limit": 3}, [2, 4, 7]),
    ],
)
def test_several_best_checkpoints_and_milestones(given, kept, tmp_path):
    assert train_ours(tmp_path, [0.1, 0.9, 0.7, 0.8, 0.2, 0.3, 0.4], **given) == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_best": 0}, "num_best=0; give a whole number, 1 or more"),
        ({"num_best": 2, "save_total_limit": 2}, "num_best=2 needs a metric"),
        (
            {"num_best": 2, "save_total_limit": 2, "metric_for_best_model": "loss"},
            "needs evaluations, but eval_strategy is 'no'",
        ),
        ({"keep_every": 100}, "keep_every=100 chooses which checkpoints are not deleted"),
        ({"keep_every": 100, "save_total_limit": 2, "save_strategy": "no"}, "none are deleted"),
    ],
)
def test_arguments_without_effect_are_errors(given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(tmp_path, **given)
