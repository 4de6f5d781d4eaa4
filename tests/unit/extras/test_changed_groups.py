"""Test checkpoints loaded into other parameter groups, compared with plain PyTorch whose states are moved by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from headway import Accelerator
from headway.errors import CheckpointError, ConfigError

Groups = Callable[[nn.Module], Any]
BEFORE, AFTER = 4, 5
"""Updates before the checkpoint, and after it."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def compute_loss(model: nn.Module, number: int) -> torch.Tensor:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (model(rows) - rows[:, :2].sin()).square().mean()


def group_all(model: nn.Module) -> Any:
    return list(model.parameters())


def group_by_decay(model: nn.Module) -> Any:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


def group_by_decay_reversed(model: nn.Module) -> Any:
    return [{**group, "params": group["params"][::-1]} for group in reversed(group_by_decay(model))]


def group_by_layer(model: nn.Module) -> Any:
    return [{"params": list(model[i].parameters()), "lr": 0.02 * 0.5 ** (4 - i)} for i in (0, 2, 4)]  # type: ignore[index]


def group_last_layers(model: nn.Module) -> Any:
    return [{"params": list(model[i].parameters())} for i in (2, 4)]  # type: ignore[index]


def group_with_first_layer(model: nn.Module) -> Any:
    return [*group_last_layers(model), {"params": list(model[0].parameters()), "lr": 0.005}]  # type: ignore[index]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6) * 0.9**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "steps": lambda optimizer: StepLR(optimizer, 3, 0.5),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)], [3]
    ),
}


def step_plain(model: nn.Module, optimizer: Optimizer, schedule: Any, number: int) -> float:
    loss = compute_loss(model, number)
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    model.zero_grad()  # a checkpoint has no gradients, even of parameters that the optimizer does not have
    return loss.item()


def run_plain(
    before: Groups, after: Groups, make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any] | None
) -> tuple[list[float], list[float]]:
    """Change the groups in mid-run: a new optimizer gets each parameter's state, and a new schedule is advanced.

    Returns:
        Losses after the change, and the learning rates right after it.
    """
    model = build()
    optimizer = make(before(model))
    ticker = schedule(optimizer) if schedule is not None else None
    for number in range(BEFORE):
        step_plain(model, optimizer, ticker, number)
    changed = make(after(model))
    for group in changed.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                changed.state[p] = optimizer.state[p]
    if schedule is not None:
        ticker = schedule(changed)
        for _ in range(BEFORE):
            ticker.step()
    rates = [group["lr"] for group in changed.param_groups]
    return [step_plain(model, changed, ticker, BEFORE + number) for number in range(AFTER)], rates


