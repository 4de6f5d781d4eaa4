"""Test the detection of spikes: the limit, refused updates, rollback, and false alarms."""

import math

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, SpikePolicy
from headway.core.runtime import events
from headway.errors import ConfigError, NonFiniteError, SpikeError, UnsupportedError
from headway.extras.spikes import RecentValues
from tests.house.tree_of_source import ROOT

CURVES = ROOT / "benchmarks/spikes/curves.npz"

# ---------------------------------------------------------------- band


def test_limit_is_tukeys_fence_on_logarithms():
    band = RecentValues(SpikePolicy(fence=3.0, window=40, warm_up=40))
    values = [math.exp(0.05 * number) for number in range(40)]
    for value in values[:-1]:
        band.add(value)
        assert band.limit == math.inf
    band.add(values[-1])
    assert band.limit == pytest.approx(values[30] * (values[30] / values[10]) ** 3)
    assert band.median == values[20]


def test_band_with_negative_values_uses_no_logarithms():
    band = RecentValues(SpikePolicy(fence=2.0, window=32, warm_up=32), [float(number) for number in range(-16, 16)])
    assert band.limit == 8.0 + 2 * (8.0 - -8.0)


def test_equal_values_give_a_minimum_width():
    assert RecentValues(SpikePolicy(fence=5.0), [2.0] * 64).limit == pytest.approx(2.0 * math.exp(0.5))


def test_band_forgets_old_values():
    policy = SpikePolicy(window=32)
    band = RecentValues(policy, [1.0] * 32)
    for number in range(32):
        band.add(1.03**number)
    assert band.values == [1.03**number for number in range(32)]
    assert band.limit == RecentValues(policy, band.values).limit
    band.add(math.inf)
    assert len(band.values) == 32


def count_alarms(values: list[float], policy: SpikePolicy, fence: float) -> int:
    """Return the number of refused values."""
    band, found = RecentValues(policy, (), fence), 0
    for value in values:
        if value > band.limit:
            found += 1
        else:
            band.add(value)
    return found


def test_at_most_one_false_alarm_in_100_000_updates():
    """Check losses and gradient norms of real training runs, all finite, recorded by benchmarks/spikes/record.py."""
    curves, policy = numpy.load(CURVES), SpikePolicy()
    assert sum(len(curves[name]) for name in curves.files) == 100_000
    fences = {"loss": policy.fence, "norm": policy.norm_fence}
    found = {
        (name, what): count_alarms(numpy.exp(curves[name][:, number] / 256).tolist(), policy, fences[what])
        for name in curves.files
        for number, what in enumerate(("loss", "norm"))
    }
    assert sum(found.values()) <= 1, found


# ---------------------------------------------------------------- training


