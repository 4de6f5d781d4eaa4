"""Two processes whose replicas, hyperparameters or batches come apart: an error that names what and where, or one word.

What may differ (local SGD, gradients that stay, frozen parts, buffers, rounding) is played too. All scenarios share one pair.
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
from tests.distributed.layouts import GPT, seeded, squares, text
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import are_equal_on_ranks, assert_said, data, listening, parts, play, weights

Batch = tuple[torch.Tensor, torch.Tensor]


def ready(kind: type[Accelerator] = Accelerator, **options: Any) -> tuple[Any, ...]:
    accelerator = kind(cpu=True, **options)
    return accelerator, *accelerator.prepare(*parts())


def update(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Batch | None = None) -> None:
    """One update, from the same batch each time."""
    inputs, targets = batch or data(4)
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def spoil(model: nn.Module, by: float = 0.25) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += by  # type: ignore[index]


# -------------------------------------------------------------------- what is refused


def a_parameter_that_one_rank_has_changed() -> None:
    accelerator, model, optimizer, _ = ready()
    if accelerator.process_index == 1:
        spoil(model)
    before = weights(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1 differs from rank 0's by up to .*before prepare\(\)"):
        update(accelerator, model, optimizer)
    assert torch.equal(weights(model), before)


def weights_that_each_rank_has_drawn() -> None:
    accelerator, model, optimizer, _ = ready()
    torch.manual_seed(accelerator.process_index)
    model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    with pytest.raises(StateError, match=r"0\.weight on rank 1 .*; 0\.bias on rank 1 .*and 1 more\. Change them alike"):
        update(accelerator, model, optimizer)


def another_learning_rate_on_one_rank() -> None:
    for layout in ("ddp", "fsdp"):
        accelerator, model, optimizer, _ = ready(strategy=layout)
        if accelerator.process_index == 1:
            optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(StateError, match=r"'lr' of parameter group 0 is 0\.1 on rank 0, 0\.3 on rank 1"):
            update(accelerator, model, optimizer)


def a_parameter_that_is_changed_later() -> None:
    """After the first update it is seen before the second one; after the second, before the fourth."""
    for seen in (2, 4):
        accelerator, model, optimizer, _ = ready()
        for _ in range(seen // 2):
            update(accelerator, model, optimizer)
        if accelerator.is_main_process:
            spoil(model)
        for _ in range(seen // 2 - 1):
            update(accelerator, model, optimizer)
        with pytest.raises(StateError, match=r"0\.weight on rank 1 differs from rank 0's"):
            update(accelerator, model, optimizer)
        assert accelerator.num_updates == seen - 1


def a_parameter_that_one_rank_has_changed_in_pieces() -> None:
    accelerator, model, _, _ = ready(microbatching="auto")
    if accelerator.process_index == 1:
        spoil(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1"):
        accelerator.forward_backward(data(4), lambda piece: mse_loss(model(piece[0]), piece[1]))


def in_windows_closed_by_hand() -> None:
    accelerator, model, optimizer, _ = ready()

    def one() -> None:
        for _ in range(3):
            accelerator.backward(mse_loss(model(data(4)[0]), data(4)[1]))
        optimizer.step()
        optimizer.zero_grad()

    one()
    if accelerator.process_index == 1:
        spoil(model)
    with pytest.raises(StateError, match=r"0\.weight on rank 1"):
        one()


# -------------------------------------------------------------------- what is said


def under_accelerates_name() -> None:
    """Its scripts go on, as they do there."""
    accelerator, model, optimizer, _ = ready(AccelerateAccelerator)
    if accelerator.process_index == 1:
        spoil(model)
    with listening() as said:
        for _ in range(2):
            update(accelerator, model, optimizer)
    assert_said(said, "0.weight on rank 1 differs", "Change them alike")
    assert len(said) <= 1


def a_frozen_parameter() -> None:
    accelerator, (model, optimizer, _) = Accelerator(cpu=True), parts()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.process_index == 1:
        spoil(model)
    with listening() as said:
        for _ in range(2):
            update(accelerator, model, optimizer)
    assert_said(said, "frozen parameters are not alike", "0.weight on rank 1 differs")


def rounding() -> None:
    """As on ranks whose kernels round in other ways: no error, however long it goes on."""
    accelerator, model, optimizer, _ = ready()
    with listening() as said:
        for _ in range(4):
            spoil(model, 1e-6 * accelerator.process_index)
            update(accelerator, model, optimizer)
    assert_said(said, "1 parameters differ between ranks in their last bits")
    assert len(said) <= 1


# -------------------------------------------------------------------- what may differ


def silently(scenario: Callable[[], None]) -> Callable[[], None]:
    """Nothing is said in it."""

    @wraps(scenario)
    def played() -> None:
        with listening() as said:
            scenario()
        assert not said

    return played


@silently
def replicas_in_local_sgd() -> None:
    accelerator, (model, _, _) = Accelerator(cpu=True), parts()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local_sgd:
        for _ in range(8):
            inputs, targets = data(4)
            update(accelerator, model, optimizer, (inputs + accelerator.process_index, targets))
            assert not are_equal_on_ranks(accelerator, model)
            local_sgd.step()
    update(accelerator, model, optimizer)
    assert are_equal_on_ranks(accelerator, model)


@silently
def gradients_that_stay() -> None:
    """Ranks make different numbers of backwards before the one that they make together."""
    accelerator, model, optimizer, _ = ready()
    for _ in range(4):
        with accelerator.no_sync(model):
            for _ in range(1 + accelerator.process_index):
                accelerator.backward(mse_loss(model(data(4)[0]), data(4)[1]))
        accelerator.backward(mse_loss(model(data(4)[0]), data(4)[1]))
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model)


@silently
def weights_moved_aside_for_a_backward() -> None:
    """Sharpness-aware minimization with a perturbation of each rank's own, as its authors recommend."""
    accelerator, model, optimizer, _ = ready()
    for _ in range(4):
        inputs, targets = data(4)
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


