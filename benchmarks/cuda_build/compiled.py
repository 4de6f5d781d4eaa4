"""Memory that torch's allocator takes for compiled models, whole or block by block, compared with the forecast.

`python -m benchmarks.cuda_build.compiled [MODEL ...]` runs on the simulated runtime without values: inductor and Triton compile for
the device, but the kernels compute nothing. The loops are plain PyTorch with AdamW.
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
MODES = ("whole", "by block", "not compiled")
TOKENS, BATCH = 512, 8


class Block(nn.Module):
    """Residual perceptron block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs plus the block's output."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A chain of blocks that returns its loss: the mean of the squared outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(1024) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


def build_model(name: str) -> tuple[nn.Module, Any, Callable[[int], dict[str, torch.Tensor]]]:
    """Return (model, its blocks, function from a batch size to a batch) for a name in CASES."""
    import transformers as hf

    from headway.forecasting.tracing.attention_masks import skip_causal_mask

    def make_tokens(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    if name == "MLP":
        model = MLP()
        return model, model.blocks, lambda size: {"x": torch.zeros(size, TOKENS, 1024)}
    if name == "GPT-2":
        gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4, use_cache=False))
        return skip_causal_mask(gpt2), gpt2.transformer.h, make_tokens
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=32000, use_cache=False))
    return skip_causal_mask(llama), llama.model.layers, make_tokens


def build_compiled(name: str, mode: str) -> nn.Module:
    """Build a model, and compile all of it, each block or nothing, according to `mode`."""
    model, blocks, _ = build_model(name)
    for module in {"not compiled": [], "whole": [model], "by block": blocks}[mode]:
        module.compile()
    return model


def measure_run(name: str, mode: str, precision: str) -> tuple[int, int]:
    """Train, and return the allocator's peaks of the third update: (allocated bytes, reserved bytes)."""
    with torch.device("cuda"):
        model = build_compiled(name, mode)
    make_batch = build_model(name)[2]
    optimizer = torch.optim.AdamW(model.train().parameters())
    for update in range(3):
        if update == 2:
            torch.cuda.reset_peak_memory_stats()
        batch = {key: value.cuda() for key, value in make_batch(BATCH).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(**batch)
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def forecast_run(name: str, mode: str, precision: str) -> tuple[int, int]:
    """Return the forecast's (allocated bytes, reserved bytes)."""
    import headway

    forecast = headway.forecast(
        lambda: build_compiled(name, mode), build_model(name)[2], batch_size=BATCH, device="h100", precision=precision, largest=False,
        loss=(lambda loss, _: loss) if name == "MLP" else None,
    )  # fmt: skip
    return int(forecast.allocated), int(forecast.reserved)


def run_in_new_process(*arguments: str) -> tuple[int, int]:
    """Run this file in a separate process, and return the bytes that it prints last."""
    environment = os.environ | {"SIMULATED_CUDA": "h100", "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-m", "benchmarks.cuda_build.compiled", *arguments]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if finished.returncode:
        sys.exit(finished.stderr[-3000:])
    allocated, reserved = json.loads(finished.stdout.splitlines()[-1])
    return allocated, reserved


def main() -> None:
    """Print the table, or one result if the arguments start with "real" or "forecast"."""
    if sys.argv[1:2] in (["real"], ["forecast"]):
        print(json.dumps((measure_run if sys.argv[1] == "real" else forecast_run)(*sys.argv[2:5])))
        return
    print(
        "| model | precision | compiled | allocated | forecast | error | reserved | forecast | error |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for name in sys.argv[1:] or CASES:
        for mode in MODES:
            case = name, mode, CASES[name]
            pairs = zip(run_in_new_process("real", *case), run_in_new_process("forecast", *case))
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in pairs)
            print(f"| {name} | {CASES[name]} | {mode} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
