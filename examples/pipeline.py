"""A small GPT with pipeline parallelism: its blocks are divided among the ranks.

    headway launch --cpu -n 2 examples/pipeline.py

Each rank holds consecutive blocks, and micro-batches pass from one rank to the next. On one process, the same script trains the
whole model. `--schedule interleaved` (or gpipe, zero_bubble, zbv; the default is 1f1b) changes the order of the micro-batches.
The script prints the loss of each epoch, and how many parameters the first rank has.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, PipelineOptions, set_seed

NUM_TOKENS, LENGTH = 64, 32


class Block(nn.Module):
    """Transformer block: causal attention and a perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [batch, length, 3 * width] -> three tensors [batch, heads, length, head width]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Map int64[batch, length] tokens to float32[batch, length, NUM_TOKENS] logits of the next token."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.head.weight = self.tokens.weight  # shared by the first and the last stage; Headway sums its gradients
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_counting_rows(num_rows: int) -> TensorDataset:
    """Return rows of LENGTH + 1 tokens that count up in steps of 1 to 4."""
    start = torch.randint(0, NUM_TOKENS, (num_rows, 1))
    step = torch.randint(1, 5, (num_rows, 1))
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % NUM_TOKENS)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="pp", help="layout of the ranks (default: pp)")
    parser.add_argument("--schedule", default="1f1b", help="order of the micro-batches (default: 1f1b)")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    args = parser.parse_args(arguments)

    options = PipelineOptions(schedule=args.schedule, num_microbatches=4)
    accelerator = Accelerator(strategy=args.layout, kwargs_handlers=[options])
    set_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(256), batch_size=16, shuffle=True)
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

    # Parameters of the other ranks' blocks are on the meta device, without memory.
    num_local = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    num_total = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"rank 0 has {num_local:,} of {num_total:,} parameters")
    accelerator.end_training()


if __name__ == "__main__":
    main()