@silently
def buffers_and_what_ddp_leaves_alone() -> None:
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
    models = [parts()[0], parts()[0]]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedules)
    with listening() as said:
        for _ in range(9):
            for number in range(2):
                model, optimizer, schedule = prepared[number::2]
                update(accelerator, model, optimizer)
                schedule.step()
    assert not said
    assert all(are_equal_on_ranks(accelerator, model) for model in models)


@silently
def half_precision_with_skipped_steps() -> None:
    accelerator, model, optimizer, _ = ready(mixed_precision="fp16")
    for number in range(6):
        inputs, targets = data(4)
        update(accelerator, model, optimizer, (inputs, targets * (1e6 if number == 2 else 1.0)))
    assert accelerator.num_updates < 6
    assert are_equal_on_ranks(accelerator, model)


# -------------------------------------------------------------------- unequal batches of one's own loaders

SIZES = [(5, 2), (3, 6), (4, 1)]
"""Rows on each rank, update by update."""


def own_batches(rank: int) -> list[Batch]:
    x, y = data(24)
    starts = torch.tensor([0, *(sum(sizes) for sizes in SIZES)]).cumsum(0).tolist()
    found = []
    for start, sizes in zip(starts, SIZES, strict=False):
        begin = start + sum(sizes[:rank])
        found.append((x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]))
    return found


def weighted_by_hand() -> torch.Tensor:
    model, optimizer, _ = parts()
    for batches in zip(own_batches(0), own_batches(1), strict=True):
        inputs, targets = (torch.cat(halves) for halves in zip(*batches, strict=True))
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def unequal_batches() -> None:
    """Said once, before the second update; with weight= it is right."""
    for is_weighed in (False, True):
        accelerator, model, optimizer, _ = ready()
        with listening() as said:
            for number, (inputs, targets) in enumerate(own_batches(accelerator.process_index)):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss, weight=len(inputs) if is_weighed else None)
                optimizer.step()
                optimizer.zero_grad()
                if number == 0 and not is_weighed:
                    assert_said(said, "5 on rank 0, 2 on rank 1", "backward(loss, weight=n)")
        distance = (weights(model) - weighted_by_hand()).abs().max()
        if is_weighed:
            assert not said
            assert distance < 1e-6
        else:
            assert len(said) <= 1
            assert distance > 1e-2


