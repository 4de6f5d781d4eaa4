"""Test names of transformers' Trainer: supported ones, errors for others, and overrides without effect."""

import inspect
import json
import re

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, SequentialSampler

from headway import Trainer
from headway.errors import ConfigError, NotServed
from tests.house.tree_of_source import ROOT
from tests.unit.trainer.models import Points, WithLoss, arguments, make, weights

THEIRS = [name for name in dir(transformers.Trainer) if not hasattr(object, name)]
OURS = {name for each in Trainer.__mro__[:-1] for name in vars(each)}


@pytest.mark.parametrize("name", ["hyperparameter_search", "init_hf_repo", "get_batch_samples", "no_such_thing"])
def test_missing_name_names_its_replacement(name, tmp_path):
    trainer = make(tmp_path)
    for each in (trainer, trainer.args):
        with pytest.raises(NotServed, match=f"{name} is not served: .*`headway launch --as accelerate`"):
            getattr(each, name)
        assert not hasattr(each, name)  # scripts call hasattr first


@pytest.mark.parametrize("name", [name for name in THEIRS if name in OURS and callable(getattr(Trainer, name))])
def test_every_argument_of_a_supported_method_is_accepted(name):
    if name in ("create_accelerator", "__init__"):
        return
    theirs, ours = (inspect.signature(getattr(each, name)).parameters for each in (transformers.Trainer, Trainer))
    takes_any = {parameter.kind for parameter in ours.values()} & {inspect.Parameter.VAR_KEYWORD}
    assert takes_any or list(ours)[: len(theirs)] == list(theirs)


def test_private_methods_with_names_of_transformers_mean_the_same():
    """A private method of Headway's Trainer with another meaning would be overridden by mistake."""
    shared = {name for name in THEIRS if name.startswith("_") and not name.startswith("__")} & OURS
    assert shared == {"_get_eval_sampler", "_get_train_sampler", "_prepare_inputs", "_save"}


