"""Test that the Trainer's losses equal those of a hand-written loop and of transformers' Trainer."""

import pytest
import torch
import transformers
from torch import nn

from headway import Trainer, TrainingArguments
from headway.trainer.collation import Collator
from tests.unit.trainer.models import Net, Points, bert, classes, cross_entropy, llama, texts

SAME = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 3,
    "logging_steps": 1, "train_sampling_strategy": "sequential", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


def list_curve(trainer):
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    return [[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry]


def assert_close(ours, theirs, tolerance=2e-4):
    assert len(ours) == len(theirs) > 4
    for a, b in zip(ours, theirs):
        assert a == pytest.approx(b, rel=tolerance, abs=1e-6)


def train_both(tmp_path, make, data, collator=None, **more):
    """Train with both Trainers and return them."""
    ours = Trainer(make(), TrainingArguments(output_dir=tmp_path / "a", **SAME, **more), collator, data)
    ours.train()
    args = transformers.TrainingArguments(output_dir=tmp_path / "b", log_level="error", **SAME, **more)
    theirs = transformers.Trainer(make(), args, collator or transformers.default_data_collator, data)
    theirs.train()
    return ours, theirs


def test_classifier_equals_transformers(tmp_path):
    ours, theirs = train_both(tmp_path, bert, classes())
    assert_close(list_curve(ours), list_curve(theirs))
    for a, b in zip(ours.model.parameters(), theirs.model.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


def test_language_model_with_rows_of_different_lengths_equals_transformers(tmp_path):
    """Rows have different lengths and ignored labels, and each window is one mean over all of its labels."""
    more = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
    ours, theirs = train_both(tmp_path, llama, texts(), Collator(pad_token_id=0), **more)
    assert_close(list_curve(ours), list_curve(theirs))


def test_smoothed_labels_equal_transformers(tmp_path):
    ours, theirs = train_both(tmp_path, bert, classes(), label_smoothing_factor=0.2)
    assert_close(list_curve(ours), list_curve(theirs))


def train_by_hand(steps=2, batch=4):
    model, data = Net(), Points(42)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    num_updates = 2 * 6

    def compute_factor(update):
        return update / 3 if update < 3 else (num_updates - update) / (num_updates - 3)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, compute_factor)
    found = []
    for _ in range(2):
        for start in range(0, 42, batch * steps):
            x, y = data.x[start : start + batch * steps], data.y[start : start + batch * steps]
            loss = cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found.append([loss.item(), norm.item(), scheduler.get_last_lr()[0]])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, found


def test_plain_module_equals_the_loop_by_hand(tmp_path):
    """42 rows in batches of 4, two to a window, so that the last window of an epoch is a batch of 2 rows."""
    expected, found = train_by_hand()
    same = {**SAME, "weight_decay": 0.0, "gradient_accumulation_steps": 2}
    args = TrainingArguments(output_dir=tmp_path, **same)
    trainer = Trainer(Net(), args, train_dataset=Points(42), loss_function=cross_entropy)
    output = trainer.train()
    assert_close([entry[:3] for entry in list_curve(trainer)], found, 1e-5)
    for a, b in zip(trainer.model.parameters(), expected.parameters()):
        assert torch.allclose(a, b, atol=1e-6)
    assert output.global_step == len(found)
    assert output.training_loss == pytest.approx(sum(loss for loss, *_ in found) / len(found))


def test_curves_of_different_settings_differ(tmp_path):
    _, found = train_by_hand()
    _, other = train_by_hand(steps=3)
    with pytest.raises(AssertionError):
        assert_close(found[:14], other[:14], 1e-5)


def test_evaluation_equals_transformers(tmp_path):
    def compute_accuracy(prediction):
        logits, labels = prediction
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}

    data = classes(37)
    ours = Trainer(bert(), TrainingArguments(output_dir=tmp_path, use_cpu=True, disable_tqdm=True), eval_dataset=data,
                   compute_metrics=compute_accuracy)  # fmt: skip
    args = transformers.TrainingArguments(output_dir=tmp_path / "b", use_cpu=True, disable_tqdm=True, log_level="error")
    theirs = transformers.Trainer(
        bert(), args, transformers.default_data_collator, eval_dataset=data, compute_metrics=compute_accuracy
    )
    a, b = ours.evaluate(), theirs.evaluate()
    assert a["eval_loss"] == pytest.approx(b["eval_loss"], abs=1e-5)
    assert a["eval_accuracy"] == b["eval_accuracy"]
    assert set(a) <= set(b) | {"epoch"}
    a, b = ours.predict(data), theirs.predict(data)
    assert a.predictions == pytest.approx(b.predictions, abs=1e-5)
    assert (a.label_ids == b.label_ids).all()
    assert a.metrics["test_accuracy"] == b.metrics["test_accuracy"]


def test_loss_of_an_evaluation_is_the_mean_over_all_labels(tmp_path):
    model, data = llama(), texts(11)
    trainer = Trainer(
        model, TrainingArguments(output_dir=tmp_path, use_cpu=True, per_device_eval_batch_size=3), eval_dataset=data
    )
    total = count = 0
    with torch.no_grad():
        for row in data:
            labels = torch.tensor([row["labels"]])
            number = int((labels[:, 1:] != -100).sum())
            if number:
                total += model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss.item() * number
                count += number
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)
