"""Two processes: a bad update is skipped on all ranks or on none, whichever rank noticed it, and a slow rank is named."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, NonFinitePolicy, TensorParallelOptions
from headway.core.runtime import events
from headway.core.training.checks import finite
from headway.errors import NonFiniteError
from headway.extras import stragglers
from headway.extras.throughput import Throughput
from tests.distributed.layouts import VOCABULARY
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import make_two_head_llama

NAN, INF = float("nan"), float("inf")


def prepare_training(action: Any = "skip", **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, on_non_finite=action, **options)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def flatten_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def are_equal_on_ranks(accelerator: Accelerator, model: nn.Module) -> bool:
    first, second = accelerator.gather(flatten_weights(model)[None])
    return torch.equal(first, second)


def non_finite_loss_on_one_rank() -> None:
    """The loss is infinite on one rank, but its gradients are finite on every rank."""
    accelerator, model, optimizer = prepare_training()
    before = flatten_weights(model)
    loss = model(torch.ones(1, 3)).mean() + (INF if accelerator.process_index == 1 else 0.0)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(before, flatten_weights(model))
    assert accelerator.non_finite.report.startswith("update 1: the loss of micro-batch 1 was inf on rank 1: ")
    accelerator.backward(model(torch.ones(1, 3)).mean())
    optimizer.step()
    assert accelerator.num_updates == 1
    assert not torch.equal(before, flatten_weights(model))
    assert are_equal_on_ranks(accelerator, model)


def nan_in_early_micro_batch_of_one_rank() -> None:
    """The micro-batch's backward reduces no gradients, so only one rank has the NaN."""
    accelerator, model, optimizer = prepare_training(gradient_accumulation_steps=3)
    before = flatten_weights(model)
    for number in range(6):
        x = torch.ones(2, 3)
        if number == 1 and accelerator.process_index == 0:
            x[0, 0] = NAN
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number == 2:
            assert torch.equal(before, flatten_weights(model))
    assert (
        "the loss of micro-batch 2 was nan on rank 0: the update is skipped on all ranks"
        in accelerator.non_finite.report
    )
    assert accelerator.num_updates == 1
    assert are_equal_on_ranks(accelerator, model)


def non_finite_gradient_on_one_rank() -> None:
    """All losses are finite, but the slope of sqrt at 0 is infinite."""
    accelerator, model, optimizer = prepare_training()
    x = torch.zeros(1, 4) if accelerator.process_index == 1 else torch.ones(1, 4)
    hidden = model[0](torch.ones(1, 3))
    with torch.no_grad():
        model[1].bias.zero_()
    at = model[1].bias if accelerator.process_index == 1 else model[1].bias + 1
    before = flatten_weights(model)
    # uses the model's call, so that DDP reduces gradients
    accelerator.backward(model(torch.ones(1, 3)).mean() + at.sqrt().sum() * 0.5 + (hidden * x).sum() * 0)
    optimizer.step()
    assert torch.equal(before, flatten_weights(model))
    assert "gradients of 1 of 4 parameters are not (1.bias)" in accelerator.non_finite.report


def all_ranks_raise() -> None:
    accelerator, model, optimizer = prepare_training(NonFinitePolicy("skip", max_in_row=1))
    for number in range(2):
        x = torch.full((1, 3), NAN if accelerator.process_index == number else 1.0)
        accelerator.backward(model(x).mean())
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match=r"on rank 1: 2 in a row are more than max_in_row=1"):
        optimizer.step()


def all_ranks_stop_at_the_same_batch() -> None:
    accelerator, model, optimizer = prepare_training("stop")
    rows = torch.ones(16, 3)
    rows[5] = NAN
    loader = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=2))
    num_batches = 0
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            num_batches += 1
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.reduce(torch.tensor(num_batches)).item() == 4  # two on each rank: row 5 is in the second round
    assert accelerator.non_finite.has_stopped
    assert accelerator.num_updates == 1


