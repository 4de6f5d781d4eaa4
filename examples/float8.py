"""The GPT of fsdp.py with linear layers in float8, sharded: weights are gathered in float8, too.

    pip install torchao
    headway launch --cpu -n 2 examples/float8.py

Prints the mean loss of each epoch, which is close to that of fsdp.py. On hardware without float8, it is emulated.
"""

import torch
from fsdp import GPT, NUM_EPOCHS, NUM_TOKENS, Block, make_counting_rows  # examples/fsdp.py
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, Float8Options, ShardingOptions, set_seed


def has_float8() -> bool:
    """Whether this machine's GPU has float8 matrix units."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def main() -> float:
    """Train, and return the mean loss of the last epoch."""
    options = Float8Options(recipe="tensorwise", keeps=("MultiheadAttention",), emulate=not has_float8())
    accelerator = Accelerator(
        strategy="fsdp", mixed_precision="fp8", kwargs_handlers=[options, ShardingOptions(units=[Block])]
    )
    set_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_counting_rows(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(NUM_EPOCHS):
        loss_sum, num_rows = 0.0, 0
        for (ids,) in loader:
            with accelerator.accumulate(model):
                logits = model(ids)[:, :-1].float()
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
