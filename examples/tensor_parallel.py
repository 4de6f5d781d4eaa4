"""A small GPT with tensor parallelism: its matrices are split across the ranks.

    headway launch --cpu -n 2 examples/tensor_parallel.py

The loop is the same as for one process. On one process, the model stays whole. `--layout fsdp+tp=2` splits the matrices within
pairs of ranks and shards the parameters across the pairs. `--sequence_parallel` splits the activations between the matrices along
the sequence. The script prints the loss of each epoch, and the shape of one matrix on each rank.
"""

import argparse

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, TensorParallelOptions, set_seed

NUM_TOKENS, LENGTH = 64, 32

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
    """Causal attention, whose heads are divided among the ranks."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, heads, length, head_dim]. The number of heads is -1, as each rank has only some of them."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split_heads(self.q(x)), self.split_heads(self.k(x)), self.split_heads(self.v(x))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Transformer block: attention and a perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Map int64[batch, length] tokens to float32[batch, length, NUM_TOKENS] logits of the next token."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.head.weight = self.tokens.weight  # remains one shared parameter
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
    parser.add_argument("--layout", default="tp", help="layout of the ranks (default: tp)")
    parser.add_argument("--sequence_parallel", action="store_true", help="split activations along the sequence")
    parser.add_argument("--loss_parallel", action="store_true", help="split the logits along the vocabulary")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    args = parser.parse_args(arguments)

    options = TensorParallelOptions(PLAN, args.sequence_parallel, args.loss_parallel)
    accelerator = Accelerator(strategy=args.layout, kwargs_handlers=[options])
    set_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(256), batch_size=16, shuffle=True)
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
    local_weight = weight.to_local() if isinstance(weight, DTensor) else weight
    accelerator.print(f"each rank has {tuple(local_weight.shape)} of {tuple(weight.shape)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
