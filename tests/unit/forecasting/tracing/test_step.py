"""Test training loops against torch's profiler of the same loop on real tensors."""

import pytest
import torch
from torch import nn

from benchmarks.forecast.truth import profile_peak
from headway.errors import ConfigError
from headway.forecasting.device.devices import find_device
from headway.forecasting.device.memory_events import compute_exact_peak
from headway.forecasting.tracing.engine import StepObserver
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.reported_tensors import mark_model
from headway.forecasting.tracing.trace_step import trace_step

CPU = find_device("cpu")
WIDTH, CLASSES, ROWS = 64, 3000, 48


class Exp(torch.autograd.Function):
    """Function that keeps its result in an attribute of the context, in addition to saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = x.exp()
        return ctx.result.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.result


class Classifier(nn.Module):
    """Model whose outputs need most of the memory."""

    def __init__(self, keeps=False):
        super().__init__()
        self.inner, self.head, self.keeps = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), keeps

    def forward(self, x):
        logits = self.head(self.inner(x).relu())
        return Exp.apply(logits) if self.keeps else logits


def plain(model, batches, optimizer):
    for inputs, targets in batches:
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_grad_before_backward(model, batches, optimizer):
    for inputs, targets in batches:
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loss_function(model, batches, optimizer):
    def compute_loss(inputs, targets):
        return nn.functional.cross_entropy(model(inputs), targets)

    for inputs, targets in batches:
        compute_loss(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {each.__name__: each for each in (plain, zero_grad_before_backward, loss_function)}


def make_batch():
    return torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)


def build_adamw(parameters):
    return torch.optim.AdamW(parameters)


def measure_peak(loop, keeps=False):
    """Return the peak bytes of two updates, measured by torch's profiler."""
    model = Classifier(keeps)
    optimizer = build_adamw(model.parameters())
    held = sum(parameter.nbytes for parameter in model.parameters())
    return profile_peak(lambda: loop(model, (make_batch() for _ in range(2)), optimizer), held)


def forecast_loop(loop, keeps=False, **recipe):
    made = StepRecipe(build_adamw, nn.functional.cross_entropy, loop=loop, **recipe)
    return trace_step(lambda: Classifier(keeps), make_batch, made, CPU)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_forecast_of_a_loop_equals_the_profilers_peak(name, keeps):
    real = measure_peak(LOOPS[name], keeps)
    assert compute_exact_peak(forecast_loop(name, keeps).events) == pytest.approx(real, rel=0.005)
    assert compute_exact_peak(forecast_loop(LOOPS[name], keeps).events) == pytest.approx(real, rel=0.005)


def test_loops_differ():
    sizes = {name: compute_exact_peak(forecast_loop(name, keeps=True).events) for name in LOOPS}
    logits = ROWS * CLASSES * 4
    assert sizes["plain"] >= sizes["loss_function"] + logits
    assert sizes["zero_grad_before_backward"] > sizes["plain"]


def test_given_loop_has_the_phases_of_the_built_in_one():
    own, known = forecast_loop(plain), forecast_loop("plain")
    assert list(own.phases) == list(known.phases)
    kinds = [{event.kind for event in found.events} for found in (own, known)]
    assert kinds[0] == kinds[1] >= {"weights", "batch", "activations", "gradients", "optimizer state"}


def test_given_loop_may_accumulate_and_use_autocast():
    def loop(model, batches, optimizer):
        for index, (inputs, targets) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(inputs), targets) / 2
            loss.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    found = forecast_loop(loop, accumulation=2, precision="bf16")
    assert [name for name in found.phases if "update" in name] == ["step 1 update", "step 2 update"]
    assert found.operations["aten::_to_copy"] > 0


def test_loop_without_updates_is_an_error():
    def train_without_updates(model, batches, optimizer):
        for inputs, targets in batches:
            nn.functional.cross_entropy(model(inputs), targets).backward()

    with pytest.raises(ConfigError, match="made 0 updates; it must"):
        forecast_loop(train_without_updates)
    with pytest.raises(ConfigError, match="made 0 updates and no backward"):
        forecast_loop(lambda model, batches, optimizer: None)


def test_unknown_loop_is_an_error():
    with pytest.raises(ConfigError, match="loop='fast'; allowed: plain, zero_grad_before_backward, loss_function"):
        StepRecipe(None, loop="fast")


def test_given_loop_clips_itself():
    with pytest.raises(ConfigError, match="the loop clips its gradients itself"):
        forecast_loop(plain, max_norm=1.0)


class RecordingObserver(StepObserver):
    """Observer that records all reports in order."""

    def __init__(self):
        self.seen = []

    def mark_tensors(self, tensors, kind):
        self.seen += [(id(tensor), kind) for tensor in tensors]


def test_weights_and_buffers_are_requested_in_the_order_of_moving_a_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)), nn.BatchNorm2d(8))
    model.register_parameter("scale", nn.Parameter(torch.ones(8)))
    moved, marks = [], RecordingObserver()
    model._apply(lambda tensor: moved.append(id(tensor)) or tensor)
    mark_model(model, marks)
    known = {
        id(each): kind
        for held, kind in ((model.parameters(), "weights"), (model.buffers(), "buffers"))
        for each in held
    }
    assert marks.seen == [(each, known[each]) for each in moved]
