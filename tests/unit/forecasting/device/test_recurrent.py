"""Recurrent layers: on a CPU against torch's profiler; for a card what cuDNN would be asked for, which only a card can measure."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.forecast.truth import profile_peak
from headway.forecasting.device.allocator import UNSURE, compute_exact_peak, replay_events
from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.fake import trace_step
from headway.forecasting.tracing.step import StepRecipe
from headway.forecasting.tracing.trace import StorageTracker

CARD, CPU = find_device("a100-40gb"), find_device("cpu")
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class LanguageModel(nn.Module):
    def __init__(self, kind="LSTM", **options):
        super().__init__()
        self.words, self.layers = nn.Embedding(500, 64), LAYERS[kind](64, 96, 2, batch_first=True, **options)
        self.head = nn.Linear(192 if options.get("bidirectional") else options.get("proj_size") or 96, 500)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens))[0])


def batch(size=8):
    tokens = torch.zeros(size, 40, dtype=torch.long)
    return tokens, tokens


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def traced(device=CARD, precision="no", size=8, **options):
    recipe = StepRecipe(torch.optim.SGD, loss, precision)
    return trace_step(lambda: LanguageModel(**options), lambda: batch(size), recipe, device)


def measured(kind):
    """By a loop of two updates, as torch's profiler sees it."""
    model = LanguageModel(kind)
    optimizer = torch.optim.SGD(model.parameters())

    def work():
        for tokens, targets in (batch(), batch()):
            outputs = model(tokens)
            value = loss(outputs, targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

    return profile_peak(work, sum(parameter.nbytes for parameter in model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_on_a_cpu_a_language_model_takes_what_the_profiler_sees(kind):
    assert compute_exact_peak(traced(CPU, kind=kind).events) == pytest.approx(measured(kind), rel=0.02)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 32}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_card_runs_all_layers_in_one_call(kind, options, precision):
    if kind != "LSTM" and "proj_size" in options:
        return  # torch has it for LSTMs alone
    found = traced(precision=precision, kind=kind, **options)
    assert found.operations["aten::_cudnn_rnn"] == found.operations["aten::_cudnn_rnn_backward"] == 2
    assert any("cuDNN keeps" in caveat for caveat in found.caveats)
    longer = traced(precision=precision, size=16, kind=kind, **options)
    values = 8 * 40 * 2 * 96 * (2 if precision == "bf16" else 4)  # one value of each hidden one and step
    more = replay_events(longer.events).allocated - replay_events(found.events).allocated
    kept = {"LSTM": 6, "GRU": 5, "RNN": 1}[kind] * values
    assert more > kept
    unsure, before = (
        next(event.num_bytes for event in each.events if event.what == UNSURE) for each in (longer, found)
    )
    assert unsure - before > kept  # `most` has room for twice the reserve that is assumed


def test_real_layers_compute_as_ever():
    torch.manual_seed(0)
    model, (tokens, _) = LanguageModel(), batch()
    before = model(tokens)
    traced()
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("name", ["fft", "svdvals", "qr"])
def test_what_other_libraries_take_is_named(name):
    def forward(model, inputs):
        made = {"fft": torch.fft.rfft, "svdvals": torch.linalg.svdvals, "qr": lambda x: torch.linalg.qr(x)[0]}[name]
        return made(model(inputs)).abs().sum()

    with substitute_kernels(CARD, "no"), FakeTensorMode():
        tracker = StorageTracker(CARD)
        with tracker:
            forward(torch.nn.Linear(8, 8), torch.zeros(4, 8, 8))
    assert any("workspaces are not counted" in caveat for caveat in tracker.build_trace().caveats)
