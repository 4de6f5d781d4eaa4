"""Test steps of models and functions compiled by torch.compile, against a real run, and combinations that are refused."""

import shutil

import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway.errors import UnsupportedError
from headway.forecasting.device.devices import find_device
from headway.forecasting.device.memory_events import compute_exact_peak
from headway.forecasting.tracing import compiled
from headway.forecasting.tracing import trace_step as trace_module
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step

pytestmark = pytest.mark.slow  # inductor takes seconds to import
CPU, CARD = find_device("cpu"), find_device("rtx-3090")
WIDTH, ROWS = 256, 2048


def apply_many(x):
    return ((x.sin() * 2).exp() + x.cos()).tanh() * x.sigmoid()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x):
        return x + self.down(apply_many(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def build_blocks(how, depth=2):
    made = Blocks(depth)
    for module in {"not": [], "whole": [made], "by block": made.parts}[how]:
        module.compile()
    return made


def build_recipe(**settings):
    return StepRecipe(
        lambda parameters: torch.optim.AdamW(parameters), lambda output, _: output.square().mean(), **settings
    )


def make_batch(rows=ROWS):
    return torch.zeros(rows, WIDTH)


def forecast_peak(make, device=CPU, **settings):
    return compute_exact_peak(trace_step(make, make_batch, build_recipe(**settings), device).events)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor builds kernels for a CPU with g++")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["whole", "by block"])
def test_peak_is_that_of_a_real_compiled_run(how):
    forecast = forecast_peak(lambda: build_blocks(how))
    assert forecast == pytest.approx(measure_peak(build_blocks(how).train(), build_recipe(), make_batch), rel=0.005)
    assert forecast < 0.95 * forecast_peak(lambda: build_blocks("not"))


def test_repeated_blocks_are_extrapolated():
    found = [trace_step(lambda: build_blocks("by block", depth), make_batch, build_recipe(), CARD) for depth in (6, 7)]
    assert "compiled" in found[0].caveats[0]
    whole = trace_step(lambda: build_blocks("by block", 7), make_batch, build_recipe(), CARD, can_repeat=False)
    assert compute_exact_peak(found[1].events) == compute_exact_peak(whole.events)
    assert compute_exact_peak(found[1].events) > compute_exact_peak(found[0].events)


class Chain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.first(x))


def test_compiled_function_is_followed():
    """The model's pointwise operations are fused into one kernel that keeps only its input."""
    size = ROWS * WIDTH * 4
    plain, fused = (forecast_peak(lambda f=f: Chain(f), CARD) for f in (apply_many, torch.compile(apply_many)))
    assert plain - fused >= 3 * size


def test_cuda_graphs_are_refused():
    made = Chain(torch.compile(apply_many, mode="reduce-overhead"))
    with pytest.raises(UnsupportedError, match=r"CUDA graphs"):
        forecast_peak(lambda: made, CARD)


def test_dynamos_code_for_fake_tensors_is_discarded():
    function = torch.compile(apply_many)
    forecast_peak(lambda: Chain(function), CARD)
    assert torch._C._dynamo.eval_frame._debug_get_cache_entry_list(apply_many.__code__) == []


def test_compiled_steps_have_no_cost():
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        trace_step(lambda: build_blocks("whole"), make_batch, build_recipe(), CARD, counts_work=True)


def test_other_backends_are_refused_where_inductor_is_missing(monkeypatch):
    monkeypatch.setattr(trace_module, "can_compile", lambda: False)
    made = torch.compile(torch.tanh, backend="eager")
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        forecast_peak(lambda: Chain(made), CARD)


def test_several_ranks_are_refused():
    with pytest.raises(UnsupportedError, match=r"on one process"):
        headway.forecast(
            lambda: build_blocks("whole"),
            lambda size: make_batch(size),
            loss=lambda output, _: output.sum(),
            batch_size=8,
            strategy="fsdp",
            ranks=2,
            largest=False,
        )


def test_compiled_model_outside_a_forecast_is_refused_by_its_part():
    with pytest.raises(UnsupportedError, match=r"parts\.0 \(Block\) is compiled"):
        compiled.refuse_compiled(build_blocks("by block"))
