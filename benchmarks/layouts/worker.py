"""One rank of the measurement: training steps of a small GPT whose blocks are sharded over the ranks."""

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
from benchmarks.timing import HAS_ACCELERATE, make_rows, time_interleaved

STEPS = 5
ROWS, LENGTH, VOCABULARY = 8, 64, 512
SIZES = {"d=64": (64, 4), "d=256": (256, 4)}


class Block(nn.Module):
    """Transformer block: attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states (rows, length, width) to hidden states of the same shape."""
        q, k, v = (projected.unsqueeze(1) for projected in self.attention(self.first(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token ids (rows, length) to logits (rows, length, VOCABULARY)."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the next token."""
    return nn.functional.cross_entropy(model(ids)[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def build_model_and_optimizer(size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model and its optimizer; they are the same on all ranks."""
    torch.manual_seed(0)
    model = GPT(*SIZES[size])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def build_plain_loop(size: str, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs STEPS hand-written steps, as torch's documentation shows them."""
    model, _ = build_model_and_optimizer(size)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(STEPS):
            compute_loss(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()

    return run


def build_library_loop(accelerator: Any, size: str, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs STEPS steps with an Accelerator."""
    model, optimizer = accelerator.prepare(*build_model_and_optimizer(size))
    if not isinstance(model, FSDPModule):
        raise TypeError(f"prepare() gave a {type(model).__name__}, which is not sharded")

    def run() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, ids))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return run


def make_accelerate_accelerator() -> Any:
    """Return Accelerate's Accelerator with FSDP2, or None without Accelerate."""
    if not HAS_ACCELERATE:
        return None
    import accelerate

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return accelerate.Accelerator(fsdp_plugin=plugin, cpu=True)


def main() -> None:
    """Measure all variants in turn; rank 0 writes the rows to the path in sys.argv[1]."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    ours = headway.Accelerator(cpu=True, strategy="fsdp")
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(ours.process_index))
    rows: dict[str, Any] = {}
    theirs: Any = None
    try:
        theirs = make_accelerate_accelerator()
    except Exception as error:
        rows["accelerate"] = f"{type(error).__name__}: {error}"
    for size in SIZES:
        passes = {
            "fully_shard": build_plain_loop(size, ids), "fully_shard, again (A/A)": build_plain_loop(size, ids),
            "headway": build_library_loop(ours, size, ids),
        }  # fmt: skip
        if theirs is not None:
            try:
                passes["accelerate"] = build_library_loop(theirs, size, ids)
            except Exception as error:  # all ranks fail in the same way, or the launcher ends the run
                passes.pop("accelerate", None)
                rows["accelerate"] = f"{type(error).__name__}: {error}"
        size_rows = make_rows(time_interleaved(passes, repeats), 1e3 / STEPS)
        rows |= {f"{size}: {name}": row for name, row in size_rows.items() if not isinstance(row, str)}
    if ours.is_main_process:
        path.write_text(json.dumps(rows))
    ours.end_training()


if __name__ == "__main__":
    main()
