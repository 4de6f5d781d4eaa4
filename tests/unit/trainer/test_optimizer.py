"""Test optimizers and schedules by name against those of transformers."""

import pytest
import torch
import transformers
from torch import nn

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.trainer.arguments import CHOICES
from headway.trainer.optimizer import OPTIMIZERS, create_optimizer, make_parameter_groups, parse_optim_args
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
    wanted = set(theirs.get_decay_parameter_names(model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = make_parameter_groups(model, 0.1)
    assert {names[id(p)] for p in decayed["params"]} == wanted
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(spared["params"]) + len(wanted) == len(names)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_reduces_the_loss(name):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(16, 3)
    optimizer = create_optimizer(model, TrainingArguments(optim=name, learning_rate=0.05))
    assert isinstance(optimizer, OPTIMIZERS[name][0])

    def compute_loss():
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    before = compute_loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
    assert compute_loss().item() < before


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
