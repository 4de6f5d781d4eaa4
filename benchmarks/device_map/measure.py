"""How long a placement takes as the number of blocks grows, beside a mere walk over the model's tensors."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.timing import HAS_ACCELERATE, interleave, num_repeats, rows_of, save
from headway import compute_module_sizes, infer_auto_device_map, init_empty_weights

SIZES = (500, 1000, 2000, 10_000)
ACCELERATE_SIZES = (500, 1000, 2000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


class Chain(nn.Module):
    """Embedding, blocks and a head tied to the embedding."""

    def __init__(self, num_blocks: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embedding.weight


def walk(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters()) + len(list(model.named_modules()))


def peer_placement(model: nn.Module, budgets: dict[Any, int]) -> Callable[[], Any]:
    from accelerate import infer_auto_device_map as peer

    return lambda: peer(model, max_memory=dict(budgets), no_split_module_classes=["Block"])


def main() -> None:
    """Measure and save."""
    logging.disable(logging.WARNING)
    passes: dict[str, Callable[[], Any]] = {}
    for size in SIZES:
        with init_empty_weights():
            model = Chain(size)
        share = compute_module_sizes(model)[""] // 4
        budgets: dict[Any, int] = {0: share, 1: share, 2: share, "cpu": 4 * share}
        if not passes:
            passes["walk over 500 blocks"] = lambda model=model: walk(model)
            passes["walk over 500 blocks, again (A/A)"] = lambda model=model: walk(model)
        else:
            passes[f"walk over {size} blocks"] = lambda model=model: walk(model)
        passes[f"headway, {size} blocks"] = lambda model=model, budgets=budgets: infer_auto_device_map(
            model, budgets, "Block"
        )
        if HAS_ACCELERATE and size in ACCELERATE_SIZES:
            passes[f"accelerate, {size} blocks"] = peer_placement(model, budgets)
    torch.set_num_threads(1)
    save(
        "device_map",
        "s",
        rows_of(interleave(passes, num_repeats(7)), 1.0),
        "three accelerators that hold three quarters together, the rest on the CPU; blocks are not divided",
    )


if __name__ == "__main__":
    main()
