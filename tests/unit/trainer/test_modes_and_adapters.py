"""Test schedule-free optimizers, saved adapters, the last evaluation, and `accelerator_config` with transformers' names."""

import json
from dataclasses import dataclass

import pytest
import torch

from headway import DataLoaderConfiguration, Trainer, TrainingArguments
from headway.errors import ConfigError
from tests.unit.trainer.models import Net, Points, arguments, cross_entropy, llama, weights

PLAN = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2, "lr_scheduler_type": "constant",
        "max_grad_norm": 0, "train_sampling_strategy": "sequential"}  # fmt: skip


def train_schedule_free(folder, has_own=True, resume=None, **given):
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    model, kind, settings = Net(), schedulefree.AdamWScheduleFree, {"lr": 0.05}
    chosen = {"optimizer_cls_and_kwargs": (kind, settings)}
    if has_own:
        chosen = {"optimizers": (kind(model.parameters(), **settings), None)}
    args = arguments(folder, **{**PLAN, **given})
    trainer = Trainer(
        model, args, train_dataset=Points(20), eval_dataset=Points(20), loss_function=cross_entropy, **chosen
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_by_hand(num_epochs):
    """Return the losses of the evaluations and the evaluated weights, from a loop in plain PyTorch."""
    import schedulefree

    model, data, losses = Net(), Points(20), []
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    for _ in range(num_epochs):
        optimizer.train()
        for x, y in zip(data.x.split(4), data.y.split(4)):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(cross_entropy(model(data.x), data.y).item())
    return losses, weights(model)


@pytest.mark.parametrize(
    ("kind", "is_warned"), [("linear", True), ("constant", False), ("constant_with_warmup", False)]
)
def test_schedule_free_optimizer_with_a_schedule_is_warned_of(tmp_path, caplog, kind, is_warned):
    train_schedule_free(tmp_path, lr_scheduler_type=kind, num_train_epochs=1)
    assert ("AdamWScheduleFree is schedule-free" in caplog.text) == is_warned


@pytest.mark.parametrize("has_own", [True, False])
def test_schedule_free_optimizer_is_evaluated_and_saved_in_evaluation_mode(tmp_path, has_own):
    trainer = train_schedule_free(tmp_path, has_own)
    losses, expected = train_by_hand(2)
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weights(trainer.model), expected)
    trainer.save_model(tmp_path / "saved")
    safetensors = pytest.importorskip("safetensors.torch")
    model = Net()
    model.load_state_dict(safetensors.load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(weights(model), weights(trainer.model))
    assert trainer.evaluate()["eval_loss"] == found[-1]


def test_schedule_free_run_resumes_exactly_and_loads_the_best_evaluated_weights(tmp_path):
    whole = train_schedule_free(tmp_path / "whole", load_best_model_at_end=True, greater_is_better=True)
    found = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    assert found[0] > found[1]
    assert whole.evaluate()["eval_loss"] == found[0]  # the largest loss is the "best" one
    end = train_schedule_free(tmp_path / "end")
    folder = tmp_path / "end" / "run" / "checkpoints" / "checkpoint_0"
    resumed = train_schedule_free(tmp_path / "resumed", resume=folder)
    assert torch.equal(weights(end.model), weights(resumed.model))


def test_schedule_free_run_without_evaluations_ends_with_evaluation_weights(tmp_path):
    trainer = train_schedule_free(tmp_path, eval_strategy="no", save_strategy="no")
    torch.testing.assert_close(weights(trainer.model), train_by_hand(2)[1])


def test_saved_adapters_are_opened_by_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(8)]
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(model, arguments(tmp_path, learning_rate=0.1), train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert names.isdisjoint({"config.json", "model.safetensors", "generation_config.json"})
    opened = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    tokens = torch.arange(8)[None]
    assert torch.equal(opened.eval()(tokens).logits, model.eval()(tokens).logits)
    assert not torch.equal(opened(tokens).logits, llama().eval()(tokens).logits)


@pytest.mark.parametrize(("delay", "expected"), [(0, [2, 4, 5]), (6, [])])
def test_last_update_is_evaluated(tmp_path, delay, expected):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, eval_delay=delay)
    trainer = Trainer(Net(), args, train_dataset=Points(20), eval_dataset=Points(8), loss_function=cross_entropy)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == expected


@dataclass
class ForeignConfig:
    """Stand-in for transformers' `AcceleratorConfig`, with its defaults."""

    split_batches: bool = False
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict | None = None
    use_configured_state: bool = False


@pytest.mark.parametrize(
    "config",
    [
        {"split_batches": True},
        {"even_batches": False},
        {"dispatch_batches": True},
        {"use_seedable_sampler": True},
        {"non_blocking": True},
        {"data_seed": 3},
        {"use_configured_state": True},
        {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    ],
)
def test_names_of_accelerator_config(tmp_path, config):
    trainer = Trainer(Net(), arguments(tmp_path, accelerator_config=config), loss_function=cross_entropy)
    loading = trainer.accelerator.dataloader_config
    for name, value in config.items():
        if hasattr(loading, name):
            assert getattr(loading, name) == value
    assert not loading.even_batches


def test_configuration_of_loaders_repeats_no_rows(tmp_path):
    config = DataLoaderConfiguration(data_seed=3)  # even_batches=True by default
    trainer = Trainer(
        Net(), arguments(tmp_path, accelerator_config={"dataloader_config": config}), loss_function=cross_entropy
    )
    loading = trainer.accelerator.dataloader_config
    assert (loading.even_batches, loading.data_seed) == (False, 3)


def test_accelerator_config_accepts_dict_json_file_and_object(tmp_path):
    options = {"gradient_accumulation_kwargs": {"num_steps": 3}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(options))
    for given in (options, str(path), json.dumps(options), ForeignConfig(**options)):
        args = arguments(tmp_path, accelerator_config=given)
        assert args.gradient_accumulation_steps == 3
        assert Trainer(Net(), args, loss_function=cross_entropy).accelerator.gradient_accumulation_steps == 3
    assert arguments(tmp_path, accelerator_config=ForeignConfig()).accelerator_config == {}
    assert options == {"gradient_accumulation_kwargs": {"num_steps": 3}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}, "gradient_accumulation_steps": 4},
         "give gradient_accumulation_steps alone"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"adjust_scheduler": True}}}, "allowed: num_steps"),
        ({"accelerator_config": {"split_batches": True, "dataloader_config": object()}}, "give one of them"),
        ({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": "largest"}, "rows per process"),
        ({"accelerator_config": "missing.json"}, "cannot be read"),
        ({"accelerator_config": "[1]"}, "cannot be read"),
        ({"accelerator_config": 3}, "give a dict"),
        ({"accelerator_config": {"even_batches": True}}, "count them twice|needs no repeated rows"),
        ({"full_determinism": True}, r"help\(headway.TrainingArguments\) list the supported names"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(tmp_path, **given)