ROOTS = "inner run save load maybe wrap get_dataloader get_num get_output clip prepare_for finalize determine hp finish push"
NEVER_CALLED = [
    name for name in THEIRS
    if (name.startswith(tuple(f"_{root}" for root in ROOTS.split())) and name not in OURS and "tpu" not in name)
    or name in ("init_hf_repo", "get_batch_samples", "set_initial_training_values")
]  # fmt: skip


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_override_without_effect_is_refused(name, tmp_path):
    kind = type("Own", (Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=f"Own overrides methods that Headway never calls: {name}; use callbacks"):
        kind(WithLoss(), arguments(tmp_path))


class OverridingTrainer(Trainer):
    """Trainer with overrides as scripts contain them."""

    def __init__(self, *args, **kwargs):
        self.called = []
        super().__init__(*args, **kwargs)

    def create_optimizer_and_scheduler(self, num_training_steps):
        self.called.append(num_training_steps)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        super().create_optimizer_and_scheduler(num_training_steps)

    def get_decay_parameter_names(self, model):
        return []

    def _get_train_sampler(self, train_dataset=None):
        self.called.append("sampler")
        return SequentialSampler(train_dataset)

    def _prepare_inputs(self, inputs):
        self.called.append("inputs")
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self.called.append(description)
        output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        return output._replace(metrics={f"{metric_key_prefix}_own": float(output.predictions.sum())})

    def _save(self, output_dir=None, state_dict=None):
        self.called.append("save")
        super()._save(output_dir, state_dict)


class Rows(Points):
    def __getitem__(self, index):
        return {"x": self.x[index], "labels": int(self.y[index])}


def test_overrides_are_called(tmp_path):
    trainer = OverridingTrainer(
        WithLoss(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=Rows(8), eval_dataset=Rows(6)
    )
    trainer.train()
    assert set(trainer.called) == {2, "sampler", "inputs", "Evaluation"}
    assert "eval_own" in trainer.state.log_history[2]
    assert trainer.evaluate()["eval_own"] == trainer.state.log_history[2]["eval_own"]
    assert len(trainer.predict(Rows(6)).predictions) == 6
    trainer.save_model(tmp_path / "saved")
    assert "save" in trainer.called
    assert (tmp_path / "saved" / "model.safetensors").exists()


OVERRIDDEN = [
    "compute_loss", "training_step", "prediction_step", "evaluate", "evaluation_loop", "predict", "log", "save_model",
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler", "_get_eval_sampler",
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names", "_prepare_inputs",
    "create_accelerator", "check_evaluation",
]  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_each_method_alone_may_be_overridden(name, tmp_path):
    """Each method alone is overridden by one that calls the base class."""
    called = []

    def override(self, *args, **kwargs):
        called.append(name)
        return getattr(Trainer, name)(self, *args, **kwargs)

    kind = type("Own", (Trainer,), {name: override})
    trainer = kind(WithLoss(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=Rows(8), eval_dataset=Rows(6))
    assert trainer.train().global_step == 2
    trainer.predict(Rows(3))
    trainer.save_model(tmp_path / "saved")
    assert called
    assert [sorted(entry) for entry in trainer.state.log_history] == [
        ["epoch", "grad_norm", "learning_rate", "loss", "step"]] * 2 + [
        ["epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "step"],
        ["epoch", "step", "train_loss", "train_memory_peak", "train_runtime", "train_samples_per_second",
         "train_steps_per_second"]]  # fmt: skip


def test_overrides_in_the_documentation_are_tested():
    row = next(
        line for line in (ROOT / "docs" / "trainer.md").read_text().splitlines() if "| may be overridden |" in line
    )
    assert set(re.findall(r"`(\w+)`", row)) - {"_save"} <= set(OVERRIDDEN)


def test_attributes_may_be_replaced_between_trainings(tmp_path):
    trainer = Trainer(WithLoss(), arguments(tmp_path), train_dataset=Rows(8))
    trainer.train()
    trainer.train_dataset, trainer.eval_dataset = Rows(16), Rows(5)
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.label_ids)}
    assert trainer.train().global_step == 4
    assert trainer.evaluate()["eval_rows"] == 5
    trainer.state.best_metric, state = 0.5, trainer.state
    trainer.state, trainer.control = state, trainer.control
    assert trainer.state is state


def test_evaluation_between_two_batches_does_not_change_the_predictions(tmp_path):
    """Each evaluation knows the rows of its own batch, so four values for two rows are not one per row."""
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    trainer = Trainer(WithLoss(), args, eval_dataset=Rows(3))
    shapes = []
    for predictions, _ in trainer.iterate_predictions(Rows(6)):
        shapes.append(tuple(predictions.shape))
        trainer.evaluate()
    assert shapes == [(2, 2)] * 3


def test_evaluation_loop_returns_what_evaluate_reports(tmp_path):
    trainer = Trainer(
        WithLoss(), arguments(tmp_path), eval_dataset=Rows(7), compute_metrics=lambda p: {"rows": len(p[0])}
    )
    found = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert (len(found.predictions), len(found.label_ids), found.num_samples) == (7, 7, 7)
    assert found.metrics["eval_rows"] == 7
    assert found.metrics["eval_loss"] == trainer.evaluate()["eval_loss"]
    old = trainer.prediction_loop(
        trainer.get_eval_dataloader(), "Prediction", prediction_loss_only=True, metric_key_prefix="x"
    )
    assert (old.predictions, "x_loss" in old.metrics) == (None, True)


def test_attributes_of_transformers_are_available(tmp_path):
    trainer = Trainer(
        WithLoss(), arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=Rows(8), tokenizer="words"
    )
    assert (trainer.is_world_process_zero(), trainer.is_local_process_zero()) == (True, True)
    assert trainer.get_num_trainable_parameters() == len(weights(trainer.model))
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    assert trainer.num_examples(DataLoader(Rows(5), batch_size=2)) == 5
    assert (trainer.tokenizer, trainer.model_wrapped) == ("words", trainer.model)
    assert trainer.callback_handler is trainer.callbacks
    assert "DefaultFlowCallback" in [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert (trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled) == (False, False)
    with pytest.raises(ConfigError, match="no optimizer before"):
        trainer.get_learning_rates()
    with pytest.raises(ConfigError, match="Optuna"):
        trainer.train(trial={})


def test_files_are_written(tmp_path):
    trainer = Trainer(
        WithLoss(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=Rows(8), eval_dataset=Rows(4)
    )
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    trainer.save_state()
    trainer.create_model_card(language="en", dataset=None)
    folder = tmp_path / "run"
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], state["log_history"]) == (2, trainer.state.log_history)
    everything = json.loads((folder / "all_results.json").read_text())
    assert everything == {**metrics, "eval_loss": 1.0}
    card = (folder / "README.md").read_text()
    assert card.startswith("# run\n")
    assert "- language: en" in card
    assert "- eval_loss: " in card
    assert "dataset" not in card
