"""Time of infer_auto_device_map as the number of blocks grows, compared with a walk over the model's tensors.

`python benchmarks/run.py device_map` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved
from headway import compute_module_sizes, infer_auto_device_map, init_empty_weights

SIZES = (500, 1000, 2000, 10_000)
ACCELERATE_SIZES = (500, 1000, 2000)


class Block(nn.Module):
    """Four linear layers and a norm, as in a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


class Chain(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, num_blocks: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embedding.weight


def visit_tensors(model: nn.Module) -> int:
    """Visit all parameters and modules: the floor."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) + len(list(model.named_modules()))


def make_accelerate_placement(model: nn.Module, budgets: dict[Any, int]) -> Callable[[], Any]:
    """Return a function that computes the device map with Accelerate."""
    from accelerate import infer_auto_device_map as infer_with_accelerate

    return lambda: infer_with_accelerate(model, max_memory=dict(budgets), no_split_module_classes=["Block"])


def main() -> None:
    """Measure all variants in turn and write result.json."""
    logging.disable(logging.WARNING)
    passes: dict[str, Callable[[], Any]] = {}
    for size in SIZES:
        with init_empty_weights():
            model = Chain(size)
        share = compute_module_sizes(model)[""] // 4
        budgets: dict[Any, int] = {0: share, 1: share, 2: share, "cpu": 4 * share}
        if not passes:
            passes["walk over 500 blocks"] = lambda model=model: visit_tensors(model)
            passes["walk over 500 blocks, again (A/A)"] = lambda model=model: visit_tensors(model)
        else:
            passes[f"walk over {size} blocks"] = lambda model=model: visit_tensors(model)
        passes[f"headway, {size} blocks"] = lambda model=model, budgets=budgets: infer_auto_device_map(
            model, budgets, "Block"
        )
        if HAS_ACCELERATE and size in ACCELERATE_SIZES:
            passes[f"accelerate, {size} blocks"] = make_accelerate_placement(model, budgets)
    torch.set_num_threads(1)
    save_result(
        "device_map",
        "s",
        make_rows(time_interleaved(passes, get_num_repeats(7)), 1.0),
        "Three accelerators hold a quarter of the model each, the CPU holds the rest. Blocks are not divided",
    )


if __name__ == "__main__":
    main()
