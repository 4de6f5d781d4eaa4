"""Test optimizers and schedules by name against those of transformers."""

import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.training_args import OptimizerNames

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.trainer.arguments import CHOICES
from headway.trainer.optimizer import create_optimizer, make_parameter_groups, parse_optim_args
from headway.trainer.optimizer_names import OPTIMIZERS
from headway.trainer.schedule_free import set_optimizer_mode
from headway.trainer.schedules import SCHEDULES, create_schedule


def build_bert():
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20
    )
    return transformers.BertForSequenceClassification(config)


def test_arguments_know_the_names_of_optimizers_and_schedules():
    assert CHOICES["optim"] == tuple(OPTIMIZERS)
    assert CHOICES["lr_scheduler_type"] == tuple(SCHEDULES)


def test_same_parameters_decay_as_in_transformers(tmp_path):
    model = build_bert()
    theirs = transformers.Trainer(model, transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True))
    expected = set(theirs.get_decay_parameter_names(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_parameter_groups(model, 0.1)
    assert {names[id(p)] for p in decayed["params"]} == expected
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(spared["params"]) + len(expected) == len(names)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_reduces_the_loss(name):
    pytest.importorskip(OPTIMIZERS[name].module.partition(".")[0])
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(16, 3)
    optimizer = create_optimizer(model, TrainingArguments(optim=name, learning_rate=0.05))
    assert isinstance(optimizer, OPTIMIZERS[name].load_class())

    def compute_loss():
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    set_optimizer_mode(optimizer, is_training=True)
    before = compute_loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
    assert compute_loss().item() < before


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() & {each.value for each in OptimizerNames} - {"adafactor"}))
def test_classes_and_settings_are_those_of_transformers(name, tmp_path):
    """adafactor is torch's here, and that of transformers there."""
    pytest.importorskip(OPTIMIZERS[name].module.partition(".")[0])
    given = {"optim": name, "learning_rate": 0.02, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "warmup_steps": 3}
    theirs = transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True, weight_decay=0.1, **given)
    their_class, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(theirs)
    ours = create_optimizer(nn.Linear(2, 2), TrainingArguments(weight_decay=0.1, **given))
    expected = their_class(nn.Linear(2, 2).parameters(), **settings)
    assert type(ours) is their_class
    assert {**ours.defaults, "weight_decay": 0} == {**expected.defaults, "weight_decay": 0}  # ours is set per group
    for attribute in ("is_paged", "block_size"):
        assert getattr(ours, attribute, None) == getattr(expected, attribute, None)
    assert vars(getattr(ours, "args", None) or object) == vars(
        getattr(expected, "args", None) or object
    )  # of bitsandbytes


