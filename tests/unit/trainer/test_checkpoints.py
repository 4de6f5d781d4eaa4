"""Test which trainings resume after a preemption, which start from the beginning, and the weights of the best checkpoint."""

import json
import os
import signal
import time

import pytest
import torch

from headway import Accelerator, Preemption, TrainerCallback
from headway.common import scope
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import CheckpointError, Preempted
from headway.trainer import resuming
from headway.trainer.checkpoints import list_differences, list_settings, load_weights
from tests.unit.trainer.models import Net, Points, arguments, make, weights


class Terminate(TrainerCallback):
    """Callback that sends SIGTERM after the given update."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not is_stop_requested():
                time.sleep(0.005)


class First(TrainerCallback):
    """Callback that records the first update of the training."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def is_stop_requested():
    from headway.core.runtime.control_plane import stopping

    return bool(scope.get_or_create(stopping._Agreements).current.reason)


SAVES = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


@pytest.fixture(autouse=True)
def _new_process():
    scope.drop(resuming.TrainingCounts)


def preempt(folder, step=3, resume=None, **given):
    """Preempt the only training of a process."""
    scope.drop(resuming.TrainingCounts)
    with pytest.raises(Preempted):
        make(folder, callbacks=[Terminate(step)], **SAVES, **given).train(resume_from_checkpoint=resume)


def find_first_update(folder, resume=None, model=None, is_new_process=True, **given):
    """Train, and return the update at which the training began, and the Trainer."""
    if is_new_process:
        scope.drop(resuming.TrainingCounts)
    first = First()
    trainer = make(folder, model=model, callbacks=[first], **SAVES, **given)
    trainer.train(resume_from_checkpoint=resume)
    return first.step, trainer


def test_preempted_command_resumes_and_a_finished_run_does_not(tmp_path):
    (whole := make(tmp_path / "whole", **SAVES)).train()
    preempt(tmp_path)
    step, trainer = find_first_update(tmp_path)
    assert step == 3
    assert torch.equal(weights(trainer.model), weights(whole.model))
    assert find_first_update(tmp_path)[0] == 0


def test_resume_false_starts_from_the_beginning(tmp_path):
    preempt(tmp_path)
    assert find_first_update(tmp_path, resume=False)[0] == 0
    assert find_first_update(tmp_path)[0] == 0  # the last run ended normally, so the one before is not resumed
    preempt(tmp_path)
    assert find_first_update(tmp_path, resume_from_checkpoint=False)[0] == 0


def test_resume_false_is_not_reported_as_resumable(tmp_path, caplog):
    preempt(tmp_path, resume=False)
    assert "the next start is from the beginning" in caplog.text
    assert find_first_update(tmp_path)[0] == 0


