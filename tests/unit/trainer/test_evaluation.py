"""Test evaluation: streaming metrics, the forms of other libraries, and memory independent of the number of samples."""

import os
import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from headway import EvalPrediction, Trainer, TrainingArguments
from headway.errors import ConfigError, MetricError
from headway.trainer import metrics as kinds_of_metrics
from headway.trainer.evaluation import select_per_sample
from headway.trainer.metrics import AccumulatedMetric, make_metric, make_named_metrics
from tests.unit.trainer.models import Net, Points, Speaker, cross_entropy, texts


def make_arguments(folder, **given):
    return TrainingArguments(output_dir=folder, use_cpu=True, disable_tqdm=True, **given)


class Streaming:
    """Metric that is updated for each batch."""

    def __init__(self):
        self.sizes = []
        self.right = 0

    def update(self, predictions, labels):
        self.sizes.append(len(labels))
        self.right += int((predictions.argmax(-1) == labels).sum())

    def compute(self):
        return torch.tensor(self.right / sum(self.sizes))


def test_all_forms_of_a_metric_agree(tmp_path):
    sums = []

    def compute_by_batch(prediction, compute_result=False):
        sums.append(
            [float((prediction.predictions.argmax(-1) == prediction.label_ids).sum()), len(prediction.label_ids)]
        )
        return {"metric": sum(a for a, _ in sums) / sum(b for _, b in sums)} if compute_result else None

    def compute_at_once(prediction):
        assert isinstance(prediction, EvalPrediction)
        assert isinstance(prediction.predictions, numpy.ndarray)
        assert prediction.predictions.shape == (21, 2)
        return {"metric": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

    streaming, found = Streaming(), []
    for metric, more in ((streaming, {}), (compute_at_once, {}), (compute_by_batch, {"batch_eval_metrics": True})):
        trainer = Trainer(Net(), make_arguments(tmp_path, per_device_eval_batch_size=8, **more), eval_dataset=Points(21),
                          loss_function=cross_entropy, compute_metrics=metric)  # fmt: skip
        found.append(trainer.evaluate())
    assert streaming.sizes == [8, 8, 5]
    assert found[0]["eval_metric"] == pytest.approx(found[1]["eval_metric"]) == pytest.approx(found[2]["eval_metric"])
    assert 0 < found[0]["eval_metric"] < 1
    assert set(found[0]) == {
        "eval_loss",
        "eval_metric",
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
        "epoch",
    }


def test_predictions_of_different_lengths_are_padded(tmp_path):
    rows = texts(9)
    trainer = Trainer(Speaker(), make_arguments(tmp_path, per_device_eval_batch_size=2))
    found = trainer.predict(rows)
    width = max(len(row["labels"]) for row in rows)
    assert found.predictions.shape == (9, width, 60)
    for row, labels, logits in zip(rows, found.label_ids, found.predictions):
        length = len(row["labels"])
        assert labels[:length].tolist() == row["labels"]
        assert (labels[length:] == -100).all()
        own = trainer.model(torch.tensor([row["input_ids"]]))["logits"][0].detach()
        assert torch.allclose(torch.as_tensor(logits[:length]), own, atol=1e-5)
    parts = list(trainer.iterate_predictions(rows))
    assert [len(labels) for _, labels in parts] == [2, 2, 2, 2, 1]


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Points(20)[index] for index in range(20))


def test_stream_is_evaluated_with_a_progress_bar(tmp_path):
    trainer = Trainer(Net(), TrainingArguments(tmp_path, use_cpu=True), loss_function=cross_entropy)
    assert trainer.evaluate(Stream())["eval_loss"] == pytest.approx(trainer.evaluate(Points(20))["eval_loss"])
    assert len(trainer.predict(Stream()).predictions) == 20


def test_flags_of_different_lengths_are_refused():
    metric = AccumulatedMetric(None, None)
    for width in (2, 3):
        metric.update(torch.ones(1, width, dtype=torch.bool), None)
    with pytest.raises(MetricError, match=r"torch\.bool have rows of different lengths"):
        metric.join_all()


def test_caller_may_compute_gradients_between_batches_of_predictions(tmp_path):
    trainer = Trainer(Net(), TrainingArguments(tmp_path, use_cpu=True), loss_function=cross_entropy)
    for predictions, _ in trainer.iterate_predictions(Points(20)):
        assert torch.is_grad_enabled()
        assert not predictions.requires_grad