def make_data(num: int, bad: dict[int, float], size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets. The targets of some batches are multiplied by the factors in `bad`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num * size, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 0.2 * torch.randn(len(x), 1, generator=generator)
    for number, factor in bad.items():
        y[number * size : (number + 1) * size] *= factor
    return x, y


class WeightAverage:
    """Average of the weights that the loop keeps, registered for checkpoints."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def update(self, model: nn.Module) -> None:
        self.value = 0.9 * self.value + 0.1 * sum(p.detach().sum() for p in model.parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


class Training:
    """Training with a spike policy. `state()` returns all that a rollback must restore."""

    def __init__(self, rows, size=8, with_loader=True, **options):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **options)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        loader = DataLoader(TensorDataset(*rows), batch_size=size)
        parts = self.accelerator.prepare(model, optimizer, schedule, loader if with_loader else None)
        self.model, self.optimizer, self.schedule, self.loader = parts
        self.loader = self.loader or loader
        self.mean = WeightAverage()
        self.accelerator.register_for_checkpointing(self.mean)

    def train(self, piece=lambda self, batch: [batch]):
        for batch in self.loader:
            for x, y in piece(self, batch):
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                    before = self.accelerator.num_updates
                    self.optimizer.step()
                    if self.accelerator.num_updates > before:
                        self.mean.update(self.model)
                    self.schedule.step()
                    self.optimizer.zero_grad()
        self.draw = torch.rand(())
        return self

    @property
    def guard(self):
        return self.accelerator.spikes

    def state(self):
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, each in enumerate(self.optimizer.state.values()):
            found |= {f"{number} {name}": value.clone() for name, value in each.items()}
        found["rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return found | {"mean": self.mean.value, "draw": self.draw}


def are_equal(one, other):
    return [name for name in one | other if not torch.equal(one[name], other[name])] == []


def leave_out(rows, left_out, size=8):
    """Return the rows without the given batches."""
    index = [i for i in range(len(rows[0])) if i // size not in left_out]
    return tuple(each[index] for each in rows)


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_rollback_equals_a_run_without_the_bad_batch(with_loader, steps):
    rows = make_data(120, {90: 1000.0})
    policy = SpikePolicy("go_back", updates=5)
    options = {"gradient_accumulation_steps": steps, "with_loader": with_loader}
    found = Training(rows, on_spike=policy, **options).train()
    left = found.accelerator.num_updates
    update = 90 // steps  # updates before the bad one
    back_to = update - (update % 5 + 5)
    assert found.guard.num_spikes == 1
    assert left == 120 // steps - (update - back_to) - 1
    other = Training(leave_out(rows, range(back_to * steps, (update + 1) * steps)), on_spike=policy, **options).train()
    assert other.guard.num_spikes == 0
    assert other.accelerator.num_updates == left
    assert are_equal(found.state(), other.state())


def test_rollback_goes_no_further_than_the_beginning_of_the_epoch():
    rows = make_data(50, {2: 1.0})
    run = Training(rows, on_spike=SpikePolicy("go_back", updates=10)).train()
    run.loader.dataset.tensors[1][3 * 8 : 4 * 8] *= 1000  # fourth batch of the second epoch
    run.train()
    assert "back to the state after 50 updates" in run.guard.report
    assert run.accelerator.num_updates == 50 + 46


def test_pieces_of_a_batch_are_rolled_back_together():
    rows = make_data(60, {50: 1000.0})
    policy = SpikePolicy("go_back", updates=5)

    def split_batch(run, batch):
        return run.accelerator.microbatches(batch)

    run = Training(rows, on_spike=policy, microbatching="auto").train(split_batch)
    assert run.guard.num_spikes == 1
    assert run.accelerator.num_updates == 60 - 6
    other = Training(leave_out(rows, range(45, 51)), on_spike=policy, microbatching="auto").train(split_batch)
    assert are_equal(run.state(), other.state())


def test_resumed_run_uses_the_saved_band(tmp_path):
    rows = make_data(60, {50: 1000.0})
    whole = Training(rows, on_spike="skip")
    for number, (x, y) in enumerate(whole.loader):
        whole.accelerator.backward(nn.functional.mse_loss(whole.model(x), y))
        whole.optimizer.step()
        whole.optimizer.zero_grad()
        if number == 44:
            whole.accelerator.save_state(tmp_path / "saved")
    assert whole.guard.num_spikes == 1
    resumed = Training(rows, on_spike="skip")
    resumed.accelerator.load_state(tmp_path / "saved")
    assert len(resumed.guard.snapshot()["norms"]) == 45
    for x, y in resumed.loader:
        resumed.accelerator.backward(nn.functional.mse_loss(resumed.model(x), y))
        resumed.optimizer.step()
        resumed.optimizer.zero_grad()
    assert resumed.guard.num_spikes == 1  # 5 updates after the resume
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("clips", [False, True])
def test_norm_of_each_model_is_checked(clips):
    """Both models run backward before either optimizer steps, as docs/several_models.md shows."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, on_spike="skip")
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    one, two, first, second = accelerator.prepare(*models, *optimizers)
    for number in range(50):
        for model in (one, two):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 4)).square().mean() + 1.0)
        if number == 40:
            one.weight.grad.mul_(1e12)
        for model, optimizer in ((one, first), (two, second)):
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert (first.num_updates, second.num_updates, accelerator.spikes.num_spikes) == (49, 50, 1)


def test_too_many_spikes_in_a_row_raise_an_error():
    rows = make_data(60, dict.fromkeys(range(40, 50), 1000.0))
    with pytest.raises(
        SpikeError, match=r"update 41: .*: 4 spikes in a row are more than max_in_row=3, and not just bad batches"
    ):
        Training(rows, on_spike=SpikePolicy(max_in_row=3)).train()


def test_repeated_rollbacks_end_with_an_error():
    rows = make_data(80, dict.fromkeys(range(40, 80, 3), 1000.0))
    with pytest.raises(SpikeError, match="more than max_in_row=3"):
        Training(rows, on_spike=SpikePolicy("go_back", updates=5, max_in_row=3)).train()


def test_spike_publishes_an_event_and_logs_a_message(caplog):
    heard = []

    class Listener:
        def hear(self, event):
            heard.append(event)

    listener = Listener()
    events.subscribe(listener.hear)
    run = Training(make_data(50, {40: 1000.0}), on_spike="skip").train()
    (told,) = [each for each in heard if each.name == "spike"]
    assert told.details["action"] == "skip"
    assert told.details["update"] == 41
    assert caplog.messages[-1].startswith(f"{run.guard.report} (")
    assert run.guard.report.startswith("update 41: the loss of micro-batch 1 was ")
    assert run.accelerator.non_finite is None


def test_value_that_is_not_finite_is_a_spike_unless_on_non_finite_is_set():
    rows = make_data(40, {10: math.nan})
    run = Training(rows, on_spike="skip").train()
    assert (run.guard.num_spikes, run.accelerator.num_updates) == (1, 39)
    with pytest.raises(NonFiniteError):
        Training(rows, on_spike="skip", on_non_finite="raise").train()
    both = Training(rows, on_spike="skip", on_non_finite="skip").train()
    assert (both.guard.num_spikes, both.accelerator.non_finite.num_skipped) == (0, 1)


@pytest.mark.parametrize(
    "given", [{"action": "stop"}, {"window": 8}, {"warm_up": 200}, {"fence": 0}, {"updates": 0}, {"max_in_row": True}]
)
def test_invalid_settings_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given)) if "action" not in given else "on_spike='stop' is unknown"):
        SpikePolicy(**given)


def test_fp16_is_refused():
    with pytest.raises(UnsupportedError, match="use mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="fp16", on_spike="skip")
