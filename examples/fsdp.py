"""A small GPT with FSDP: parameters, gradients and optimizer state are sharded across the ranks.

    headway launch --cpu -n 2 examples/fsdp.py

The loop is the same as for one process. Prints how many parameters the first rank keeps, and the mean loss of each epoch.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ShardingOptions, set_seed

WIDTH, NUM_BLOCKS, LENGTH, NUM_TOKENS = 64, 4, 32, 96
NUM_EPOCHS = 4


class Block(nn.Module):
    """A residual block: causal attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states to hidden states of the same shape."""
        is_later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=is_later, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small GPT whose head shares its matrix with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position."""
        x = self.tokens(ids) * 0.1
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_counting_rows() -> TensorDataset:
    """Return rows of tokens that count up from a random number, in steps of one, two or three."""
    start = torch.randint(0, NUM_TOKENS, (512, 1))
    step = torch.randint(1, 4, (512, 1))
    return TensorDataset((start + step * torch.arange(LENGTH)) % NUM_TOKENS)


def main() -> float:
    """Train, and return the mean loss of the last epoch."""
    # Each block is a unit: its parameters are gathered before it runs, and freed afterwards.
    accelerator = Accelerator(strategy="fsdp", kwargs_handlers=[ShardingOptions(units=[Block])])
    set_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_total, num_local = 0, 0
    for parameter in model.parameters():
        num_total += parameter.numel()
        num_local += parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
    accelerator.print(f"rank 0 keeps {num_local:,} of {num_total:,} parameters")
    for epoch in range(NUM_EPOCHS):
        loss_sum, num_rows = 0.0, 0
        for (ids,) in loader:
            with accelerator.accumulate(model):
                logits = model(ids)[:, :-1]
                loss = nn.functional.cross_entropy(logits.reshape(-1, NUM_TOKENS), ids[:, 1:].reshape(-1))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.item() * len(ids)
            num_rows += len(ids)
        mean_loss = accelerator.reduce_mean(loss_sum, num_rows).item()  # over the rows of all ranks
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.3f}")
    accelerator.end_training()
    return mean_loss


if __name__ == "__main__":
    main()
