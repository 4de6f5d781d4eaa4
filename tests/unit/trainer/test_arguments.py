"""Test the training arguments: alternative names, checks, contradictions and derived values."""

import dataclasses
import inspect
import json
from typing import get_type_hints

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.trainer.argument_checks import RANGES
from headway.trainer.argument_names import ALTERNATIVE_NAMES, UNSUPPORTED_NAMES


def catch_refusal(**given):
    with pytest.raises(ConfigError) as error:
        TrainingArguments(**given)
    return str(error.value)


def test_arguments_of_a_published_notebook_are_accepted():
    args = TrainingArguments(
        per_device_train_batch_size=1, gradient_accumulation_steps=4, gradient_checkpointing=True, output_dir="outputs",
        evaluation_strategy="no", num_train_epochs=1, log_level="error", report_to="none",
    )  # fmt: skip
    assert (args.eval_strategy, args.trackers, args.num_train_epochs) == ("no", [], 1)
    assert args.optim == "adamw_torch_fused"


@pytest.mark.parametrize(("name", "own"), sorted(ALTERNATIVE_NAMES.items()))
def test_alternative_names_mean_an_existing_argument(name, own):
    assert own in {field.name for field in dataclasses.fields(TrainingArguments)}
    assert name not in {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_NAMES))
def test_arguments_of_transformers_that_are_not_accepted(name):
    for value in ("asked for", 7):
        told = catch_refusal(**{name: value})
        assert f"{name} is not an argument" in told
        assert "`headway launch --as accelerate`" in told or "; " not in told


@pytest.mark.parametrize(
    ("name", "value", "strategy"),
    [("fsdp", "full_shard", "fsdp"), ("fsdp_config", {"version": 2}, "fsdp"), ("deepspeed", "ds.json", "zero2")],
)
def test_layouts_of_transformers_name_the_launch_option(name, value, strategy):
    assert f"`headway launch --strategy {strategy}`" in catch_refusal(**{name: value})


def test_arguments_that_would_change_results_or_files_are_refused():
    for asked in ({"average_tokens_across_devices": False}, {"save_safetensors": False}, {"eval_do_concat_batches": False},
                  {"save_only_model": True}, {"bf16_full_eval": True}):  # fmt: skip
        assert "is not an argument" in catch_refusal(**asked)


def test_every_argument_of_transformers_is_known():
    """Each is accepted with transformers' default, so that a script may pass all of them."""
    import transformers

    own = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(transformers.TrainingArguments):
        assert field.name in own or field.name in ALTERNATIVE_NAMES or field.name in UNSUPPORTED_NAMES, field.name
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name != "dataloader_prefetch_factor":
            TrainingArguments(**{field.name: default})


def test_arguments_report_rank_world_size_and_device():
    args = TrainingArguments(use_cpu=True, do_train=True)
    assert (args.world_size, args.process_index, args.local_process_index, args.local_rank) == (1, 0, 0, -1)
    assert (args.n_gpu, args.device.type, args.should_save, args.do_train, args.do_eval) == (
        0,
        "cpu",
        True,
        True,
        False,
    )
    assert (args.train_batch_size, args.get_process_log_level()) == (8, 20)
    with args.main_process_first(desc="tokenizing", timeout=7200):
        pass
    with pytest.raises(ConfigError, match="must be a time in seconds"), args.main_process_first(timeout=-1):
        pytest.fail("the block ran")


def test_all_methods_of_the_arguments_are_implemented():
    for kind in TrainingArguments.__mro__[:-1]:
        assert "NotImplementedError" not in inspect.getsource(kind)
    args = TrainingArguments(warmup_ratio=0.1, output_dir="here")
    assert args.get_warmup_steps(50) == 5
    assert args.to_sanitized_dict()["output_dir"] == "here"
    assert args.to_sanitized_dict()["report_to"] == "none"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainingArguments)])
def test_type_of_every_argument_is_checked(name):
    assert f"{name}=" in catch_refusal(**{name: object()})
    kinds = str(get_type_hints(TrainingArguments)[name])
    if "bool" in kinds and "str" not in kinds:
        assert "True or False" in catch_refusal(**{name: "yes"})
        assert "True or False" in catch_refusal(**{name: 2})
    if ("int" in kinds or "float" in kinds) and "str" not in kinds:
        assert "number" in catch_refusal(**{name: "7"})
        assert "number" in catch_refusal(**{name: True})
        assert f"{name}=nan" in catch_refusal(**{name: float("nan")})
    if "int" in kinds and "float" not in kinds and "str" not in kinds:
        assert "number" in catch_refusal(**{name: 2.5})
    if "None" not in kinds and name not in ("output_dir", "gradient_checkpointing"):
        assert f"{name}=" in catch_refusal(**{name: None})


@pytest.mark.parametrize("name", sorted(RANGES))
def test_range_of_every_number_is_checked(name):
    limits = RANGES[name]
    told = catch_refusal(**{name: -7})
    assert f"{limits.minimum:g} or more" in told
    if limits.upper_bound < 2:
        assert "below 1" in catch_refusal(**{name: 1})


