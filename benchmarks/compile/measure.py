"""torch.compile at prepare(), whole and by regions, beside torch's own: what the first update costs, and a step after that.

A GPT of 6 blocks on the CPU with inductor, one thread. Each row is compiled in a process of its own with an empty cache, so that
nobody finds what another one compiled. CPU time, the C++ compiler's included. Steps are timed in turn within a process, compiled
beside uncompiled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.timing import children, interleave, save, summary
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
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (batch, length, width) to the same."""
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class GPT(torch.nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, length) to logits (batch, length, 256)."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stepper(is_ours: bool, by_regions: bool | None) -> Callable[[], None]:
    """A function that makes one update."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(0, 256, (BATCH, LENGTH))
    if not is_ours:
        for module in [] if by_regions is None else model.blocks if by_regions else [model]:
            module.compile()

        def by_hand() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return by_hand
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=by_regions)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model, prepared = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        prepared.step()
        prepared.zero_grad()

    return step


def one(name: str) -> None:
    """Print what a row takes to its first update, and its steps beside uncompiled ones."""
    torch.set_num_threads(1)
    plain = stepper(False, None)
    plain()
    began = time.process_time() + children()
    run = stepper(*ROWS[name])
    run()
    first = time.process_time() + children() - began
    found = interleave({"uncompiled": plain, name: run}, STEPS)
    ratios = [mine[1] / base[1] for mine, base in zip(found[name], found["uncompiled"])]
    print(json.dumps({"first": first, "ratios": ratios}))


def main(rounds: int) -> None:
    """Measure and save."""
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
                ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            said = json.loads(ran.stdout.splitlines()[-1])
            firsts[name].append(round(said["first"], 2))
            ratios[name] += said["ratios"]
    rows = {
        name: {
            "CPU seconds to the first update": sorted(firsts[name]),
            "CPU time of a step / uncompiled": summary(ratios[name]),
        }
        for name in ROWS
    }
    save("compile", "s", rows)


if __name__ == "__main__":
    argument = sys.argv[1] if len(sys.argv) > 1 else "3"
    main(int(argument)) if argument.isdigit() else one(argument)
