"""Test that a Trainer ends with an error, and does not loop forever, if its batches make no update."""

import logging
import subprocess
import sys

import pytest
import torch
from torch.utils.data import IterableDataset

from headway import Trainer
from headway.errors import DataError, StateError
from headway.trainer import missing_updates
from tests.unit.trainer.models import Speaker, arguments

MASKED = [-100] * 6
ENDLESS = """
import sys
from pathlib import Path
from tests.unit.trainer.test_missing_updates import masked_rows
from tests.unit.trainer.models import Speaker, arguments
from headway import Trainer

Trainer(Speaker(), arguments(Path(sys.argv[1]), max_steps=3), train_dataset=masked_rows(8)).train()
"""


def masked_rows(num_rows: int, num_labeled: int = 0) -> list[dict[str, list[int]]]:
    """Return rows whose labels are all -100, except in the last `num_labeled` rows."""
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "labels": MASKED} for _ in range(num_rows)]
    for row in rows[num_rows - num_labeled :]:
        row["labels"] = row["input_ids"]
    return rows


class MaskedStream(IterableDataset):
    """Stream of rows without labels that never ends."""

    def __iter__(self):
        while True:
            yield from masked_rows(8)


class SilentTrainer(Trainer):
    """Trainer whose training step forgets backward."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.compute_loss(model, inputs).detach()


class NanTrainer(Trainer):
    """Trainer whose loss is always NaN."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * float("nan")


def test_a_run_without_labels_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert (
        "DataError: no label of the training data counts: in all 2 accumulation windows so far, 'labels'" in done.stderr
    )


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"num_train_epochs": 2}], ids=["steps", "epochs"])
def test_an_epoch_without_labels_is_an_error(tmp_path, length):
    trainer = Trainer(Speaker(), arguments(tmp_path, **length), train_dataset=masked_rows(8))
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    with pytest.raises(DataError) as told:
        trainer.train()
    text = str(told.value)
    assert "'labels' contained only -100 (other columns: input_ids)" in text
    assert "rows are truncated before the tokens to be learned" in text
    assert "{% generation %}" in text
    assert "the response template" in text
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))


def test_some_rows_without_labels_are_silent(tmp_path, caplog):
    given = arguments(tmp_path, max_steps=3, train_sampling_strategy="sequential")
    trainer = Trainer(Speaker(), given, train_dataset=masked_rows(8, num_labeled=4))
    trainer.train()
    assert trainer.state.global_step == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_endless_stream_without_labels_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(missing_updates, "_MAX_IN_ROW", 5)  # 1000 windows take long
    with pytest.raises(DataError, match="in the last 5 accumulation windows, 'labels' contained only -100"):
        Trainer(Speaker(), arguments(tmp_path, max_steps=3), train_dataset=MaskedStream()).train()


def test_a_step_that_never_runs_backward_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(missing_updates, "_MAX_IN_ROW", 9)
    with pytest.raises(
        StateError, match=r"the last 9 accumulation windows made no update.*never called accelerator.backward"
    ):
        SilentTrainer(Speaker(), arguments(tmp_path, max_steps=3), train_dataset=masked_rows(8, 8)).train()


def test_updates_that_fp16_always_skips_end_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(missing_updates, "_MAX_IN_ROW", 9)
    given = arguments(tmp_path, max_steps=3, accelerator_config={"mixed_precision": "fp16"})
    with pytest.raises(
        StateError, match=r"the last 9 accumulation windows made no update.*skipped by fp16's gradient scaler"
    ):
        NanTrainer(Speaker(), given, train_dataset=masked_rows(8, 8)).train()
