"""Time to build two models on the meta device: one of 100 billion parameters, and a transformers Llama of 70 billion.

`python benchmarks/run.py meta_model` runs it, and rewrites the table in benchmarks/README.md.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved
from headway import init_empty_weights


class Block(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)


def build_chain() -> nn.Module:
    """Build 1,000 blocks of 104 million parameters each."""
    return nn.ModuleList(Block(3600) for _ in range(1000))


def build_llama() -> nn.Module:
    """Build Llama 70B with 80 layers."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    """Measure all variants in turn and write result.json."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "torch.device('meta')": lambda: torch.device("meta"),
        "torch.device('meta'), again (A/A)": lambda: torch.device("meta"),
        "headway": init_empty_weights,
        "headway, include_buffers=True": lambda: init_empty_weights(include_buffers=True),
    }
    if HAS_ACCELERATE:
        import accelerate

        contexts["accelerate"] = accelerate.init_empty_weights
        contexts["accelerate, include_buffers=True"] = lambda: accelerate.init_empty_weights(include_buffers=True)

    def make_pass(
        context: Callable[[], AbstractContextManager[Any]], build: Callable[[], nn.Module]
    ) -> Callable[[], Any]:
        def run() -> None:
            with context():
                build()

        return run

    passes = {
        f"{model}: {name}": make_pass(context, build)
        for model, build in (("100 B in 1,000 blocks", build_chain), ("Llama 70B", build_llama))
        for name, context in contexts.items()
    }
    rows = make_rows(time_interleaved(passes, get_num_repeats(7)), 1.0)
    save_result("meta_model", "s", rows, "The added columns compare with the first row")


if __name__ == "__main__":
    main()
