"""Output of a training: the progress bar, which ends with the last logged values, and the table."""

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
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4


def shown(monkeypatch, folder, out=None, resume=None, callbacks=None, **given):
    out = out or io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    settings = {"disable_tqdm": False, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, **given}
    trainer = Trainer(Net(), arguments(folder, **settings), train_dataset=Points(16), eval_dataset=Points(4),
                      loss_function=cross_entropy, callbacks=callbacks)  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return out.getvalue(), trainer


def last(text):
    return [line for line in text.splitlines() if line.startswith("training") and "/" in line][-1]


def test_it_ends_on_what_was_logged_last(monkeypatch, tmp_path):
    text, trainer = shown(monkeypatch, tmp_path, eval_strategy="epoch")
    entries = trainer.state.log_history
    loss = [entry["loss"] for entry in entries if "loss" in entry][-1]
    evaluated = [entry["eval_loss"] for entry in entries if "eval_loss" in entry][-1]
    line = last(text)
    assert line.startswith(f"training: 8/8 | loss {loss:.4g} | ")
    assert f"eval_loss {evaluated:.4g}" in line
    assert line.split(" | ")[-1].startswith("in ")
    rows = dict(re.findall(r"│ (.+?) +│ +(.+?) │", text))
    assert rows["last loss"] == f"{loss:.4g}"
    assert rows["last eval_loss"] == f"{evaluated:.4g}"
    assert rows["mean loss"] == f"{entries[-1]['train_loss']:.4g}"
    assert "loss" not in rows


def test_a_resumed_trainings_bar_goes_on(monkeypatch, tmp_path):
    shown(monkeypatch, tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_1"
    text, _ = shown(monkeypatch, tmp_path, resume=folder)
    assert last(text).startswith("training: 8/8 | loss ")
    text, _ = shown(monkeypatch, tmp_path, resume=tmp_path / "run" / "checkpoints" / "checkpoint_3")
    assert last(text).startswith("training: 8/8 | ")


def test_a_training_that_stops_early_has_nothing_left(monkeypatch, tmp_path):
    text, _ = shown(monkeypatch, tmp_path, callbacks=[Stop])
    assert last(text).startswith("training: 4/8 | ")
    assert last(text).split(" | ")[-1].startswith("in ")


def test_peaks_of_phases_are_not_on_the_bar(monkeypatch, tmp_path):
    text, trainer = shown(monkeypatch, tmp_path, skip_memory_metrics=False)
    assert "train_memory_peak_forward" in trainer.state.log_history[-1]
    assert "_memory_peak" not in text


def test_a_last_loss_of_an_earlier_update_says_so(monkeypatch, tmp_path):
    text, trainer = shown(monkeypatch, tmp_path, logging_steps=3)
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    assert f"{loss:.4g} at update 6" in text


@pytest.mark.parametrize("forced", [True, False])
def test_no_escapes_in_a_file(monkeypatch, tmp_path, forced):
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    text, trainer = shown(monkeypatch, tmp_path, eval_strategy="epoch")
    assert "\x1b" not in text
    show_summary(trainer.state)
    assert "\x1b" not in sys.stderr.getvalue()


def test_the_bar_of_a_terminal_is_there_to_the_end(monkeypatch, tmp_path):
    text, trainer = shown(monkeypatch, tmp_path, Terminal())
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert f"8/8 | loss {loss:.4g}" in plain
