"""Two processes whose replicas, hyperparameters or batches diverge: an error names the difference and rank, or a warning appears.

Differences that are allowed must cause neither: local SGD, unreduced gradients, frozen parts, buffers and rounding. All
scenarios share one pair of processes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import Accelerator, DistributedDataParallelKwargs, LocalSGD
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.errors import StateError
from tests.distributed.layouts import GPT, build_seeded, make_tokens, mean_square
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import (
    are_equal_on_ranks,
    assert_warned_once,
    capture_warnings,
    flatten_weights,
    make_data,
    make_parts,
    run_scenarios,
)

Batch = tuple[torch.Tensor, torch.Tensor]


def prepare_training(kind: type[Accelerator] = Accelerator, **options: Any) -> tuple[Any, ...]:
    accelerator = kind(cpu=True, **options)
    return accelerator, *accelerator.prepare(*make_parts())


def update(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Batch | None = None) -> None:
    """Make one update from `batch`, by default four rows that are always the same."""
    inputs, targets = batch or make_data(4)
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def change_weight(model: nn.Module, amount: float = 0.25) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += amount  # type: ignore[index]


# -------------------------------------------------------------------- errors


def parameter_changed_on_one_rank() -> None:
    accelerator, model, optimizer, _ = prepare_training()
    if accelerator.process_index == 1:
        change_weight(model)
    before = flatten_weights(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1 differs from rank 0's by up to .*before prepare\(\)"):
        update(accelerator, model, optimizer)
    assert torch.equal(flatten_weights(model), before)


def weights_drawn_by_each_rank() -> None:
    accelerator, model, optimizer, _ = prepare_training()
    torch.manual_seed(accelerator.process_index)
    model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    with pytest.raises(StateError, match=r"0\.weight on rank 1 .*; 0\.bias on rank 1 .*and 1 more\. Change them alike"):
        update(accelerator, model, optimizer)


def learning_rate_changed_on_one_rank() -> None:
    for layout in ("ddp", "fsdp"):
        accelerator, model, optimizer, _ = prepare_training(strategy=layout)
        if accelerator.process_index == 1:
            optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(
            StateError, match=r"'lr' of parameter group 0 is 0\.1 on rank 0, 0\.3 on rank 1\. Give the optimizer"
        ):
            update(accelerator, model, optimizer)


def option_set_on_one_rank() -> None:
    """The option is missing on rank 0, whose options alone were compared."""
    accelerator, model, optimizer, _ = prepare_training()
    if accelerator.process_index == 1:
        optimizer.param_groups[0]["trust"] = 0.3
    with pytest.raises(StateError, match=r"'trust' of parameter group 0 is None on rank 0, 0\.3 on rank 1"):
        update(accelerator, model, optimizer)


def parameter_changed_later() -> None:
    """A change after the first update is found before the second update, a change after the second before the fourth."""
    for seen in (2, 4):
        accelerator, model, optimizer, _ = prepare_training()
        for _ in range(seen // 2):
            update(accelerator, model, optimizer)
        if accelerator.is_main_process:
            change_weight(model)
        for _ in range(seen // 2 - 1):
            update(accelerator, model, optimizer)
        with pytest.raises(StateError, match=r"0\.weight on rank 1 differs from rank 0's"):
            update(accelerator, model, optimizer)
        assert accelerator.num_updates == seen - 1


def parameter_changed_with_automatic_microbatching() -> None:
    accelerator, model, _, _ = prepare_training(microbatching="auto")
    if accelerator.process_index == 1:
        change_weight(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1"):
        accelerator.forward_backward(make_data(4), lambda piece: mse_loss(model(piece[0]), piece[1]))


def parameter_changed_with_windows_closed_by_hand() -> None:
    accelerator, model, optimizer, _ = prepare_training()

    def make_update() -> None:
        for _ in range(3):
            accelerator.backward(mse_loss(model(make_data(4)[0]), make_data(4)[1]))
        optimizer.step()
        optimizer.zero_grad()

    make_update()
    if accelerator.process_index == 1:
        change_weight(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1"):
        make_update()


# -------------------------------------------------------------------- warnings


def difference_with_accelerate_rules() -> None:
    """With Accelerate's rules the script continues after a warning."""
    accelerator, model, optimizer, _ = prepare_training(AccelerateAccelerator)
    if accelerator.process_index == 1:
        change_weight(model)
    with capture_warnings() as warnings:
        for _ in range(2):
            update(accelerator, model, optimizer)
    assert_warned_once(warnings, "0.weight on rank 1 differs", "Change them alike")
    assert len(warnings) <= 1


def frozen_parameter_changed() -> None:
    accelerator, (model, optimizer, _) = Accelerator(cpu=True), make_parts()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.process_index == 1:
        change_weight(model)
    with capture_warnings() as warnings:
        for _ in range(2):
            update(accelerator, model, optimizer)
    assert_warned_once(warnings, "frozen parameters are not alike", "0.weight on rank 1 differs")


