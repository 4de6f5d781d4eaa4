"""A Llama of 13.5 GB whose weights stay in host memory: GB/s beside the link's bandwidth, tokens/s beside Accelerate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE
from headway import cpu_offload, init_empty_weights, offload_pace
from headway.common.text import format_bytes
from headway.offload.placement.bandwidth import measure_copy_bandwidth, measure_memory_bandwidth

SEVEN = {
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
    """Headway, then Accelerate, each with a model of its own."""
    bandwidth = measure_memory_bandwidth(bench.device) if bench.is_cpu else measure_copy_bandwidth(bench.device)
    what = "main memory, read by a product" if bench.is_cpu else "copies of pinned memory to the device"
    bench.row(Row(what, bandwidth / 1e9, "GB/s"))
    with bench.attempt("headway, cpu_offload"):
        model = llama(bench)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        bench.say(f"  weights: {format_bytes(num_bytes)}, read for each token")
        if bench.is_cpu:
            bench.say("  a CPU uses weights where they lie: nothing is copied, and there is no link to keep up with")
        placed = bench.seconds(partial(cpu_offload, model, bench.device))
        first = bench.seconds(partial(one_token, bench, model))
        bench.row(
            Row(
                "headway, cpu_offload: pinning the weights",
                placed,
                "s",
                note=f"then {first:.2f} s for the first forward",
            )
        )
        speed = tokens_a_second(bench, model, bench.choose(5, 5, 2))
        link = "main memory's bandwidth" if bench.is_cpu else "the link's bandwidth"
        bench.row(Row("headway, cpu_offload: weights", speed * num_bytes / 1e9, "GB/s", bandwidth / 1e9, link))
        pace = offload_pace(model)
        bench.row(
            Row("headway, cpu_offload: one token a forward", speed, "tokens/s", note=pace.words() if pace else "")
        )
        del model
    theirs(bench)


def theirs(bench: Bench) -> None:
    """The same by Accelerate."""
    if not HAS_ACCELERATE:
        bench.row(Row("accelerate, cpu_offload", note=ACCELERATE_MISSING))
        return
    from accelerate import cpu_offload as their_cpu_offload

    with bench.attempt("accelerate, cpu_offload"):
        model = llama(bench)
        placed = bench.seconds(partial(their_cpu_offload, model, execution_device=bench.device))
        first = bench.seconds(partial(one_token, bench, model))
        bench.row(
            Row("accelerate, cpu_offload: placing", placed, "s", note=f"then {first:.2f} s for the first forward")
        )
        bench.row(
            Row(
                "accelerate, cpu_offload: one token a forward",
                tokens_a_second(bench, model, bench.choose(3, 5, 2)),
                "tokens/s",
            )
        )


def llama(bench: Bench) -> torch.nn.Module:
    """Built without memory, then filled with random numbers in host memory, which the device draws where there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    kind = torch.float32 if bench.is_cpu else torch.bfloat16
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(LlamaConfig(**bench.choose(SEVEN, SMALL, SMALLEST)))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            drawn = torch.empty(parameter.shape, dtype=kind, device=bench.device).normal_(0.0, 0.02)
            setattr(module, name, torch.nn.Parameter(drawn.cpu(), requires_grad=False))
    result: torch.nn.Module = model.eval()
    return result


def one_token(bench: Bench, model: Callable[..., Any]) -> None:
    """One forward with one token."""
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long, device=bench.device), use_cache=False)


def tokens_a_second(bench: Bench, model: Callable[..., Any], num_forwards: int) -> float:
    """One token a forward, after two to learn the order."""
    token = torch.ones(1, 1, dtype=torch.long, device=bench.device)

    def forwards(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                model(input_ids=token, use_cache=False)

    forwards(2)
    return num_forwards / bench.seconds(lambda: forwards(num_forwards))
