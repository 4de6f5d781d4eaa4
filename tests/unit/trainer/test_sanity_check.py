"""Test the sanity check of an evaluation: it finds mistakes before the first update, and changes nothing else."""

import random
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from headway import EarlyStoppingCallback, Trainer, TrainerCallback
from headway.errors import ConfigError, MetricError
from headway.trainer.sanity_check import MAX_BATCHES, spread_rows
from tests.unit.trainer.models import Net, Points, arguments, cross_entropy, losses, make, weights

EVERY_EPOCH = {"eval_strategy": "epoch", "num_train_epochs": 2}


class Updates(TrainerCallback):
    """Callback that counts the updates."""

    def __init__(self):
        self.count = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.count += 1


def catch_refusal(folder, kind, metrics=None, evaluation=None, callbacks=(), **given):
    """Return the error of a training that fails before its first update and leaves no file in its folder."""
    updates = Updates()
    trainer = make(folder, callbacks=[updates, *callbacks], evaluation=evaluation or Points(30), metrics=metrics,
                   **{**EVERY_EPOCH, "save_strategy": "epoch", **given})  # fmt: skip
    with pytest.raises(kind) as exc_info:
        trainer.train()
    assert updates.count == 0
    assert not (folder / "run" / "checkpoints").exists()
    return exc_info


# ---------------------------------------------------------------- mistakes


def test_metric_that_raises_an_error(tmp_path):
    def metrics(prediction):
        return {"accuracy": prediction["nonsense"]}

    told = catch_refusal(tmp_path, MetricError, metrics)
    assert "compute_metrics raised TypeError: tuple indices" in str(told.value)
    assert "rows of the evaluation data before the training" in str(told.value)
    assert isinstance(told.value.__cause__, TypeError)


def test_undefined_name_in_a_metric_needs_no_second_attempt(tmp_path):
    calls = []

    def metrics(prediction):
        calls.append(len(prediction.label_ids))
        return {"accuracy": no_such_name}  # noqa: F821

    assert "NameError: name 'no_such_name'" in str(catch_refusal(tmp_path, MetricError, metrics).value)
    assert calls == [8]


def test_misspelled_metric_for_the_best_model_is_refused_before_training(tmp_path):
    def metrics(prediction):
        return {"accuracy": 0.5, "f1": 0.25, "report": "text"}

    told = str(catch_refusal(tmp_path, ConfigError, metrics, metric_for_best_model="acuracy").value)
    assert (
        "metric_for_best_model='acuracy' is not among the evaluation's metrics: eval_accuracy, eval_f1, eval_loss"
        in told
    )
    assert "did you mean 'accuracy'?" in told
    told = str(catch_refusal(tmp_path, ConfigError, metrics, metric_for_best_model="report").value)
    assert "is 'text', which cannot be compared" in told
    told = catch_refusal(tmp_path, ConfigError, callbacks=[EarlyStoppingCallback()], metric_for_best_model="eval_los")
    assert "did you mean 'loss'?" in str(told.value)
    told = catch_refusal(
        tmp_path, ConfigError, lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="eval_acc"
    )
    assert "not among" in str(told.value)


def test_metrics_of_several_evaluations_have_their_names(tmp_path):
    several = {"near": Points(4), "far": Points(4)}
    message = str(catch_refusal(tmp_path, ConfigError, evaluation=several, metric_for_best_model="loss").value)
    assert "eval_far_loss, " in message
    assert "did you mean" in message
    make(tmp_path, evaluation=several, metric_for_best_model="near_loss", **EVERY_EPOCH).train()


def test_model_that_fails_in_evaluation_mode(tmp_path):
    class Odd(Net):
        def forward(self, x):
            return super().forward(x) if self.training else self.missing

    updates = Updates()
    with pytest.raises(AttributeError, match="missing"):
        make(tmp_path, Odd(), callbacks=[updates], evaluation=Points(4), **EVERY_EPOCH).train()
    assert updates.count == 0


