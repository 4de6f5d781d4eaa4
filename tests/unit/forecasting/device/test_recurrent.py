"""Test recurrent layers: on a CPU against torch's profiler, and on a GPU the request to cuDNN, which only a GPU can measure."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.forecast.truth import profile_peak
from headway.forecasting.device.allocator import replay_events
from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.device.memory_events import compute_exact_peak
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.forecasting.tracing.trace_step import trace_step

CARD, CPU = find_device("a100-40gb"), find_device("cpu")
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class LanguageModel(nn.Module):
    def __init__(self, kind="LSTM", **options):
        super().__init__()
        self.words, self.layers = nn.Embedding(500, 64), LAYERS[kind](64, 96, 2, batch_first=True, **options)
        self.head = nn.Linear(192 if options.get("bidirectional") else options.get("proj_size") or 96, 500)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens))[0])


def make_batch(size=8):
    tokens = torch.zeros(size, 40, dtype=torch.long)
    return tokens, tokens


def compute_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def trace_model(device=CARD, precision="no", size=8, **options):
    recipe = StepRecipe(torch.optim.SGD, compute_loss, precision)
    return trace_step(lambda: LanguageModel(**options), lambda: make_batch(size), recipe, device)


def measure_peak(kind):
    """Measure a loop of two updates with torch's profiler."""
    model = LanguageModel(kind)
    optimizer = torch.optim.SGD(model.parameters())

    def train_model():
        for tokens, targets in (make_batch(), make_batch()):
            outputs = model(tokens)
            value = compute_loss(outputs, targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

    return profile_peak(train_model, sum(parameter.nbytes for parameter in model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_language_model_on_a_cpu_takes_the_memory_that_the_profiler_measures(kind):
    assert compute_exact_peak(trace_model(CPU, kind=kind).events) == pytest.approx(measure_peak(kind), rel=0.02)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 32}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_gpu_runs_all_layers_in_one_call(kind, options, precision):
    if kind != "LSTM" and "proj_size" in options:
        return  # torch supports it for LSTMs only
    found = trace_model(precision=precision, kind=kind, **options)
    assert found.operations["aten::_cudnn_rnn"] == found.operations["aten::_cudnn_rnn_backward"] == 2
    assert any("cuDNN keeps" in caveat for caveat in found.caveats)
    longer = trace_model(precision=precision, size=16, kind=kind, **options)
    values = 8 * 40 * 2 * 96 * (2 if precision == "bf16" else 4)  # one value for each hidden unit and step
    more = replay_events(longer.events).allocated - replay_events(found.events).allocated
    kept = {"LSTM": 6, "GRU": 5, "RNN": 1}[kind] * values
    assert more > kept
    assert longer.unsure_bytes - found.unsure_bytes > kept  # `most` has room for twice the assumed reserve


def test_real_layers_compute_as_before():
    torch.manual_seed(0)
    model, (tokens, _) = LanguageModel(), make_batch()
    before = model(tokens)
    trace_model()
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("name", ["fft", "svdvals", "qr"])
def test_uncounted_workspaces_of_other_libraries_are_named(name):
    def run_function(model, inputs):
        made = {"fft": torch.fft.rfft, "svdvals": torch.linalg.svdvals, "qr": lambda x: torch.linalg.qr(x)[0]}[name]
        return made(model(inputs)).abs().sum()

    with substitute_kernels(CARD, "no"), FakeTensorMode():
        tracker = StorageTracker(CARD)
        with tracker:
            run_function(torch.nn.Linear(8, 8), torch.zeros(4, 8, 8))
    assert any("workspaces are not counted" in caveat for caveat in tracker.build_trace().caveats)
