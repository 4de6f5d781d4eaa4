"""A small GPT with pipeline parallelism: its blocks are divided among the ranks.

    headway launch --cpu -n 2 examples/pipeline.py

Each rank holds consecutive blocks, and micro-batches pass from one rank to the next. On one process, the same script trains the whole
model. `--schedule interleaved` (or gpipe, zero_bubble, zbv; the default is 1f1b) changes the order of the micro-batches.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, PipelineOptions, set_seed


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.attention, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = self.attention(self.norm(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projections)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight  # shared by the first and the last stage; Headway sums its gradients
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_counting_rows(num_rows: int, length: int) -> TensorDataset:
    """Return rows of tokens that count up in steps of 1 to 4."""
    first, step = torch.randint(0, 64, (num_rows, 1)), torch.randint(1, 5, (num_rows, 1))
    return TensorDataset((first + step * torch.arange(length + 1)) % 64)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="pp")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args(arguments)

    options = PipelineOptions(schedule=args.schedule, num_microbatches=4)
    accelerator = Accelerator(strategy=args.layout, kwargs_handlers=[options])
    set_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(256, 32), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def compute_loss(rows: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for epoch in range(args.epochs):
        for (rows,) in loader:
            # The schedule calls compute_loss for each micro-batch, so forward and backward are one call.
            loss = accelerator.forward_backward(rows, compute_loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    num_own = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    accelerator.print(f"this rank has {num_own:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    accelerator.end_training()


if __name__ == "__main__":
    main()
