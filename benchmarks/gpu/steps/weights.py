"""A Llama of 13.5 GB with weights in host memory: GB/s compared with the link's bandwidth, tokens/s compared with Accelerate.

`python -m benchmarks.gpu weights` runs only this step; with `--device cpu`, at a small size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE
from headway import cpu_offload, init_empty_weights, offload_pace
from headway.common.text import format_bytes
from headway.offload.placement.bandwidth import measure_copy_bandwidth, measure_memory_bandwidth

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}
SMALLEST = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def run(bench: Bench) -> None:
    """Measure Headway, then Accelerate, each with a new model."""
    bandwidth = measure_memory_bandwidth(bench.device) if bench.is_cpu else measure_copy_bandwidth(bench.device)
    what = "main memory, read by a matrix product" if bench.is_cpu else "copies of pinned memory to the device"
    bench.add_row(Row(what, bandwidth / 1e9, "GB/s"))
    with bench.attempt("headway, cpu_offload"):
        model = build_llama(bench)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        bench.print_line(f"  weights: {format_bytes(num_bytes)}, read for each token")
        if bench.is_cpu:
            bench.print_line("  a CPU uses the weights in place: nothing is copied over a link")
        pinning = bench.measure_seconds(partial(cpu_offload, model, bench.device))
        first = bench.measure_seconds(partial(run_one_token, bench, model))
        bench.add_row(
            Row(
                "headway, cpu_offload: pinning the weights",
                pinning,
                "s",
                note=f"then {first:.2f} s for the first forward",
            )
        )
        speed = measure_tokens_per_second(bench, model, bench.choose(5, 5, 2))
        link = "bandwidth of main memory" if bench.is_cpu else "bandwidth of the link"
        bench.add_row(Row("headway, cpu_offload: weights", speed * num_bytes / 1e9, "GB/s", bandwidth / 1e9, link))
        report = offload_pace(model)
        bench.add_row(
            Row(
                "headway, cpu_offload: one token per forward",
                speed,
                "tokens/s",
                note=report.words() if report else "",
            )
        )
        del model
    measure_accelerate(bench)


def measure_accelerate(bench: Bench) -> None:
    """Measure Accelerate."""
    if not HAS_ACCELERATE:
        bench.add_row(Row("accelerate, cpu_offload", note=ACCELERATE_MISSING))
        return
    from accelerate import cpu_offload as their_cpu_offload

    with bench.attempt("accelerate, cpu_offload"):
        model = build_llama(bench)
        placing = bench.measure_seconds(partial(their_cpu_offload, model, execution_device=bench.device))
        first = bench.measure_seconds(partial(run_one_token, bench, model))
        bench.add_row(
            Row("accelerate, cpu_offload: placing", placing, "s", note=f"then {first:.2f} s for the first forward")
        )
        bench.add_row(
            Row(
                "accelerate, cpu_offload: one token per forward",
                measure_tokens_per_second(bench, model, bench.choose(3, 5, 2)),
                "tokens/s",
            )
        )


def build_llama(bench: Bench) -> torch.nn.Module:
    """Build the model on the meta device, then fill it with random weights in host memory; the device draws them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.float32 if bench.is_cpu else torch.bfloat16
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(LlamaConfig(**bench.choose(LLAMA_7B, SMALL, SMALLEST)))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty(parameter.shape, dtype=dtype, device=bench.device).normal_(0.0, 0.02)
            setattr(module, name, torch.nn.Parameter(weight.cpu(), requires_grad=False))
    result: torch.nn.Module = model.eval()
    return result


def run_one_token(bench: Bench, model: Callable[..., Any]) -> None:
    """Run one forward with one token."""
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long, device=bench.device), use_cache=False)


def measure_tokens_per_second(bench: Bench, model: Callable[..., Any], num_forwards: int) -> float:
    """Return tokens per second with one token per forward, after two forwards in which the offload learns the order."""
    token = torch.ones(1, 1, dtype=torch.long, device=bench.device)

    def run_forwards(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                model(input_ids=token, use_cache=False)

    run_forwards(2)
    return num_forwards / bench.measure_seconds(lambda: run_forwards(num_forwards))
