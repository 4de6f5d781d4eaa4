"""Test the output of a training: the progress bar, which ends with the last logged values, and the table."""

import io
import re
import sys

import pytest

from headway import Trainer, TrainerCallback
from headway.trainer.display import show_summary
from tests.unit.trainer.models import Net, Points, arguments, cross_entropy


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Stop(TrainerCallback):
    """Callback that stops the training after update 4."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4


def capture_training(monkeypatch, folder, out=None, resume=None, callbacks=None, **given):
    out = out or io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    settings = {"disable_tqdm": False, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, **given}
    trainer = Trainer(Net(), arguments(folder, **settings), train_dataset=Points(16), eval_dataset=Points(4),
                      loss_function=cross_entropy, callbacks=callbacks)  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return out.getvalue(), trainer


def find_last_bar(text):
    return [line for line in text.splitlines() if line.startswith("training") and "/" in line][-1]


def test_bar_ends_with_the_last_logged_values(monkeypatch, tmp_path):
    text, trainer = capture_training(monkeypatch, tmp_path, eval_strategy="epoch")
    entries = trainer.state.log_history
    loss = [entry["loss"] for entry in entries if "loss" in entry][-1]
    evaluated = [entry["eval_loss"] for entry in entries if "eval_loss" in entry][-1]
    line = find_last_bar(text)
    assert line.startswith(f"training: 8/8 | loss {loss:.4g} | ")
    assert f"eval_loss {evaluated:.4g}" in line
    assert line.split(" | ")[-1].startswith("in ")
    rows = dict(re.findall(r"│ (.+?) +│ +(.+?) │", text))
    assert rows["last loss"] == f"{loss:.4g}"
    assert rows["last eval_loss"] == f"{evaluated:.4g}"
    assert rows["mean loss"] == f"{entries[-1]['train_loss']:.4g}"
    assert "loss" not in rows


def test_bar_of_a_resumed_training_continues(monkeypatch, tmp_path):
    capture_training(monkeypatch, tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_1"
    text, _ = capture_training(monkeypatch, tmp_path, resume=folder)
    assert find_last_bar(text).startswith("training: 8/8 | loss ")
    text, _ = capture_training(monkeypatch, tmp_path, resume=tmp_path / "run" / "checkpoints" / "checkpoint_3")
    assert find_last_bar(text).startswith("training: 8/8 | ")


def test_bar_of_a_stopped_training_shows_no_remaining_time(monkeypatch, tmp_path):
    text, _ = capture_training(monkeypatch, tmp_path, callbacks=[Stop])
    assert find_last_bar(text).startswith("training: 4/8 | ")
    assert find_last_bar(text).split(" | ")[-1].startswith("in ")


def test_memory_peaks_of_phases_are_not_on_the_bar(monkeypatch, tmp_path):
    text, trainer = capture_training(monkeypatch, tmp_path, skip_memory_metrics=False)
    assert "train_memory_peak_forward" in trainer.state.log_history[-1]
    assert "_memory_peak" not in text


def test_last_loss_of_an_earlier_update_is_marked(monkeypatch, tmp_path):
    text, trainer = capture_training(monkeypatch, tmp_path, logging_steps=3)
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    assert f"{loss:.4g} at update 6" in text


@pytest.mark.parametrize("forced", [True, False])
def test_file_contains_no_escape_sequences(monkeypatch, tmp_path, forced):
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    text, trainer = capture_training(monkeypatch, tmp_path, eval_strategy="epoch")
    assert "\x1b" not in text
    show_summary(trainer.state)
    assert "\x1b" not in sys.stderr.getvalue()


def test_bar_of_a_terminal_stays_to_the_end(monkeypatch, tmp_path):
    text, trainer = capture_training(monkeypatch, tmp_path, Terminal())
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert f"8/8 | loss {loss:.4g}" in plain
