"""Test optimizers by name: memory on tensors without values, against a real run on the CPU."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import headway
from benchmarks.forecast.truth import measure_peak
from headway.errors import ConfigError
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.reported_tensors import list_state
from headway.planning.optimizers import resolve_optimizer

PACKAGES = {"adafactor_transformers": "transformers", "adamw8bit": "torchao", "adamw8bit_bnb": "bitsandbytes"}


def build_net():
    return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))


def make_batch(size=8):
    return torch.zeros(size, 512), torch.zeros(size, 512)


def forecast_optimizer(optimizer, **options):
    return headway.forecast(
        build_net,
        make_batch,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        largest=False,
        **{"device": "cpu", **options},
    )


def measure_real(optimizer):
    """Return (peak bytes of a real run, bytes of its optimizer state)."""
    made = []

    def keep(parameters):
        made.append(resolve_optimizer(optimizer)(parameters))
        return made[-1]

    taken = measure_peak(build_net(), StepRecipe(keep, nn.functional.mse_loss), make_batch)
    parts = {each.data_ptr(): each.nbytes for each in list_state(made[0])}  # some tensors share a table of codes
    return taken, sum(parts.values())


@pytest.mark.parametrize(
    "optimizer",
    [
        "adafactor",
        pytest.param("adafactor_transformers", marks=pytest.mark.slow),  # imports transformers
        pytest.param("adamw8bit", marks=pytest.mark.slow),  # compiles its update
        pytest.param("adamw8bit_bnb", marks=pytest.mark.slow),  # imports bitsandbytes
        "muon",
    ],
)
@pytest.mark.filterwarnings("ignore")  # warnings of the packages
def test_forecast_equals_a_real_run(optimizer):
    if optimizer in PACKAGES:
        pytest.importorskip(PACKAGES[optimizer])
    taken, state = measure_real(optimizer)
    found = forecast_optimizer(optimizer)
    assert found.allocated == pytest.approx(taken, rel=0.03)
    if found.peak.startswith("step 2"):
        assert found.split["optimizer state"] == state
    assert bool(found.caveats) == optimizer.startswith("adamw8bit")


def test_forecast_has_the_state_size_of_each_optimizer():
    """AdamW has two float32 moments per weight, Muon about one, and Adafactor one per row, column and bias element."""
    weights = sum(each.numel() for each in build_net().parameters())
    states = {
        name: forecast_optimizer(name, device="a100-40gb").split["optimizer state"]
        for name in ("adafactor", "muon", "adamw")
    }
    assert states["adamw"] == pytest.approx(8 * weights, rel=0.01)
    assert states["muon"] == pytest.approx(4 * weights, rel=0.01)
    assert states["adafactor"] == 4 * (2 * (512 + 1024) + 512 + 1024)


def test_adafactor_updates_one_parameter_at_a_time_on_a_gpu():
    """An update of all parameters at once would need a copy of all weights."""
    found = forecast_optimizer("adafactor", device="a100-40gb")
    beside = found.split.get("temporaries", 0)
    assert beside < 1.1 * 2 * 4 * 512 * 1024


def test_muon_calls_the_closure_once_and_returns_its_loss():
    model = nn.Linear(4, 4)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = resolve_optimizer("muon")(model.parameters())
    calls = []

    def closure():
        calls.append(model(torch.ones(2, 4)).square().mean())
        calls[-1].backward()
        return calls[-1]

    loss = optimizer.step(closure)
    assert [loss] == calls
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the package
def test_torchao_calls_the_closure_on_tensors_without_values():
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(64, 64)
        optimizer = resolve_optimizer("adamw8bit")(model.parameters())
        calls = []

        def closure():
            calls.append(model(torch.ones(2, 64)).square().mean())
            calls[-1].backward()
            return calls[-1]

        loss = optimizer.step(closure)
    assert len(calls) == 1
    assert loss is calls[0]
    assert set(optimizer.state) == set(model.parameters())  # the closure made the gradients of this update


def test_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean adamw8bit"):
        forecast_optimizer("adamw8bits")
