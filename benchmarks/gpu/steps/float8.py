"""Training speed and loss in float8, compared with bf16, for a Llama with layers of the 8B model's sizes.

On a GPU, blocks are compiled one by one (regional compilation), because float8 only pays off if its casts are fused
with other operations. On a CPU, a small Llama runs uncompiled with emulated float8, which only shows that the step works.

`python -m benchmarks.gpu float8` runs only this step; with `--device cpu`, at a small size.
"""

from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import build_training, compute_loss, make_library_loop, make_tokens

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
"""Shapes of Llama 3 8B, with 6 of its 32 layers."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
SMALLEST = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
FLOOR = "bf16"
RUNS = (FLOOR, "tensorwise", "rowwise", "bf16 again (A/A)")
"""Runs in order: bf16, the recipes of float8, and bf16 again, which shows how much the measurements vary."""
LOSS_TOLERANCE = 1e-2
"""Largest accepted difference between the losses in float8 and in bf16, after the same updates."""


def run(bench: Bench) -> None:
    """Measure all runs, or report why this machine cannot run the step.

    Args:
        bench: Device, size of the workload, and record of the results.
    """
    obstacle = find_obstacle(bench)
    if obstacle:
        bench.add_row(Row("float8", note=obstacle))
        return
    with bench.attempt("float8"):
        compare_precisions(bench)


def find_obstacle(bench: Bench) -> str:
    """Return the reason why this machine cannot run the step, or an empty string if it can."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return "left out: torchao is not installed (pip install 'torchao>=0.18')"
    if not bench.is_cpu and torch.cuda.get_device_capability() < (8, 9):
        return "left out: this GPU has no float8 matrix units"
    return "" if bench.is_cpu else bench.missing_compiler


def compare_precisions(bench: Bench) -> None:
    """Record the speed of each run, and the losses in float8 after the same updates.

    Only one model is in memory at a time. With its optimizer state, the full model needs 38 GB.
    """
    sizes, num_rows, length = bench.choose((LLAMA_8B, 2, 4096), (SMALL, 2, 64), (SMALLEST, 2, 32))
    speeds: dict[str, dict[str, float]] = {}
    losses: dict[str, float] = {}
    for name in RUNS:
        speeds[name], losses[name] = measure_run(bench, name, sizes, num_rows, length)
        bench.release()
    for name, speed in speeds.items():
        how = "regional compilation"
        if bench.is_cpu:
            how = "not compiled" if name.startswith(FLOOR) else "emulated, not compiled"
        bench.add_row(
            Row(
                name,
                speed["median"],
                "tokens/s",
                None if name == FLOOR else speeds[FLOOR]["median"],
                FLOOR,
                note=f"quartiles {speed['low']:,.0f} to {speed['high']:,.0f}; {sizes['num_hidden_layers']} layers of "
                f"width {sizes['hidden_size']}, {num_rows} x {length} tokens per update, {how}",
            )
        )
    for name in RUNS[1:]:
        bench.add_row(
            Row(
                f"{name}, loss after the same updates",
                losses[name],
                "",
                losses[FLOOR],
                FLOOR,
                target=f"within {LOSS_TOLERANCE} of bf16",
                is_met=abs(losses[name] - losses[FLOOR]) <= LOSS_TOLERANCE,
            )
        )


def measure_run(
    bench: Bench, name: str, sizes: dict[str, int], num_rows: int, length: int
) -> tuple[dict[str, float], float]:
    """Train one model, and return its speed in tokens per second and its loss after the updates.

    Args:
        bench: Device and size of the workload.
        name: Run of `RUNS`: a recipe of float8, or bf16.
        sizes: Sizes of the Llama.
        num_rows: Number of rows per update.
        length: Number of tokens per row.

    Returns:
        Median and quartiles of the speed, and the loss on tokens that were not trained on.
    """
    from headway import Float8Options, TorchDynamoPlugin

    num_updates = bench.choose(3, 2, 2)
    data = {"vocab_size": sizes["vocab_size"], "n_positions": length}
    model = make_llama(bench, sizes, length)
    options: dict[str, Any] = {} if name.startswith(FLOOR) else {"precision": "fp8"}
    if options:
        options["kwargs_handlers"] = [Float8Options(recipe=name, emulate=bench.is_cpu)]
    if not bench.is_cpu:
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    train = make_library_loop("headway", bench, build_training(bench, model, data, num_rows, num_updates), **options)
    bench.print_line(f"  {name}: the first pass took {bench.measure_seconds(train):.1f} s")
    speeds = bench.measure_rates({name: train}, num_rows * length * num_updates, bench.choose(4, 3, 2))
    heldout = make_tokens(data, num_rows * num_updates + 1)[-1:]
    with torch.no_grad():
        return speeds[name], float(compute_loss(model, (heldout.to(bench.device),)))


def make_llama(bench: Bench, sizes: dict[str, int], length: int) -> torch.nn.Module:
    """Return a Llama in training mode with random weights, which are drawn on the device.

    Args:
        bench: Device of the weights.
        sizes: Sizes of the model, as named in transformers' `LlamaConfig`.
        length: Number of tokens per row.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, max_position_embeddings=length, use_cache=False, tie_word_embeddings=False, pad_token_id=None
    )
    with bench.device:
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model.train()
