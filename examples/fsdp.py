"""A GPT whose parameters, gradients and optimizer state are sharded across the ranks. The loop is the same as for one process.

headway launch --cpu -n 2 examples/fsdp.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ShardingOptions, set_seed

WIDTH, NUM_BLOCKS, LENGTH, WORDS = 64, 4, 32, 96


class Block(nn.Module):
    """A residual block: causal attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the shape of its input."""
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        normed = self.first(x)
        x = x + self.attention(normed, normed, normed, attn_mask=ahead, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A small GPT whose head shares its matrix with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next word at each position."""
        x = self.tokens(ids) * 0.1
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def counting() -> TensorDataset:
    """Rows that count upwards from a random number, in steps of one, two or three."""
    first, step = torch.randint(0, WORDS, (512, 1)), torch.randint(1, 4, (512, 1))
    return TensorDataset((first + step * torch.arange(LENGTH)) % WORDS)


def main() -> float:
    """Train; returns the last epoch's mean loss."""
    accelerator = Accelerator(strategy="fsdp", kwargs_handlers=[ShardingOptions(units=[Block])])
    set_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(counting(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    accelerator.print(f"{sum(p.numel() for p in model.parameters())} parameters, of which this rank keeps {own}")
    mean = float("nan")
    for epoch in range(4):
        total = count = 0.0
        for (ids,) in loader:
            with accelerator.accumulate(model):
                logits = model(ids)[:, :-1]
                loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total, count = total + loss.item() * len(ids), count + len(ids)
        mean = float(accelerator.reduce_mean(total, count))
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    main()
