"""One rank of the measurement: a training step of a small GPT whose blocks are sharded over the ranks."""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import headway
from benchmarks.timing import HAS_ACCELERATE, interleave, summary

STEPS = 5
ROWS, LENGTH, WORDS = 8, 64, 512
SIZES = {"d=64": (64, 4), "d=256": (256, 4)}


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual block."""
        q, k, v = (part.unsqueeze(1) for part in self.attention(self.first(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(seen)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The next word's cross entropy."""
    return nn.functional.cross_entropy(model(ids)[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def parts(size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = GPT(*SIZES[size])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def by_hand(size: str, ids: torch.Tensor) -> Callable[[], None]:
    """As torch's documentation shows it."""
    model, _ = parts(size)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(STEPS):
            loss_of(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()

    return run


def prepared(accelerator: Any, size: str, ids: torch.Tensor) -> Callable[[], None]:
    """The same loop through an Accelerator."""
    model, optimizer = accelerator.prepare(*parts(size))
    if not isinstance(model, FSDPModule):
        raise TypeError(f"prepare() gave a {type(model).__name__}, which is not sharded")

    def run() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return run


def peer() -> Any:
    """Accelerate's Accelerator with FSDP2; None where it is not installed or does not run on CPUs."""
    if not HAS_ACCELERATE:
        return None
    import accelerate

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return accelerate.Accelerator(fsdp_plugin=plugin, cpu=True)


def main() -> None:
    """Measure; rank 0 writes the rows to the path given."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    own = headway.Accelerator(cpu=True, strategy="fsdp")
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(own.process_index))
    rows: dict[str, Any] = {}
    other: Any = None
    try:
        other = peer()
    except Exception as error:
        rows["Accelerate"] = f"{type(error).__name__}: {error}"[:200]
    for size in SIZES:
        passes = {
            "fully_shard": by_hand(size, ids), "fully_shard, again (A/A)": by_hand(size, ids),
            "headway": prepared(own, size, ids),
        }  # fmt: skip
        if other is not None:
            try:
                passes["accelerate"] = prepared(other, size, ids)
            except Exception as error:  # on every rank alike, or the launcher ends the run
                passes.pop("accelerate", None)
                rows["Accelerate"] = f"{type(error).__name__}: {error}"[:200]
        found = interleave(passes, repeats)
        floor = [cpu for _, cpu in found["fully_shard"]]
        for name, pairs in found.items():
            used = [cpu for _, cpu in pairs]
            rows[f"{size}: {name}"] = summary(used, 1e3 / STEPS)
            rows[f"{size}: {name}, times fully_shard"] = summary([one / base for one, base in zip(used, floor)])
    if own.is_main_process:
        path.write_text(json.dumps(rows))
    own.end_training()


if __name__ == "__main__":
    main()
