"""A small GPT with tensor parallelism: its matrices are split across the ranks.

    headway launch --cpu -n 2 examples/tensor_parallel.py

The loop is the same as for one process. On one process, the model stays whole. `--layout fsdp+tp=2` splits the matrices within pairs
of ranks and shards the parameters across the pairs. `--sequence_parallel` splits the activations between the matrices along the
sequence.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, TensorParallelOptions, set_seed

# transformers models bring their own plan. A colwise layer splits its outputs, and the rowwise layer after it sums the parts.
PLAN = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1 instead of the number of heads: each rank has only some of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 2, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight  # remains one shared parameter
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
    parser.add_argument("--layout", default="tp")
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--loss_parallel", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args(arguments)

    options = TensorParallelOptions(PLAN, args.sequence_parallel, args.loss_parallel)
    accelerator = Accelerator(strategy=args.layout, kwargs_handlers=[options])
    set_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(256, 32), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    weight = model.blocks[0].up.weight
    accelerator.print(f"each rank has {tuple(getattr(weight, '_local_tensor', weight).shape)} of {tuple(weight.shape)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