def a_shorter_batch_at_the_end() -> None:
    """Equal until then: the rank that has it says so."""
    accelerator, model, optimizer, _ = ready()
    with listening() as said:
        for number in range(3):
            rows = 2 if number == 2 and accelerator.process_index == 1 else 4
            update(accelerator, model, optimizer, data(rows))
            assert not said or number == 2
    expected = ["[rank 1] a batch of this rank has 2 rows, earlier ones 4"] if accelerator.process_index == 1 else []
    assert [line.split(",")[0] + "," + line.split(",")[1] for line in said] == expected


@silently
def equal_batches() -> None:
    accelerator, model, optimizer, _ = ready()
    for _ in range(4):
        update(accelerator, model, optimizer)
        model.eval()
        with torch.no_grad():
            model(data(7)[0])
        model.train()


@silently
def batches_that_are_handed_over() -> None:
    """A batch that Headway is given has as many rows as it has."""
    for options in ({}, {"microbatching": "auto"}):
        for is_loop in (False, True):
            accelerator, model, optimizer, _ = ready(**options)
            for batch in own_batches(accelerator.process_index):
                if not is_loop:
                    accelerator.forward_backward(batch, lambda piece: mse_loss(model(piece[0]), piece[1]))
                    optimizer.step()
                    optimizer.zero_grad()
                for piece in accelerator.microbatches(batch) if is_loop else ():
                    update(accelerator, model, optimizer, piece)
            torch.testing.assert_close(weights(model), weighted_by_hand())


# -------------------------------------------------------------------- losses that are not finite


def a_loss_that_is_nan_on_one_rank() -> None:
    """One word from one rank, though the weights and so all losses are lost from then on."""
    accelerator, model, optimizer, _ = ready()
    with listening() as said:
        for number in range(1, 6):
            inputs, targets = data(4)
            is_bad = number == 3 and accelerator.process_index == 1
            update(accelerator, model, optimizer, (inputs, targets * (float("nan") if is_bad else 1.0)))
            assert bool(said) == (number >= 3 and accelerator.process_index == 1)
    assert weights(model).isnan().all()
    everything = [line for each in accelerator.collectives.gather_objects(said) for line in each]
    assert len(everything) == 1
    assert everything[0].startswith(
        "[rank 1] update 3: the loss of micro-batch 1 was nan on rank 1, or a gradient of update 2"
    )


def a_loss_that_is_nan_in_a_pipeline() -> None:
    """The value of a batch that is held as a function is there only after its backward."""
    accelerator = Accelerator(cpu=True, strategy="pp")
    model = accelerator.prepare(seeded(0, lambda: GPT(num_blocks=2)))
    with torch.no_grad():
        if not model.norm.bias.is_meta:
            model.norm.bias.fill_(float("nan"))
    with listening() as said:
        accelerator.forward_backward(text(), lambda piece: squares(model, piece))
    told = [line for each in accelerator.collectives.gather_objects(said) for line in each]
    assert len(told) == 1, told
    assert "update 1: the loss of micro-batch 1 was nan on rank" in told[0]
    accelerator.end_training()


SCENARIOS: list[Callable[[], None]] = [
    a_parameter_that_one_rank_has_changed,
    weights_that_each_rank_has_drawn,
    another_learning_rate_on_one_rank,
    a_parameter_that_is_changed_later,
    a_parameter_that_one_rank_has_changed_in_pieces,
    in_windows_closed_by_hand,
    under_accelerates_name,
    a_frozen_parameter,
    rounding,
    replicas_in_local_sgd,
    gradients_that_stay,
    weights_moved_aside_for_a_backward,
    buffers_and_what_ddp_leaves_alone,
    several_models_and_a_schedule,
    half_precision_with_skipped_steps,
    unequal_batches,
    a_shorter_batch_at_the_end,
    equal_batches,
    batches_that_are_handed_over,
    a_loss_that_is_nan_on_one_rank,
    a_loss_that_is_nan_in_a_pipeline,
]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(play, 2, SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not told, "\n".join(told)