def test_command_with_a_folder_resumes_where_it_was_preempted(tmp_path):
    make(tmp_path / "elder", save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "elder" / "run" / "checkpoints" / "checkpoint_0"  # after update 2
    preempt(tmp_path, step=4, resume=folder)
    assert find_first_update(tmp_path, resume=folder)[0] == 4
    assert find_first_update(tmp_path, resume=folder)[0] == 2  # the last run ended normally


def test_several_trainings_of_a_process_find_their_own_checkpoints(tmp_path):
    """Like cross-validation with one folder for all folds, of which the second one is preempted."""
    make(tmp_path, **SAVES).train()
    with pytest.raises(Preempted):
        make(tmp_path, callbacks=[Terminate(3)], **SAVES).train()
    assert find_first_update(tmp_path)[0] == 0
    assert find_first_update(tmp_path, is_new_process=False)[0] == 3


def test_model_that_does_not_fit_the_checkpoint_gets_advice(tmp_path):
    preempt(tmp_path)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=False starts from the beginning"):
        find_first_update(tmp_path, model=torch.nn.Sequential(Net(), torch.nn.Linear(2, 2)))
    assert find_first_update(tmp_path)[0] == 3  # the error has lost nothing


class Another(Net):
    """Model with the parameter shapes of Net."""


def test_resume_with_other_settings_warns_about_the_differences(tmp_path, caplog):
    def list_warnings():
        return [
            record.getMessage()
            for record in caplog.records
            if "differ from those of the run that it continues" in record.getMessage()
        ]

    preempt(tmp_path)
    preempt(tmp_path, step=4, logging_steps=2)  # does not affect the results
    assert list_warnings() == []
    step, trainer = find_first_update(tmp_path, model=Another(), learning_rate=0.02, weight_decay=0.5)
    assert step == 4
    (message,) = list_warnings()
    assert "model Net (130 parameters) -> Another (130 parameters), " in message
    assert "learning_rate 0.01 -> 0.02, weight_decay 0.0 -> 0.5. The present settings apply" in message
    assert trainer.state.log_history[-2]["learning_rate"] < 0.01  # the saved schedule applies, as the warning says
    caplog.clear()
    find_first_update(tmp_path, resume=True, model=Another(), learning_rate=0.02, num_train_epochs=2)
    (message,) = list_warnings()
    assert "continues: num_train_epochs 1 -> 2, weight_decay 0.5 -> 0.0. The" in message


def test_addresses_and_unsaved_settings_are_no_difference(tmp_path):
    one, other = (arguments(tmp_path, accelerator_config={"loss_policy": object()}) for _ in range(2))
    assert list_settings(one, Net()) == list_settings(other, Net())
    assert list_differences({}, list_settings(one, Net())) == []


def test_preemption_that_does_not_exit_can_be_resumed(tmp_path):
    own_way = {"accelerator_config": {"preemption": Preemption(exits=False)}}
    trainer = make(tmp_path, callbacks=[Terminate(3)], **SAVES, **own_way)
    assert trainer.train().global_step == 4  # the check is made before the next batch
    assert find_first_update(tmp_path, **own_way)[0] == 4


def test_unreadable_marker_is_reported(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / resuming.MARKER_FILE).write_text("{")
    assert find_first_update(tmp_path)[0] == 0
    assert "cannot be read" in caplog.text


def test_run_does_not_rotate_checkpoints_of_another(tmp_path):
    def list_checkpoints():
        return sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_*"))

    make(tmp_path, save_strategy="steps", save_steps=1).train()
    assert list_checkpoints() == [f"checkpoint_{number}" for number in range(5)]
    make(tmp_path, **{**SAVES, "save_total_limit": 1}).train()
    assert list_checkpoints() == [*(f"checkpoint_{number}" for number in range(5)), "checkpoint_7"]
    # A resumed run owns only the checkpoint from which it resumed.
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_2"
    make(tmp_path, **{**SAVES, "save_total_limit": 1}).train(resume_from_checkpoint=folder)
    assert list_checkpoints() == ["checkpoint_7", "checkpoint_9"]


class TerminateEvaluation(TrainerCallback):
    """Callback that sends SIGTERM in each step of an evaluation."""

    def on_prediction_step(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("is_trained", [False, True])
def test_evaluation_outside_a_training_saves_nothing(tmp_path, is_trained):
    """Only the handler that was installed before receives the signal, as without Headway."""
    heard = []
    former = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        trainer = make(tmp_path, evaluation=Points(12), per_device_eval_batch_size=4, **SAVES)
        if is_trained:
            trainer.train()
        left = sorted((tmp_path / "run").rglob("*.safetensors"))
        trainer.add_callback(TerminateEvaluation)
        assert "eval_loss" in trainer.evaluate()
        trainer.predict(Points(8))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert len(heard) == 5
    assert sorted((tmp_path / "run").rglob("*.safetensors")) == left


def test_training_is_preempted_after_an_evaluation_and_with_other_trainers(tmp_path):
    first = make(tmp_path, evaluation=Points(4), callbacks=[Terminate(3)], **SAVES)
    first.evaluate()
    make(tmp_path / "other", **SAVES)
    with pytest.raises(Preempted):
        first.train()
    assert find_first_update(tmp_path)[0] == 3


def test_training_with_the_largest_batch_is_preempted(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    with pytest.raises(Preempted):
        make(
            tmp_path, callbacks=[Terminate(1)], per_device_train_batch_size="largest", num_train_epochs=5, **SAVES
        ).train()


def test_marker_names_the_run(tmp_path):
    preempt(tmp_path)
    told = json.loads((tmp_path / "run" / resuming.MARKER_FILE).read_text())
    newest = read_manifest(tmp_path / "run" / "checkpoints" / "checkpoint_1")
    assert told == {"run": newest.about["run"], "training": 1, "asked": None, "update": 3}


class ModelWithBuffer(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.last = torch.nn.Linear(3, 1)
        self.register_buffer("scale", torch.full((1, 3), value).expand(4, 3))


def test_buffers_made_by_expand_are_restored(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(ModelWithBuffer(1.0))
    folder = accelerator.save_state(tmp_path / "best")
    other = ModelWithBuffer(2.0)
    load_weights(folder, other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
