"""Optimizers by name: memory on tensors without values, compared with a real run on the CPU."""

import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway.errors import ConfigError
from headway.forecasting.tracing.step import StepRecipe, list_state
from headway.planning.optimizers import resolve_optimizer

PACKAGES = {"adafactor_transformers": "transformers", "adamw8bit": "torchao", "adamw8bit_bnb": "bitsandbytes"}


def net():
    return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))


def batch(size=8):
    return torch.zeros(size, 512), torch.zeros(size, 512)


def forecast(optimizer, **options):
    return headway.forecast(
        net, batch, loss=nn.functional.mse_loss, optimizer=optimizer, largest=False, **{"device": "cpu", **options}
    )


def real(optimizer):
    """(bytes at the peak of two updates, bytes of the state)."""
    made = []

    def keep(parameters):
        made.append(resolve_optimizer(optimizer)(parameters))
        return made[-1]

    taken = measure_peak(net(), StepRecipe(keep, nn.functional.mse_loss), batch)
    parts = {each.data_ptr(): each.nbytes for each in list_state(made[0])}  # some share a table of codes
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
@pytest.mark.filterwarnings("ignore")  # of the packages, about themselves
def test_it_takes_what_a_real_run_takes(optimizer):
    if optimizer in PACKAGES:
        pytest.importorskip(PACKAGES[optimizer])
    taken, state = real(optimizer)
    found = forecast(optimizer)
    assert found.allocated == pytest.approx(taken, rel=0.03)
    if found.peak.startswith("step 2"):
        assert found.split["optimizer state"] == state
    assert bool(found.caveats) == optimizer.startswith("adamw8bit")


def test_the_states_are_as_small_as_their_kinds_are():
    """Adafactor keeps a row and a column of each matrix; Muon one moment of it; Adam two."""
    weights = sum(each.numel() for each in net().parameters())
    states = {
        name: forecast(name, device="a100-40gb").split["optimizer state"] for name in ("adafactor", "muon", "adamw")
    }
    assert states["adamw"] == pytest.approx(8 * weights, rel=0.01)
    assert states["muon"] == pytest.approx(4 * weights, rel=0.01)
    assert states["adafactor"] == 4 * (2 * (512 + 1024) + 512 + 1024)


def test_adafactor_works_on_one_parameter_at_a_time_on_a_card_too():
    """Updates of all parameters at once would take a copy of all weights."""
    found = forecast("adafactor", device="a100-40gb")
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


def test_a_name_that_is_not_known():
    with pytest.raises(ConfigError, match="did you mean adamw8bit"):
        forecast("adamw8bits")