class Embedded(nn.Module):
    """Classifier of tokens, whose embedding and matrix are large enough for 8-bit states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.up, self.head = nn.Embedding(200, 64), nn.Linear(64, 128), nn.Linear(128, 4)

    def forward(self, tokens, labels=None):
        logits = self.head(torch.tanh(self.up(self.embed(tokens).mean(1))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_8_bit_states_spare_embeddings_in_this_training_only(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(5)
    rows = [
        {"tokens": torch.randint(0, 200, (8,), generator=generator).tolist(), "labels": index % 4}
        for index in range(32)
    ]
    args = TrainingArguments(
        tmp_path, use_cpu=True, optim="adamw_8bit", learning_rate=0.01, per_device_train_batch_size=8, num_train_epochs=2,
        lr_scheduler_type="constant", max_grad_norm=0, train_sampling_strategy="sequential", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    kinds = {}

    class Recorder(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            kinds.update(
                {name: optimizer.state[p]["state1"].dtype for name, p in model.named_parameters() if "weight" in name}
            )

    trainer = Trainer(Embedded(), args, train_dataset=rows, callbacks=[Recorder()])
    trainer.train()
    assert kinds == {"embed.weight": torch.float32, "up.weight": torch.uint8, "head.weight": torch.float32}

    plain, manager = Embedded(), bitsandbytes.optim.GlobalOptimManager.get_instance()
    assert manager.index2config == {}
    after = bitsandbytes.optim.AdamW8bit(plain.parameters(), lr=0.01, weight_decay=0)
    manager.override_config(plain.embed.weight, "optim_bits", 32)
    after.check_overrides()
    manager.register_parameters(plain.parameters())
    for row in range(0, 64, 8):
        batch = rows[row % 32 : row % 32 + 8]
        after.zero_grad()
        columns = {name: torch.tensor([each[name] for each in batch]) for name in ("tokens", "labels")}
        plain(**columns)["loss"].backward()
        after.step()
    manager.index2config.clear()
    manager.pid2config.clear()
    found, expected = (torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (trainer.model, plain))
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_schedule_free_optimizer_needs_whole_warm_up_steps():
    pytest.importorskip("schedulefree")
    model = nn.Linear(2, 2)
    args = TrainingArguments(optim="schedule_free_adamw", warmup_steps=0.1)
    with pytest.raises(ConfigError, match=r"warmup_steps=0\.1 is a fraction"):
        create_optimizer(model, args)
    args = TrainingArguments(optim="schedule_free_radam", warmup_steps=0.1)  # has no warm-up of its own
    assert "warmup_steps" not in create_optimizer(model, args).defaults


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(OptionalDependencyMissing, match="pip install 'bitsandbytes'"):
        create_optimizer(nn.Linear(2, 2), TrainingArguments(optim="lion_8bit"))


def test_settings_reach_the_optimizer():
    args = TrainingArguments(
        optim="adamw_torch", adam_beta1=0.8, adam_epsilon=1e-6, learning_rate=0.5, optim_args="amsgrad=True"
    )
    optimizer = create_optimizer(nn.Linear(2, 2), args)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"], optimizer.defaults["lr"]) == (
        (0.8, 0.999),
        1e-6,
        0.5,
    )
    assert optimizer.defaults["amsgrad"] is True
    assert create_optimizer(nn.Linear(2, 2), TrainingArguments()).defaults["fused"] is True
    given = create_optimizer(nn.Linear(2, 2), args, (torch.optim.SGD, {"lr": 0.3}))
    assert isinstance(given, torch.optim.SGD)
    assert given.defaults["lr"] == 0.3


def test_unsupported_settings_are_refused():
    with pytest.raises(ConfigError, match="does not fit SGD"):
        create_optimizer(nn.Linear(2, 2), TrainingArguments(optim="sgd", optim_args="sharpness=2"))
    with pytest.raises(ConfigError, match="does not fit cosine"):
        build_schedule("cosine", lr_scheduler_kwargs={"slope": 2})
    with pytest.raises(ConfigError, match="give name=value"):
        parse_optim_args("fast")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        create_optimizer(nn.Linear(2, 2).requires_grad_(False), TrainingArguments())
    assert parse_optim_args("a=1, b=none, c=(1") == {"a": 1, "b": "none", "c": "(1"}
    assert parse_optim_args("a={[]}") == {"a": "{[]}"}  # a set of lists, which Python cannot make


def build_schedule(name, num_updates=20, **given):
    args = TrainingArguments(lr_scheduler_type=name, learning_rate=0.1, **given)
    return create_schedule(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), args, num_updates)


def list_rates(scheduler, num_updates=24):
    found = []
    for _ in range(num_updates):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


CASES = [
    ("linear", {}), ("cosine", {}), ("cosine", {"num_cycles": 1.5}), ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}), ("polynomial", {}), ("constant", {}), ("constant_with_warmup", {}),
    ("inverse_sqrt", {}), ("inverse_sqrt", {"timescale": 7}), ("cosine_with_min_lr", {"min_lr": 0.02}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3}), ("warmup_stable_decay", {"num_decay_steps": 6, "min_lr_ratio": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)])
def test_every_schedule_equals_transformers(name, settings, warmup):
    ours = build_schedule(name, lr_scheduler_kwargs=dict(settings), warmup_steps=warmup)
    theirs = transformers.get_scheduler(
        name,
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
        warmup,
        20,
        scheduler_specific_kwargs=dict(settings),
    )
    assert list_rates(ours, 19) == pytest.approx(list_rates(theirs, 19), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"), [("polynomial", {"lr_end": 0.01}), ("cosine_with_min_lr", {"min_lr": 0.02})]
)
def test_lowest_rate_does_not_depend_on_the_unused_argument(name, settings):
    """A class or an optimizer that is given to the Trainer has its own learning rate."""
    args = TrainingArguments(lr_scheduler_type=name, lr_scheduler_kwargs=settings)
    schedule = create_schedule(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), args, 20)
    assert list_rates(schedule, 21)[-1] == pytest.approx(next(iter(settings.values())))


def test_all_schedules_are_compared():
    assert {name for name, _ in CASES} | {"reduce_lr_on_plateau"} == set(SCHEDULES)


def test_plateau_schedule_follows_its_metric():
    given = {"metric_for_best_model": "accuracy", "eval_strategy": "epoch"}
    plateau = build_schedule("reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}, **given)
    assert plateau.mode == "max"
    for value in (0.5, 0.4):
        plateau.step(value)
    assert plateau.get_last_lr() == [pytest.approx(0.01)]
