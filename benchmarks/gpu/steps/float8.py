"""A wide GPT-2 in float8 and in bf16, compiled by blocks: tokens a second, and how far the losses part."""

from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import (
    SMALL,
    SMALLEST,
    XL,
    Loop,
    build_gpt2,
    build_training,
    compute_loss,
    make_library_loop,
)

WIDE = {**XL, "n_layer": 2, "n_embd": 4096, "n_head": 32, "vocab_size": 50304}
"""Layers of the sizes that float8 is for: 4096 x 16384."""
RECIPES = ("tensorwise", "rowwise")


def run(bench: Bench) -> None:
    """All recipes in turn, each with a model of its own."""
    missing = lacking(bench)
    if missing:
        bench.add_row(Row("float8", note=missing))
        return
    with bench.attempt("float8"):
        compare(bench)


def lacking(bench: Bench) -> str:
    """What is not there; empty where all is."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return "left out: torchao is not installed (pip install 'torchao>=0.18')"
    if not bench.is_cpu and torch.cuda.get_device_capability() < (8, 9):
        return "left out: this GPU has no float8 matrix units"
    return "" if bench.is_cpu else bench.missing_compiler


def compare(bench: Bench) -> None:
    """Rates of all loops, and the loss of each after its last pass."""
    from headway import Float8Options

    sizes, batch, num_updates = bench.choose((WIDE, 4, 4), (SMALL, 4, 2), (SMALLEST, 2, 2))
    compiles = {} if bench.is_cpu else {"dynamo_backend": "inductor"}
    models: dict[str, Any] = {}

    def loop_of(name: str) -> Loop:
        models[name] = linear(build_gpt2(bench, sizes))
        made = build_training(bench, models[name], sizes, batch, num_updates)
        if name == "bf16":
            return make_library_loop("headway", bench, made, **compiles)
        options = Float8Options(recipe=name, emulate=bench.is_cpu)
        return make_library_loop("headway", bench, made, precision="fp8", kwargs_handlers=[options], **compiles)

    loops = {name: loop_of(name) for name in ("bf16", *RECIPES)}
    for name, loop in loops.items():
        bench.print_line(f"  {name}: the first pass took {bench.measure_seconds(loop):.1f} s")
    found = bench.measure_rates(loops, batch * sizes["n_positions"] * num_updates, bench.choose(5, 2, 2))
    for name, rate in found.items():
        note = f"quartiles {rate['low']:,.0f} to {rate['high']:,.0f}; {batch} x {sizes['n_positions']} tokens an update"
        against = None if name == "bf16" else found["bf16"]["median"]
        bench.add_row(
            Row(name, rate["median"], "tokens/s", against, "bf16", note=f"{note}{', emulated' * bench.is_cpu}")
        )
    tokens = torch.arange(sizes["n_positions"], device=bench.device)[None] % sizes["vocab_size"]
    with torch.no_grad():
        losses = {name: float(compute_loss(model, (tokens,))) for name, model in models.items()}
    for name in RECIPES:
        bench.add_row(Row(f"{name}, loss after the same updates", losses[name], "", losses["bf16"], "bf16"))


def linear(model: torch.nn.Module) -> torch.nn.Module:
    """The model with nn.Linear where transformers' GPT-2 has Conv1D, which computes the same and is nothing that torchao knows."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                with child.weight.device:
                    made = torch.nn.Linear(*child.weight.shape)
                made.weight.data.copy_(child.weight.data.t())
                made.bias.data.copy_(child.bias.data)
                setattr(module, name, made)
    return model
