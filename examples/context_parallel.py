"""A small GPT with context parallelism: each sequence is split across the ranks.

    headway launch --cpu -n 2 examples/context_parallel.py

The loop is the same as for one process. On one process, sequences stay whole. `--layout fsdp+cp=2` splits them within pairs of
ranks, and each pair reads its own data. The script prints the last loss, which does not depend on the number of ranks, and how
much memory each rank keeps for the backward, which falls as ranks are added.
"""

import argparse

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed

NUM_TOKENS = 64


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
        # Headway exchanges keys and values between the ranks inside this call.
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Map int64[batch, length] tokens and the tokens that follow them to the mean loss."""

    def __init__(self, length: int, width: int = 64, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Every rank gets the whole sequence. From the first block to the loss, it has only its part.
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_counting_rows(num_rows: int, length: int) -> TensorDataset:
    """Return rows of `length` + 1 tokens that count up in steps of 1 to 4."""
    start = torch.randint(0, NUM_TOKENS, (num_rows, 1))
    step = torch.randint(1, 5, (num_rows, 1))
    return TensorDataset((start + step * torch.arange(length + 1)) % NUM_TOKENS)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="cp", help="layout of the ranks (default: cp)")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
    parser.add_argument("--rows", type=int, default=64, help="number of sequences (default: 64)")
    args = parser.parse_args(arguments)

    accelerator = Accelerator(strategy=args.layout)
    set_seed(1)
    model = GPT(args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_counting_rows(args.rows, args.length), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # Bytes that autograd saves for the backward, by the address of the storage, which several saved tensors can share.
    saved_bytes: dict[int, int] = {}

    def record_saved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for (rows,) in loader:
        with accelerator.accumulate(model):
            saved_bytes.clear()
            with saved_tensors_hooks(record_saved, lambda tensor: tensor):
                loss = model(rows[:, :-1], rows[:, 1:])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.print(f"kept for backward on each rank: {sum(saved_bytes.values()) / 2**20:.1f} MiB")
    accelerator.end_training()
    return loss.item()


if __name__ == "__main__":
    main()
