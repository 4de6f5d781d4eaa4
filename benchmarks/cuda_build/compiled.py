"""What torch's own allocator takes where torch.compile compiles a model, whole or block by block, beside the forecast.

`python -m benchmarks.cuda_build.compiled`, on the simulated runtime, without values: inductor and Triton compile for the device, and
the kernels compute nothing. Loops by hand with AdamW. Names of models as arguments choose among them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CASES = {"Llama": "bf16", "GPT-2": "no", "MLP": "no"}
HOWS = ("whole", "by block", "not compiled")
TOKENS, BATCH = 512, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With its input added."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Blocks, and the mean of their output's squares."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(1024) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


def build(name: str) -> tuple[nn.Module, Any, Callable[[int], dict[str, torch.Tensor]]]:
    """The model, its blocks, and what makes a batch."""
    import transformers as hf

    from headway.forecasting.tracing.attention_masks import skip_causal_mask

    def tokens(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    if name == "MLP":
        model = MLP()
        return model, model.blocks, lambda size: {"x": torch.zeros(size, TOKENS, 1024)}
    if name == "GPT-2":
        made = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4, use_cache=False))
        return skip_causal_mask(made), made.transformer.h, tokens
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    made = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=32000, use_cache=False))
    return skip_causal_mask(made), made.model.layers, tokens


def compiled(name: str, how: str) -> nn.Module:
    """By torch.compile."""
    model, blocks, _ = build(name)
    for module in {"not compiled": [], "whole": [model], "by block": blocks}[how]:
        module.compile()
    return model


def real(name: str, how: str, precision: str) -> tuple[int, int]:
    """Allocated and reserved."""
    with torch.device("cuda"):
        model = compiled(name, how)
    batch_of = build(name)[2]
    optimizer = torch.optim.AdamW(model.train().parameters())
    for update in range(3):
        if update == 2:
            torch.cuda.reset_peak_memory_stats()
        batch = {key: value.cuda() for key, value in batch_of(BATCH).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(**batch)
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def predicted(name: str, how: str, precision: str) -> tuple[int, int]:
    """Allocated and reserved, as forecast."""
    import headway

    found = headway.forecast(
        lambda: compiled(name, how), build(name)[2], batch_size=BATCH, device="h100", precision=precision, largest=False,
        loss=(lambda loss, _: loss) if name == "MLP" else None,
    )  # fmt: skip
    return int(found.allocated), int(found.reserved)


def run(*arguments: str) -> tuple[int, int]:
    """What a process prints last."""
    environment = os.environ | {"SIMULATED_CUDA": "h100", "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-m", "benchmarks.cuda_build.compiled", *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if ran.returncode:
        sys.exit(ran.stderr[-3000:])
    allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
    return allocated, reserved


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] in (["real"], ["forecast"]):
        print(json.dumps((real if sys.argv[1] == "real" else predicted)(*sys.argv[2:5])))
        return
    print(
        "| model | precision | compiled | allocated | forecast | | reserved | forecast | |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name in sys.argv[1:] or CASES:
        for how in HOWS:
            told = name, how, CASES[name]
            pairs = zip(run("real", *told), run("forecast", *told))
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in pairs)
            print(f"| {name} | {CASES[name]} | {how} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