def test_command_line_is_parsed(tmp_path):
    """transformers' parser makes an option of each field, and overwrites the types of fields."""
    from transformers import HfArgumentParser

    line = ["--output_dir", str(tmp_path), "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--bf16",
            "--max_steps", "5", "--do_train", "--resume_from_checkpoint", "True", "--report_to", "tensorboard",
            "--label_names", "a", "b"]  # fmt: skip
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    found = (args.per_device_train_batch_size, args.learning_rate, args.bf16, args.max_steps, args.do_train)
    assert found == (4, 1e-3, True, 5, True)
    assert (args.resume_from_checkpoint, args.trackers, args.label_names) == (True, ["tensorboard"], ["a", "b"])
    assert TrainingArguments(save_total_limit=None, disable_tqdm=None).save_total_limit is None
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--resume_from_checkpoint", "folder"])
    assert str(args.resume_from_checkpoint) == "folder"


def test_equivalent_values_are_accepted():
    args = TrainingArguments(max_steps=-1, bf16=0, fp16=numpy.bool_(False), num_train_epochs=numpy.int64(2), save_total_limit=2.0,
                             resume_from_checkpoint="True", gradient_checkpointing=None, push_to_hub=False, local_rank=-1,
                             learning_rate=numpy.float32(0.5))  # fmt: skip
    assert (args.max_steps, args.num_train_epochs, args.save_total_limit, args.learning_rate) == (-1, 2, 2, 0.5)
    found = (args.bf16, args.fp16, args.gradient_checkpointing, args.resume_from_checkpoint)
    assert found == (False, False, False, True)
    assert all(type(value) is bool for value in found)
    assert type(args.save_total_limit) is int
    assert "-1 and 0: as many as num_train_epochs requires" in catch_refusal(max_steps=-7)
    assert "bf16='yes'; give True or False" in catch_refusal(bf16="yes")


def test_unknown_name_gets_the_nearest_one():
    assert "did you mean learning_rate?" in catch_refusal(learnig_rate=1e-3)
    assert "did you mean evaluation_strategy?" in catch_refusal(evaluation_stratgy="no")
    told = catch_refusal(warmup_step=1, nonsense_without_neighbor=2)
    assert "did you mean warmup_steps?" in told
    assert "nonsense_without_neighbor is not an argument" in told


def test_argument_given_by_two_names_is_refused():
    assert "two names of one argument" in catch_refusal(eval_strategy="no", evaluation_strategy="steps")


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
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs evaluations"),
        ({"group_by_length": True, "train_sampling_strategy": "sequential"}, "contradicts train_sampling_strategy"),
        ({"label_smoothing_factor": 1.0}, "below 1"),
        ({"auto_find_batch_size": True, "per_device_train_batch_size": "largest"}, "both manage memory"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_num_workers"),
        ({"load_best_model_at_end": True}, "eval_strategy is 'no'"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"}, "make them equal"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 7, "save_steps": 10}, "not a multiple"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.3, "save_steps": 3}, "both in one form"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.3, "save_steps": 10, "max_steps": 20},
            "save_steps=10 is not a multiple of eval_steps=6",
        ),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"evry": 2}}, "allowed: every"),
        ({"num_train_epochs": -1}, "num_train_epochs"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_invalid_values_are_refused(given, word):
    assert word in catch_refusal(**given)


def test_shares_and_numbers_of_updates_are_compared_if_the_length_is_known():
    steps = {"eval_strategy": "steps", "eval_steps": 0.25, "save_steps": 10, "max_steps": 20}
    assert TrainingArguments(load_best_model_at_end=True, **steps).get_interval("eval_steps", 20) == 5


def test_best_model_is_chosen_by_loss_by_default():
    args = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (args.wanted_metric, args.greater_is_better) == ("eval_loss", False)
    args = TrainingArguments(metric_for_best_model="accuracy")
    assert (args.wanted_metric, args.greater_is_better) == ("eval_accuracy", True)
    assert TrainingArguments().wanted_metric is None


def test_enumerations_are_accepted_by_their_values():
    from transformers.trainer_utils import IntervalStrategy, SchedulerType

    args = TrainingArguments(eval_strategy=IntervalStrategy.STEPS, lr_scheduler_type=SchedulerType.COSINE)
    assert (args.eval_strategy, args.lr_scheduler_type) == ("steps", "cosine")


def test_fractions_become_numbers_of_updates():
    args = TrainingArguments(logging_steps=0.1, save_steps=0.001, warmup_ratio=0.1)
    assert args.get_interval("logging_steps", 200) == 20
    assert args.get_interval("eval_steps", 200) == 20
    assert args.get_interval("save_steps", 200) == 1
    assert args.get_warmup_steps(205) == 21
    assert TrainingArguments(eval_steps=7).get_interval("eval_steps", 200) == 7


def test_checkpointing_arguments_of_other_libraries_are_translated():
    given = {"use_reentrant": False, "every_n_layers": 2}
    plan = TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs=given).get_checkpointing_plan()
    assert plan.every == 2


def test_arguments_with_objects_are_encoded_as_json():
    args = TrainingArguments(output_dir="x", accelerator_config={"kwargs_handlers": [lambda: None]})
    assert json.loads(args.to_json_string())["output_dir"] == "x"


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
def test_unknown_name_is_never_ignored(name):
    known = {field.name for field in dataclasses.fields(TrainingArguments)} | set(ALTERNATIVE_NAMES)
    if name not in known:
        assert f"{name} is not an argument" in catch_refusal(**{name: 1})