# ---------------------------------------------------------------- metrics that need more than a few rows


class SortedRows(Dataset):
    """Dataset whose labels are the row numbers divided by ten."""

    def __init__(self, num_rows=300):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return torch.zeros(5), index // (self.num_rows // 2)


def test_few_rows_are_spread_over_all_data(tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(sorted(set(prediction.label_ids.tolist())))
        return {}

    make(tmp_path, evaluation=SortedRows(), metrics=metrics, **EVERY_EPOCH).train()
    assert seen[0] == [0, 1]
    assert spread_rows(10, 4, 1) == [[0, 2, 5, 7]]
    assert sorted(row for batch in spread_rows(10, 4, 32) for row in batch) == list(range(10))
    assert spread_rows(3, 8, 1) == [[0, 1, 2]]
    assert len(spread_rows(10_000, 8, MAX_BATCHES)) == MAX_BATCHES


def test_metric_that_fails_on_few_rows_is_accepted(tmp_path):
    def metrics(prediction):
        if len(prediction.label_ids) < 12:
            raise ValueError("too few")
        return {f"class_{label}": 1.0 for label in set(prediction.label_ids.tolist())}

    trainer = make(tmp_path, evaluation=Points(30), metrics=metrics, metric_for_best_model="class_1", **EVERY_EPOCH)
    trainer.train()
    assert trainer.state.best_metric == 1.0


def test_name_that_needs_more_rows_is_accepted(tmp_path):
    def metrics(prediction):
        return {"rare": 1.0} if len(prediction.label_ids) > 20 else {}

    trainer = make(tmp_path, evaluation=Points(30), metrics=metrics, metric_for_best_model="rare", **EVERY_EPOCH)
    trainer.train()
    assert trainer.state.best_metric == 1.0


# ---------------------------------------------------------------- nothing else changes


class Bare(Trainer):
    """Trainer without the check."""

    def check_evaluation(self):
        pass


class Normed(Net):
    """Model with dropout, batch normalization, a buffer that counts calls, and a module in evaluation mode."""

    def __init__(self):
        super().__init__(0.3)
        self.norm, self.frozen = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.body(self.frozen(self.norm(x)))


class Noisy(Points):
    """Dataset that draws from all random number generators for each row."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + random.random() + torch.rand(5) + float(numpy.random.rand()), y


class KeepingMetric:
    """Metric that keeps all of its state, because it has no `reset`."""

    def __init__(self):
        self.rows = 0

    def update(self, predictions, labels):
        self.rows += len(labels)

    def compute(self):
        return {"rows": self.rows}


def train_with(folder, kind):
    model = Normed()
    modes = []

    class Modes(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            modes.append([module.training for module in model.modules()])

    trainer = kind(model, arguments(folder, **EVERY_EPOCH), train_dataset=Noisy(20), eval_dataset=Noisy(9), callbacks=[Modes],
                   loss_function=cross_entropy, compute_metrics=KeepingMetric())  # fmt: skip
    trainer.train()
    evaluations = [
        {k: v for k, v in entry.items() if k in ("eval_loss", "eval_rows")} for entry in trainer.state.log_history
    ]
    return losses(trainer), weights(model), model.state_dict(), evaluations, modes


def test_check_leaves_no_trace(tmp_path):
    with_it, without = train_with(tmp_path / "a", Trainer), train_with(tmp_path / "b", Bare)
    assert with_it[0] == without[0]
    assert torch.equal(with_it[1], without[1])
    assert with_it[2].keys() == without[2].keys()
    assert all(torch.equal(with_it[2][name], without[2][name]) for name in with_it[2])
    assert with_it[3:] == without[3:]
    assert {"eval_rows": 9} in [{k: v for k, v in entry.items() if k == "eval_rows"} for entry in with_it[3]]


class Holder:
    """Object that refers to model and data, and whose method is the metric."""

    def __init__(self, data):
        self.data, self.calls = data, []
        self.model = Net()

    def metrics(self, prediction):
        self.calls.append((id(self), id(self.model), id(self.data)))
        return {"rows": len(prediction.label_ids)}


def test_object_of_a_metric_is_copied_without_model_and_data(tmp_path):
    seen = []

    class Told(Holder):
        def metrics(self, prediction):
            seen.append((self is holder, self.model is holder.model, self.data is holder.data))
            return super().metrics(prediction)

    holder = Told(Points(8))
    trainer = make(
        tmp_path, holder.model, data=holder.data, evaluation=holder.data, metrics=holder.metrics, eval_strategy="epoch"
    )
    trainer.train()
    assert seen == [(False, True, True), (True, True, True)]
    assert len(holder.calls) == 1


class LockedMetric(KeepingMetric):
    """Metric that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class ResettableMetric(LockedMetric):
    def reset(self):
        self.rows = 0


@pytest.mark.parametrize("kind", [LockedMetric, ResettableMetric])
def test_metric_that_cannot_be_copied_keeps_nothing_of_the_check(tmp_path, kind):
    trainer = make(tmp_path, evaluation=Points(9), metrics=kind(), eval_strategy="epoch", metric_for_best_model="rows")
    trainer.train()
    assert [entry["eval_rows"] for entry in trainer.state.log_history if "eval_rows" in entry] == [9]


def test_callbacks_and_files_do_not_contain_the_check(tmp_path):
    events = []

    class Look(TrainerCallback):
        def on_prediction_step(self, *args, **kwargs):
            events.append("prediction")

        def on_train_begin(self, *args, **kwargs):
            events.append("train")

    def metrics(prediction):
        events.append(sorted(path.name for path in (tmp_path / "run").rglob("*")))
        return {}

    trainer = make(
        tmp_path, callbacks=[Look], evaluation=Points(4), metrics=metrics, eval_strategy="epoch", save_strategy="epoch"
    )
    trainer.train()
    assert events[:2] == [[], "train"]
    assert events[2] == "prediction"
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_check_can_be_disabled(tmp_path):
    sizes = []

    def metrics(prediction):
        sizes.append(len(prediction.label_ids))
        return {}

    make(tmp_path, evaluation=Points(20), metrics=metrics, eval_strategy="epoch", eval_sanity_check=False).train()
    assert sizes == [20]
    message = str(catch_refusal(tmp_path / "on", MetricError, lambda prediction: no_such_name).value)  # noqa: F821
    assert "skip this check: eval_sanity_check=False" in message


class Once(IterableDataset):
    """Stream that can be read once."""

    def __init__(self):
        self.rows = iter([Points(30)[index] for index in range(30)])

    def __iter__(self):
        return self.rows


def test_streams_are_not_read_ahead(tmp_path):
    trainer = make(
        tmp_path, evaluation=Once(), metrics=KeepingMetric(), eval_strategy="epoch", metric_for_best_model="rows"
    )
    trainer.train()
    assert [entry["eval_rows"] for entry in trainer.state.log_history if "eval_rows" in entry] == [30]


def test_overridden_evaluation_is_not_checked(tmp_path):
    class Own(Trainer):
        def evaluate(self, *args, **kwargs):
            return {"eval_own": 1.0}

        def prediction_step(self, *args, **kwargs):
            raise AssertionError

    args = arguments(tmp_path, eval_strategy="epoch", metric_for_best_model="own")
    trainer = Own(Net(), args, train_dataset=Points(8), eval_dataset=Points(4), loss_function=cross_entropy)
    trainer.train()
    assert trainer.state.best_metric == 1.0


def test_without_evaluations_nothing_is_checked(tmp_path):
    def metrics(prediction):
        raise AssertionError

    assert make(tmp_path, evaluation=Points(4), metrics=metrics).train().global_step == 5