def test_predict_works_without_labels(tmp_path):
    trainer = Trainer(Speaker(), make_arguments(tmp_path))
    found = trainer.predict([{"input_ids": [1, 2]}] * 3)
    assert found.label_ids is None
    assert "test_loss" not in found.metrics
    assert found.predictions.shape == (3, 2, 60)
    net = Trainer(Net(), make_arguments(tmp_path), loss_function=cross_entropy)
    assert net.predict(list(Points(5).x)).predictions.shape == (5, 2)


def test_logits_are_reduced_before_they_are_kept(tmp_path):
    trainer = Trainer(Speaker(), make_arguments(tmp_path), eval_dataset=texts(9),
                      compute_metrics=lambda p: {"ndim": p.predictions.ndim},
                      preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))  # fmt: skip
    assert trainer.evaluate()["eval_ndim"] == 2
    loss_only = Trainer(
        Speaker(),
        make_arguments(tmp_path, prediction_loss_only=True),
        eval_dataset=texts(9),
        compute_metrics=Streaming(),
    )
    assert "eval_metric" not in loss_only.evaluate()


def test_several_datasets_are_evaluated_by_name(tmp_path):
    trainer = Trainer(
        Net(), make_arguments(tmp_path), eval_dataset={"a": Points(5), "b": Points(9)}, loss_function=cross_entropy
    )
    assert {"eval_a_loss", "eval_b_loss"} <= set(trainer.evaluate())
    assert "eval_loss" in trainer.evaluate(Points(3))


def test_evaluation_restores_the_model(tmp_path):
    trainer = Trainer(Net(), make_arguments(tmp_path, bf16=True), eval_dataset=Points(5), loss_function=cross_entropy)
    for training in (True, False):
        trainer.model.train(training)
        kind = type(trainer.model)
        trainer.evaluate()
        assert trainer.model.training is training
        assert type(trainer.model) is kind


def test_invalid_metric_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="compute_metrics is a str"):
        make_metric("accuracy", False, None)
    with pytest.raises(MetricError, match="gave a list"):
        make_named_metrics([1], "eval")
    assert make_metric(None, False, None) is None
    assert make_named_metrics({"eval_a": 1, "b": numpy.float32(2)}, "eval") == {"eval_a": 1, "eval_b": 2.0}


def test_only_outputs_with_a_row_per_sample_are_kept():
    x = torch.zeros(4, 2)
    assert select_per_sample((x, torch.tensor(1.0), x[:3], "text"), 4).shape == (4, 2)
    assert len(select_per_sample((x, x), 4)) == 2
    assert select_per_sample(torch.tensor(1.0), 4) is None


def test_keeping_large_predictions_warns(caplog, monkeypatch):
    monkeypatch.setattr(kinds_of_metrics, "_WARNING_BYTES", 1000)
    metric = AccumulatedMetric(lambda prediction: {}, 100)
    metric.update(torch.zeros(2, 10), torch.zeros(2))
    assert "about 3.9 KiB of host memory" in caplog.text
    assert "update(predictions, labels)" in caplog.text


FLAT = """
import gc, sys, torch
torch.set_num_threads(1)
from headway import Trainer, TrainingArguments
from headway.core.memory.use import read_host_peak

class Rows:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i >= self.n: raise IndexError
        return {"x": torch.full((8,), float(i % 7)), "labels": i % 3}

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(8, 20000)
    def forward(self, x, labels=None):
        logits = self.w(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

class Mean:
    def reset(self): self.right = self.seen = 0
    def update(self, p, y):
        self.right += int((p.argmax(-1) == y).sum()); self.seen += len(y)
    def compute(self): return {"accuracy": self.right / self.seen, "seen": self.seen}

args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=32)
for metric in (Mean(), lambda p: {"seen": len(p.label_ids)}):
    trainer = Trainer(Wide(), args, compute_metrics=metric)
    trainer.evaluate(Rows(64))
    before = read_host_peak()
    assert trainer.evaluate(Rows(3200))["eval_seen"] == 3200
    print((read_host_peak() - before) >> 20)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    """3200 rows of 20000 logits are 244 MiB, and a batch of 32 is 2.4 MiB. The form that keeps all of them exceeds the limit."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    result = subprocess.run(
        [sys.executable, "-c", FLAT, str(tmp_path)], env=kept, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr[-2000:]
    streaming, everything = map(int, result.stdout.split()[-2:])
    assert streaming < 60
    assert everything > 180