def rounding_differences() -> None:
    """Differences in the last bits, as between ranks with different kernels, never become an error."""
    accelerator, model, optimizer, _ = prepare_training()
    with capture_warnings() as warnings:
        for _ in range(4):
            change_weight(model, 1e-6 * accelerator.process_index)
            update(accelerator, model, optimizer)
    assert_warned_once(warnings, "1 parameters differ between ranks in their last bits")
    assert len(warnings) <= 1


# -------------------------------------------------------------------- allowed differences


def check_silent(scenario: Callable[[], None]) -> Callable[[], None]:
    """Return the scenario with a check that it causes no warning."""

    @wraps(scenario)
    def run_silently() -> None:
        with capture_warnings() as warnings:
            scenario()
        assert not warnings

    return run_silently


@check_silent
def replicas_in_local_sgd() -> None:
    accelerator, (model, _, _) = Accelerator(cpu=True), make_parts()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local_sgd:
        for _ in range(8):
            inputs, targets = make_data(4)
            update(accelerator, model, optimizer, (inputs + accelerator.process_index, targets))
            assert not are_equal_on_ranks(accelerator, model)
            local_sgd.step()
    update(accelerator, model, optimizer)
    assert are_equal_on_ranks(accelerator, model)


@check_silent
def unreduced_gradients() -> None:
    """Ranks make different numbers of unreduced backward passes before a common reduced one."""
    accelerator, model, optimizer, _ = prepare_training()
    for _ in range(4):
        with accelerator.no_sync(model):
            for _ in range(1 + accelerator.process_index):
                accelerator.backward(mse_loss(model(make_data(4)[0]), make_data(4)[1]))
        accelerator.backward(mse_loss(model(make_data(4)[0]), make_data(4)[1]))
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model)


@check_silent
def sharpness_aware_minimization() -> None:
    """Each rank perturbs its weights differently for one backward pass, as the authors of the method recommend."""
    accelerator, model, optimizer, _ = prepare_training()
    for _ in range(4):
        inputs, targets = make_data(4)
        with accelerator.no_sync(model):
            accelerator.backward(mse_loss(model(inputs + accelerator.process_index), targets))
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
                parameter.grad = None
        accelerator.backward(mse_loss(model(inputs), targets))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model)


@check_silent
def buffers_and_parameters_ignored_by_ddp() -> None:
    options = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    rank = accelerator.process_index
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_parameter("own", nn.Parameter(torch.tensor(float(rank)), requires_grad=False))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        update(accelerator, model, optimizer, (torch.arange(4) + rank, torch.ones(4, 1)))
    assert float(model.own) == rank
    assert accelerator.collectives.gather(model[1].running_mean[:1]).unique().numel() == 2


def several_models_and_a_schedule() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [make_parts()[0], make_parts()[0]]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedules)
    with capture_warnings() as warnings:
        for _ in range(9):
            for number in range(2):
                model, optimizer, schedule = prepared[number::2]
                update(accelerator, model, optimizer)
                schedule.step()
    assert not warnings
    assert all(are_equal_on_ranks(accelerator, model) for model in models)


@check_silent
def half_precision_with_skipped_steps() -> None:
    accelerator, model, optimizer, _ = prepare_training(mixed_precision="fp16")
    for number in range(6):
        inputs, targets = make_data(4)
        update(accelerator, model, optimizer, (inputs, targets * (1e6 if number == 2 else 1.0)))
    assert accelerator.num_updates < 6
    assert are_equal_on_ranks(accelerator, model)


# -------------------------------------------------------------------- unequal batches of the script's own loaders

SIZES = [(5, 2), (3, 6), (4, 1)]
"""Rows per update: (on rank 0, on rank 1)."""


def make_own_batches(rank: int) -> list[Batch]:
    x, y = make_data(24)
    starts = torch.tensor([0, *(sum(sizes) for sizes in SIZES)]).cumsum(0).tolist()
    found = []
    for start, sizes in zip(starts, SIZES, strict=False):
        begin = start + sum(sizes[:rank])
        found.append((x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]))
    return found


def train_by_hand() -> torch.Tensor:
    model, optimizer, _ = make_parts()
    for batches in zip(make_own_batches(0), make_own_batches(1), strict=True):
        inputs, targets = (torch.cat(halves) for halves in zip(*batches, strict=True))
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flatten_weights(model)


