"""torch.compile in prepare(), whole or by regions, compared with torch's own: cost of the first update, and of later steps.

A GPT of 6 blocks on the CPU with inductor, one thread. Each row is compiled in a separate process with an empty cache, so that
no row profits from another. Times are CPU time and include the C++ compiler. Within a process, compiled and uncompiled steps are
timed in turn.

Run it with `python -m benchmarks.compile.measure`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.timing import get_children_cpu_seconds, save_result, summarize, time_interleaved
from headway import Accelerator, TorchDynamoPlugin

DEPTH, WIDTH, HEADS, LENGTH, BATCH = 6, 128, 4, 64, 4
STEPS = 10
ROWS = {
    "model.compile() by hand": (False, False),
    "headway, whole": (True, False),
    "block.compile() by hand": (False, True),
    "headway, by regions": (True, True),
}


class Block(torch.nn.Module):
    """Transformer block: attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states (batch, length, width) to hidden states of the same shape."""
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (projected.view(shape).transpose(1, 2) for projected in self.qkv(self.first(x)).chunk(3, dim=-1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class GPT(torch.nn.Module):
    """Small GPT from tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, length, 256)."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_step(is_ours: bool, by_regions: bool | None) -> Callable[[], None]:
    """Return a function that makes one update.

    Args:
        is_ours: Whether Headway prepares the model.
        by_regions: Whether to compile the blocks one by one. None leaves a hand-written loop uncompiled.
    """
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(0, 256, (BATCH, LENGTH))
    if not is_ours:
        for module in [] if by_regions is None else model.blocks if by_regions else [model]:
            module.compile()

        def plain_step() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return plain_step
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=by_regions)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model, prepared = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        prepared.step()
        prepared.zero_grad()

    return step


def measure_row(name: str) -> None:
    """Print the CPU seconds until the end of the first update, and the ratio of later steps to uncompiled ones, as JSON."""
    torch.set_num_threads(1)
    uncompiled = make_step(False, None)
    uncompiled()
    start = time.process_time() + get_children_cpu_seconds()
    run = make_step(*ROWS[name])
    run()
    first = time.process_time() + get_children_cpu_seconds() - start
    times = time_interleaved({"uncompiled": uncompiled, name: run}, STEPS)
    ratios = [compiled[1] / base[1] for compiled, base in zip(times[name], times["uncompiled"])]
    print(json.dumps({"first": first, "ratios": ratios}))


def main(rounds: int) -> None:
    """Measure every row `rounds` times and write result.json."""
    firsts: dict[str, list[float]] = {name: [] for name in ROWS}
    ratios: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name in ROWS:
            with tempfile.TemporaryDirectory() as cache:
                environment = {
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": cache,
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                }
                command = [sys.executable, "-m", "benchmarks.compile.measure", name]
                finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            measured = json.loads(finished.stdout.splitlines()[-1])
            firsts[name].append(round(measured["first"], 2))
            ratios[name] += measured["ratios"]
    rows = {
        name: {
            "CPU seconds to the first update": sorted(firsts[name]),
            "CPU time of a step / uncompiled": summarize(ratios[name]),
        }
        for name in ROWS
    }
    save_result("compile", "s", rows)


if __name__ == "__main__":
    argument = sys.argv[1] if len(sys.argv) > 1 else "3"
    main(int(argument)) if argument.isdigit() else measure_row(argument)
