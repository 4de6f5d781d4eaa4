"""Test steps whose sizes depend on values: the largest size is used and reported as a caveat."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.forecast.truth import profile_peak
from headway.forecasting.device.devices import find_device
from headway.forecasting.device.memory_events import compute_exact_peak
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step

WIDTH, ROWS = 48, 40


class Experts(nn.Module):
    """Mixture of experts that selects rows with `where`."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Masked(nn.Module):
    """Boolean mask as an index, for reading and writing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found = self.layer(x)
        kept = found[x > 0.5]
        found = found.clone()
        found[x > 0.5] = kept * 2
        return found + torch.masked_select(found, x > 2).sum()


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 12)

    def forward(self, x):
        return self.layer(x).log_softmax(-1).unsqueeze(1)


def compute_ctc(outputs, _):
    lengths = torch.full((1,), outputs.shape[0]), torch.full((1,), 5)
    return nn.functional.ctc_loss(outputs, torch.ones(1, 5, dtype=torch.long), *lengths)


def compute_mse(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def make_batch():
    torch.manual_seed(0)
    return torch.rand(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def measure_peak(model, loss):
    optimizer = torch.optim.SGD(model.parameters())

    def train_model():
        for inputs, targets in (make_batch(), make_batch()):
            outputs = model(inputs)
            value = loss(outputs, targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

    return profile_peak(train_model, sum(parameter.nbytes for parameter in model.parameters()))


@pytest.mark.parametrize(("model", "loss"), [(Experts, compute_mse), (Masked, compute_mse)])
def test_forecast_is_at_least_the_memory_of_a_run(model, loss):
    found = trace_step(model, make_batch, StepRecipe(torch.optim.SGD, loss), find_device("cpu"))
    assert any("taken at their largest" in caveat for caveat in found.caveats)
    assert compute_exact_peak(found.events) >= measure_peak(model(), loss)


@pytest.mark.parametrize("normed", [spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_needs_no_values(normed):
    found = trace_step(
        lambda: normed(nn.Linear(WIDTH, WIDTH)),
        make_batch,
        StepRecipe(torch.optim.SGD, compute_mse),
        find_device("cpu"),
    )
    assert not any("largest" in caveat for caveat in found.caveats)


def test_possible_extra_memory_of_ctc_is_reported():
    found = trace_step(Recognizer, make_batch, StepRecipe(torch.optim.SGD, compute_ctc), find_device("a100-40gb"))
    assert any("taken at their largest" in caveat for caveat in found.caveats)
    assert any("CTC loss is not counted" in caveat for caveat in found.caveats)
    assert found.unsure_bytes > 0


def test_unique_is_taken_at_its_largest():
    def compute_loss(outputs, _):
        return outputs.sum() + torch.unique(outputs.detach()).sum()

    found = trace_step(
        lambda: nn.Linear(WIDTH, WIDTH), make_batch, StepRecipe(torch.optim.SGD, compute_loss), find_device("cpu")
    )
    assert any("taken at their largest" in caveat for caveat in found.caveats)