def unequal_batches_of_own_loaders() -> None:
    """Unequal batches are reported once, before the second update. With `weight=` the result is right."""
    for is_weighed in (False, True):
        accelerator, model, optimizer, _ = prepare_training()
        with capture_warnings() as warnings:
            for number, (inputs, targets) in enumerate(make_own_batches(accelerator.process_index)):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss, weight=len(inputs) if is_weighed else None)
                optimizer.step()
                optimizer.zero_grad()
                if number == 0 and not is_weighed:
                    assert_warned_once(warnings, "5 on rank 0, 2 on rank 1", "backward(loss, weight=n)")
        distance = (flatten_weights(model) - train_by_hand()).abs().max()
        if is_weighed:
            assert not warnings
            assert distance < 1e-6
        else:
            assert len(warnings) <= 1
            assert distance > 1e-2


def shorter_last_batch() -> None:
    """If only the last batch is shorter on one rank, that rank warns."""
    accelerator, model, optimizer, _ = prepare_training()
    with capture_warnings() as warnings:
        for number in range(3):
            rows = 2 if number == 2 and accelerator.process_index == 1 else 4
            update(accelerator, model, optimizer, make_data(rows))
            assert not warnings or number == 2
    expected = ["[rank 1] a batch of this rank has 2 rows, earlier ones 4"] if accelerator.process_index == 1 else []
    assert [line.split(",")[0] + "," + line.split(",")[1] for line in warnings] == expected


@check_silent
def equal_batches_and_evaluation() -> None:
    accelerator, model, optimizer, _ = prepare_training()
    for _ in range(4):
        update(accelerator, model, optimizer)
        model.eval()
        with torch.no_grad():
            model(make_data(7)[0])
        model.train()


@check_silent
def batches_passed_to_headway() -> None:
    """Headway counts the rows of batches passed to `forward_backward` or `microbatches`, so no weight is needed."""
    for options in ({}, {"microbatching": "auto"}):
        for is_loop in (False, True):
            accelerator, model, optimizer, _ = prepare_training(**options)
            for batch in make_own_batches(accelerator.process_index):
                if not is_loop:
                    accelerator.forward_backward(batch, lambda piece: mse_loss(model(piece[0]), piece[1]))
                    optimizer.step()
                    optimizer.zero_grad()
                for piece in accelerator.microbatches(batch) if is_loop else ():
                    update(accelerator, model, optimizer, piece)
            torch.testing.assert_close(flatten_weights(model), train_by_hand())


# -------------------------------------------------------------------- losses that are not finite


def nan_loss_on_one_rank() -> None:
    """Only the affected rank warns, and only once, although the weights and all later losses are NaN too."""
    accelerator, model, optimizer, _ = prepare_training()
    with capture_warnings() as warnings:
        for number in range(1, 6):
            inputs, targets = make_data(4)
            is_bad = number == 3 and accelerator.process_index == 1
            update(accelerator, model, optimizer, (inputs, targets * (float("nan") if is_bad else 1.0)))
            assert bool(warnings) == (number >= 3 and accelerator.process_index == 1)
    assert flatten_weights(model).isnan().all()
    everything = [line for each in accelerator.collectives.gather_objects(warnings) for line in each]
    assert len(everything) == 1
    assert everything[0].startswith(
        "[rank 1] update 3: the loss of micro-batch 1 was nan on rank 1, or a gradient of update 2"
    )


def nan_loss_in_a_pipeline() -> None:
    """In a pipeline, the value of a batch's loss is known only after its backward pass."""
    accelerator = Accelerator(cpu=True, strategy="pp")
    model = accelerator.prepare(build_seeded(0, lambda: GPT(num_blocks=2)))
    with torch.no_grad():
        if not model.norm.bias.is_meta:
            model.norm.bias.fill_(float("nan"))
    with capture_warnings() as warnings:
        accelerator.forward_backward(make_tokens(), lambda piece: mean_square(model, piece))
    reports = [line for each in accelerator.collectives.gather_objects(warnings) for line in each]
    assert len(reports) == 1, reports
    assert "update 1: the loss of micro-batch 1 was nan on rank" in reports[0]
    accelerator.end_training()


SCENARIOS: list[Callable[[], None]] = [
    parameter_changed_on_one_rank,
    weights_drawn_by_each_rank,
    learning_rate_changed_on_one_rank,
    option_set_on_one_rank,
    parameter_changed_later,
    parameter_changed_with_automatic_microbatching,
    parameter_changed_with_windows_closed_by_hand,
    difference_with_accelerate_rules,
    frozen_parameter_changed,
    rounding_differences,
    replicas_in_local_sgd,
    unreduced_gradients,
    sharpness_aware_minimization,
    buffers_and_parameters_ignored_by_ddp,
    several_models_and_a_schedule,
    half_precision_with_skipped_steps,
    unequal_batches_of_own_loaders,
    shorter_last_batch,
    equal_batches_and_evaluation,
    batches_passed_to_headway,
    nan_loss_on_one_rank,
    nan_loss_in_a_pipeline,
]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2, SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)
