"""Steps of models and functions that torch.compile compiles: against a real run of the compiled model, and what is refused."""

import shutil

import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway.errors import UnsupportedError
from headway.forecasting.device.allocator import compute_exact_peak
from headway.forecasting.device.devices import find_device
from headway.forecasting.tracing import compiled, fake
from headway.forecasting.tracing.fake import trace_step
from headway.forecasting.tracing.step import StepRecipe

pytestmark = pytest.mark.slow  # inductor takes seconds to import
CPU, CARD = find_device("cpu"), find_device("rtx-3090")
WIDTH, ROWS = 256, 2048


def many(x):
    return ((x.sin() * 2).exp() + x.cos()).tanh() * x.sigmoid()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x):
        return x + self.down(many(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def blocks(how, depth=2):
    made = Blocks(depth)
    for module in {"not": [], "whole": [made], "by block": made.parts}[how]:
        module.compile()
    return made


def recipe(**settings):
    return StepRecipe(
        lambda parameters: torch.optim.AdamW(parameters), lambda output, _: output.square().mean(), **settings
    )


def batch(rows=ROWS):
    return torch.zeros(rows, WIDTH)


def most(make, device=CPU, **settings):
    return compute_exact_peak(trace_step(make, batch, recipe(**settings), device).events)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor builds kernels for a CPU with g++")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["whole", "by block"])
def test_the_peak_is_that_of_a_real_compiled_run(how):
    forecast = most(lambda: blocks(how))
    assert forecast == pytest.approx(measure_peak(blocks(how).train(), recipe(), batch), rel=0.005)
    assert forecast < 0.95 * most(lambda: blocks("not"))


def test_blocks_that_repeat_are_inferred():
    found = [trace_step(lambda: blocks("by block", depth), batch, recipe(), CARD) for depth in (6, 7)]
    assert "compiled" in found[0].caveats[0]
    whole = trace_step(lambda: blocks("by block", 7), batch, recipe(), CARD, can_repeat=False)
    assert compute_exact_peak(found[1].events) == compute_exact_peak(whole.events)
    assert compute_exact_peak(found[1].events) > compute_exact_peak(found[0].events)


class Chain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.first(x))


def test_a_function_that_is_compiled_is_followed():
    """Model whose pointwise operations are fused into one kernel that keeps only its input."""
    size = ROWS * WIDTH * 4
    plain, fused = (most(lambda f=f: Chain(f), CARD) for f in (many, torch.compile(many)))
    assert plain - fused >= 3 * size


def test_cuda_graphs_are_refused():
    made = Chain(torch.compile(many, mode="reduce-overhead"))
    with pytest.raises(UnsupportedError, match=r"CUDA graphs"):
        most(lambda: made, CARD)


def test_what_dynamo_compiled_for_no_values_is_forgotten():
    function = torch.compile(many)
    most(lambda: Chain(function), CARD)
    assert torch._C._dynamo.eval_frame._debug_get_cache_entry_list(many.__code__) == []


def test_compiled_steps_have_no_cost():
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        trace_step(lambda: blocks("whole"), batch, recipe(), CARD, counts_work=True)


def test_other_backends_are_refused_where_inductor_is_not_there(monkeypatch):
    monkeypatch.setattr(fake, "can_compile", lambda: False)
    made = torch.compile(torch.tanh, backend="eager")
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        most(lambda: Chain(made), CARD)


def test_several_ranks_are_refused():
    with pytest.raises(UnsupportedError, match=r"on one process"):
        headway.forecast(
            lambda: blocks("whole"),
            lambda size: batch(size),
            loss=lambda output, _: output.sum(),
            batch_size=8,
            strategy="fsdp",
            ranks=2,
            largest=False,
        )


def test_a_model_of_no_forecast_is_refused_with_its_part():
    with pytest.raises(UnsupportedError, match=r"parts\.0 \(Block\) is compiled"):
        compiled.refuse_compiled(blocks("by block"))
