"""The training arguments: spellings, answers, contradictions, and what follows from them."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.trainer.spellings import ACCEPTED, ANSWERS


def refused(**given):
    with pytest.raises(ConfigError) as error:
        TrainingArguments(**given)
    return str(error.value)


def test_the_notebooks_arguments():
    args = TrainingArguments(
        per_device_train_batch_size=1, gradient_accumulation_steps=4, gradient_checkpointing=True, output_dir="outputs",
        evaluation_strategy="no", num_train_epochs=1, log_level="error", report_to="none",
    )  # fmt: skip
    assert (args.eval_strategy, args.trackers, args.num_train_epochs) == ("no", [], 1)
    assert args.optim == "adamw_torch_fused"


@pytest.mark.parametrize(("name", "own"), sorted(ACCEPTED.items()))
def test_other_spellings_mean_an_argument_that_exists(name, own):
    assert own in {field.name for field in dataclasses.fields(TrainingArguments)}
    assert name not in {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_names_of_other_versions_are_answered(name):
    assert ANSWERS[name] in refused(**{name: 1})


def test_unknown_names_get_the_nearest():
    assert "did you mean learning_rate?" in refused(learnig_rate=1e-3)
    assert "did you mean evaluation_strategy?" in refused(evaluation_stratgy="no")
    told = refused(warmup_step=1, nonsense_without_neighbour=2)
    assert "did you mean warmup_steps?" in told
    assert "nonsense_without_neighbour is no argument" in told


def test_one_argument_by_two_names_is_refused():
    assert "two names of one argument" in refused(eval_strategy="no", evaluation_strategy="steps")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"bf16": True, "fp16": True}, "two precisions"),
        ({"optim": "adamw_hf"}, "allowed: adamw_torch_fused"),
        ({"lr_scheduler_type": "stairs"}, "allowed: linear"),
        ({"eval_strategy": "sometimes"}, "allowed: no, steps, epoch"),
        ({"per_device_train_batch_size": 0}, "1 or more"),
        ({"per_device_train_batch_size": "huge"}, "'largest'"),
        ({"gradient_accumulation_steps": 0}, "1 or more"),
        ({"logging_steps": 2.5}, "whole updates"),
        ({"save_steps": 0}, "whole updates"),
        ({"warmup_ratio": 0.1, "warmup_steps": 10}, "one warm-up"),
        ({"warmup_ratio": 1.5}, "share of all updates"),
        ({"group_by_length": True, "train_sampling_strategy": "sequential"}, "two ways to sample"),
        ({"label_smoothing_factor": 1.0}, "below 1"),
        ({"auto_find_batch_size": True, "per_device_train_batch_size": "largest"}, "both see to memory"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_num_workers"),
        ({"load_best_model_at_end": True}, "eval_strategy is 'no'"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"}, "make them equal"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 7, "save_steps": 10}, "no multiple"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"evry": 2}}, "allowed: every"),
        ({"num_train_epochs": -1}, "num_train_epochs"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_what_cannot_be_is_refused(given, word):
    assert word in refused(**given)


def test_the_best_model_goes_by_the_loss_unless_told_otherwise():
    args = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (args.wanted_metric, args.greater_is_better) == ("eval_loss", False)
    args = TrainingArguments(metric_for_best_model="accuracy")
    assert (args.wanted_metric, args.greater_is_better) == ("eval_accuracy", True)
    assert TrainingArguments().wanted_metric is None


def test_words_of_enumerations_are_taken():
    from transformers.trainer_utils import IntervalStrategy, SchedulerType

    args = TrainingArguments(eval_strategy=IntervalStrategy.STEPS, lr_scheduler_type=SchedulerType.COSINE)
    assert (args.eval_strategy, args.lr_scheduler_type) == ("steps", "cosine")


def test_shares_become_updates():
    args = TrainingArguments(logging_steps=0.1, save_steps=0.001, warmup_ratio=0.1)
    assert args.interval("logging_steps", 200) == 20
    assert args.interval("eval_steps", 200) == 20
    assert args.interval("save_steps", 200) == 1
    assert args.num_warmup_updates(205) == 21
    assert TrainingArguments(eval_steps=7).interval("eval_steps", 200) == 7


def test_checkpointing_arguments_of_other_libraries():
    given = {"use_reentrant": False, "every_n_layers": 2}
    plan = TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs=given).checkpointing_plan()
    assert plan.every == 2


def test_they_are_json_even_with_objects_in_them():
    args = TrainingArguments(output_dir="x", accelerator_config={"kwargs_handlers": [lambda: None]})
    assert json.loads(args.to_json_string())["output_dir"] == "x"


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
def test_no_unknown_name_is_ever_swallowed(name):
    known = {field.name for field in dataclasses.fields(TrainingArguments)} | set(ACCEPTED)
    if name not in known:
        assert f"{name} is no argument" in refused(**{name: 1})