def run_prepared(
    groups: Groups,
    make: Callable[[Any], Optimizer],
    schedule: Callable[[Optimizer], Any] | None,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> tuple[list[float], list[float], list[str], Any]:
    """Run until the checkpoint, or from the checkpoint to the end.

    Returns:
        Losses, learning rates at the start, differences that the load has reported, and the prepared optimizer.
    """
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = make(groups(model))
    made = [] if schedule is None else [schedule(optimizer)]
    model, prepared, *schedules = accelerator.prepare(model, optimizer, *made)
    differences = [] if load is None else accelerator.load_state(load, **options).differences
    rates = [float(group["lr"]) for group in prepared.param_groups]
    losses = []
    for number in range(BEFORE) if load is None else range(BEFORE, BEFORE + AFTER):
        with accelerator.accumulate(model):
            loss = compute_loss(model, number)
            accelerator.backward(loss)
            prepared.step()
            for each in schedules:
                each.step()
            prepared.zero_grad()
        losses.append(loss.item())
    if save is not None:
        accelerator.save_state(save)
    accelerator.free_memory()
    return losses, rates, differences, prepared


def make_adamw(groups: Any) -> Optimizer:
    return AdamW(groups, lr=0.02, weight_decay=0.1)


# ---------------------------------------------------------------- groups in another order


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_groups_in_another_order_get_their_own_options(schedule: str | None, tmp_path: Path) -> None:
    made = None if schedule is None else SCHEDULES[schedule]
    run_prepared(group_by_decay, make_adamw, made, save=tmp_path / "a")
    losses, rates, differences, _ = run_prepared(group_by_decay_reversed, make_adamw, made, load=tmp_path / "a")
    expected, expected_rates = run_plain(group_by_decay, group_by_decay, make_adamw, made)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert rates == pytest.approx(expected_rates[::-1], rel=1e-12)
    (line,) = differences
    assert line.startswith("optimizer 0 (AdamW): its groups have another order")


def test_another_order_is_a_difference_that_strict_refuses(tmp_path: Path) -> None:
    run_prepared(group_by_decay, make_adamw, None, save=tmp_path / "a")
    with pytest.raises(CheckpointError, match="another order; their options follow the names"):
        run_prepared(group_by_decay_reversed, make_adamw, None, load=tmp_path / "a", strict=True)


def test_param_names_follow_the_order_of_the_parameters(tmp_path: Path) -> None:
    run_prepared(lambda model: list(model.named_parameters()), make_adamw, None, save=tmp_path / "a")
    *_, optimizer = run_prepared(
        lambda model: list(model.named_parameters())[::-1], make_adamw, None, load=tmp_path / "a"
    )
    names = [name for name, _ in build().named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names[::-1]


# ---------------------------------------------------------------- other groups

CHANGES: dict[str, tuple[Groups, Groups]] = {
    "split": (group_all, group_by_decay),
    "merged": (group_by_decay, group_all),
    "by layer": (group_by_decay, group_by_layer),
    "a group added": (group_last_layers, group_with_first_layer),
    "a group removed": (group_with_first_layer, group_last_layers),
}


@pytest.mark.parametrize("schedule", [None, "lambda"])
@pytest.mark.parametrize("change", CHANGES)
def test_each_parameter_keeps_its_state(change: str, schedule: str | None, tmp_path: Path) -> None:
    made = None if schedule is None else SCHEDULES[schedule]
    before, after = CHANGES[change]
    run_prepared(before, make_adamw, made, save=tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"changed='groups'"):
        run_prepared(after, make_adamw, made, load=tmp_path / "a")
    losses, rates, differences, _ = run_prepared(after, make_adamw, made, load=tmp_path / "a", changed="groups")
    expected, expected_rates = run_plain(before, after, make_adamw, made)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert rates == pytest.approx(expected_rates, rel=1e-12)
    assert differences


@pytest.mark.parametrize("schedule", [each for each in SCHEDULES if each != "lambda"])
def test_schedules_continue_in_other_groups(schedule: str, tmp_path: Path) -> None:
    run_prepared(group_all, make_adamw, SCHEDULES[schedule], save=tmp_path / "a")
    losses, rates, _, _ = run_prepared(
        group_by_decay, make_adamw, SCHEDULES[schedule], load=tmp_path / "a", changed="groups"
    )
    expected, expected_rates = run_plain(group_all, group_by_decay, make_adamw, SCHEDULES[schedule])
    assert rates == pytest.approx(expected_rates, rel=1e-12)
    assert losses == pytest.approx(expected, rel=1e-12)


def test_one_cycle_schedule_continues_in_other_groups(tmp_path: Path) -> None:
    """OneCycleLR sets the learning rate from options of the group, and takes a list for several groups."""

    def make_one_cycle(optimizer: Optimizer) -> Any:
        return OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=20)

    def make_sgd(groups: Any) -> Optimizer:
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)

    run_prepared(group_all, make_sgd, make_one_cycle, save=tmp_path / "a")
    _, rates, _, _ = run_prepared(group_by_decay, make_sgd, make_one_cycle, load=tmp_path / "a", changed="groups")
    _, expected = run_plain(group_all, group_by_decay, make_sgd, make_one_cycle)
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "NAdam"])
def test_new_parameters_keep_the_initial_state_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """Adagrad creates the state of each parameter when it is constructed, and fails without it."""

    def make_optimizer(groups: Any) -> Optimizer:
        return getattr(torch.optim, name)(groups, lr=0.01)  # type: ignore[no-any-return]

    run_prepared(group_last_layers, make_optimizer, None, save=tmp_path / "a")
    losses, _, differences, _ = run_prepared(
        group_with_first_layer, make_optimizer, None, load=tmp_path / "a", changed="groups"
    )
    expected, _ = run_plain(group_last_layers, group_with_first_layer, make_optimizer, None)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert f"optimizer 0 ({name}): 0.weight, 0.bias begin without saved state" in differences


class Counting(torch.optim.SGD):
    """Optimizer that counts its steps in each group, like schedule-free optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.defaults["k"] = 0
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)


def test_counters_of_an_optimizer_continue(tmp_path: Path) -> None:
    run_prepared(group_all, Counting, None, save=tmp_path / "a")
    *_, optimizer = run_prepared(group_by_decay, Counting, None, load=tmp_path / "a", changed="groups")
    assert [group["k"] for group in optimizer.param_groups] == [BEFORE + AFTER] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("split", ["their number is 2 instead of 1", "grouped differently: 0.weight, 2.weight, 4.weight and 3 more"]),
        ("a group added", ["their number is 3 instead of 2", "only in this run: 0.bias, 0.weight"]),
        ("a group removed", ["only in the checkpoint: 0.bias, 0.weight", "call add_param_group() before the load"]),
    ],
)
def test_error_names_the_parameters(change: str, parts: list[str], tmp_path: Path) -> None:
    before, after = CHANGES[change]
    run_prepared(before, make_adamw, None, save=tmp_path / "a")
    for changed in ((), None, "data"):
        with pytest.raises(CheckpointError) as error:
            run_prepared(after, make_adamw, None, load=tmp_path / "a", changed=changed)
        assert all(part in str(error.value) for part in parts), str(error.value)


def test_parameter_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for attempt, split in enumerate((2, 4)):
        model = build()
        parameters = list(model.parameters())
        model, *optimizers = accelerator.prepare(model, make_adamw(parameters[:split]), make_adamw(parameters[split:]))
        if attempt:
            with pytest.raises(CheckpointError, match=r"2\.weight was in optimizer 1"):
                accelerator.load_state(tmp_path / "a", changed="groups")
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(model, 0))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(tmp_path / "a")
        accelerator.free_memory()


def test_unknown_value_of_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'data', 'schedule', 'groups'"):
        Accelerator(cpu=True).load_state(tmp_path, changed="group")