def automatic_microbatching() -> None:
    accelerator, model, optimizer = prepare_training(microbatching="auto")
    before = flatten_weights(model)
    for number in range(2):
        x = torch.ones(4, 3)
        if number == 0 and accelerator.process_index == 1:
            x[3] = NAN
        accelerator.forward_backward(x, lambda piece: model(piece).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            assert torch.equal(before, flatten_weights(model))
    assert accelerator.num_updates == 1
    assert are_equal_on_ranks(accelerator, model)


def slow_rank_is_named() -> None:
    """With a simulated clock, a forward pass takes three seconds on rank 1 and one second on rank 0."""
    accelerator, model, optimizer = prepare_training(None)
    is_slow = accelerator.process_index == 1
    now = [0.0]
    lines: list[str] = []
    seen_events: list[events.RunEvent] = []

    class Ear:
        def hear(self, happening: events.RunEvent) -> None:
            seen_events.append(happening)

    ear = Ear()
    events.subscribe(ear.hear)
    stragglers.log.warning = lambda text, *values: lines.append(text % values)  # type: ignore[method-assign]
    meter = Throughput(
        accelerator._training_step, accelerator._run.events, accelerator.clock, accelerator.runtime, lambda: now[0]
    )
    meter.every, meter.peak = 1, 100.0
    meter.count_flops()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(24, 3)), batch_size=2))
    for (x,) in loader:
        now[0] += 3.0 if is_slow else 1.0
        accelerator.backward(model(x).mean())
        now[0] += 1.0 if is_slow else 3.0  # the faster rank waits for the slower one
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    assert [(pace.forward, pace.data_wait) for pace in meter.paces()] == [(1.0, 0.0), (3.0, 0.0)]
    assert list(meter.stragglers()) == [1]
    by_rank = {name: wait for name, wait in meter.values().items() if "rank" in name}
    assert by_rank == ({"data_wait/rank_0": 0.0, "data_wait/rank_1": 0.0} if accelerator.is_main_process else {})
    # 24 samples in 6 rounds of 4 s. Per sample: 2 * (3 * 4 + 4) each for forward and for weight gradients,
    # plus 2 * 4 for the input gradient of the second layer.
    flops = 2 * 2 * (3 * 4 + 4) + 2 * 4
    assert meter.flops_per_sample == flops
    assert meter.total() == {"samples_per_second": 1.0, "mfu": flops / (100.0 * 2), "data_wait": 0.0}
    is_main = accelerator.is_main_process
    assert len(lines) == is_main  # reported once, although the rank stays slow
    assert [happening.name for happening in seen_events if happening.name == "straggler"] == ["straggler"] * is_main
    assert not is_main or "rank 1 delays the others: it takes 3,000 ms for a forward, 3.0 times the median" in lines[0]


def flops_of_split_layers_are_those_of_the_model() -> None:
    """Under `tp`, each of two ranks computes half of both layers, for the same rows."""
    accelerator = Accelerator(
        cpu=True, strategy="tp=2", kwargs_handlers=[TensorParallelOptions(plan={"0": "colwise", "2": "rowwise"})]
    )
    meter = accelerator.throughput
    meter.count_flops()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    # Per sample: 2 * (4 * 8 + 8 * 2) each for forward and for weight gradients, plus 2 * 8 * 2 for the input gradient
    # of the second layer.
    assert meter.flops_per_sample == 2 * 2 * (4 * 8 + 8 * 2) + 2 * 8 * 2
    accelerator.free_memory()


def flops_of_split_sequences_are_those_of_the_model() -> None:
    """Under `cp`, each of two ranks computes half of each sequence. The first forward also checks the model."""
    accelerator = Accelerator(cpu=True, strategy="cp=2")
    meter = accelerator.throughput
    meter.count_flops()
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 6
    model = make_two_head_llama(tied=False)
    data: DataLoader[Any] = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    # Per token, 6 for each parameter of a linear layer: two blocks of attention and MLP, and the head. The attention
    # itself is not in torch's counts on a CPU.
    assert meter.flops_per_sample == 16 * 6 * (2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * VOCABULARY)
    accelerator.free_memory()


SCENARIOS = [
    non_finite_loss_on_one_rank, nan_in_early_micro_batch_of_one_rank, non_finite_gradient_on_one_rank, all_ranks_raise,
    all_ranks_stop_at_the_same_batch, automatic_microbatching, slow_rank_is_named,
    flops_of_split_layers_are_those_of_the_model, flops_of_split_sequences_are_those_of_the_model,
]  # fmt: skip


def run_scenarios() -> dict[str, str]:
    """Run each scenario, and return the tracebacks of those that failed, by name."""
    finite.log.warning = lambda *_: None  # type: ignore[method-assign]
    found = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    # The other rank may still read from the store that rank 0 hosts.
    Accelerator(cpu=True).wait_for_everyone()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)
