"""A language model trained with DeepSpeed's ZeRO stage 3. Headway fills in its settings.

    pip install deepspeed
    headway launch --cpu -n 2 examples/zero.py

The loop is the same as for any layout. Values that DeepSpeed needs (batch sizes, accumulation, precision) are "auto" in its
configuration, and Headway fills them in. The training text is the source of these examples. Prints the loss and the gradient norm
at every tenth update.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from headway import Accelerator, DeepSpeedPlugin

LENGTH, WIDTH, UPDATES = 64, 64, 30
SETTINGS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 100_000},
}


class Model(nn.Module):
    """A small transformer from bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def read_rows() -> torch.Tensor:
    """Return the source of the example files as rows of LENGTH bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    ids = torch.tensor(list(text))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def main() -> float:
    """Train for UPDATES updates, and return the last loss."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=SETTINGS), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(read_rows(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss = torch.zeros(())
    while accelerator.num_updates < UPDATES:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    update = accelerator.num_updates
                    if update % 10 == 0:
                        accelerator.print(f"update {update}: loss {loss:.3f}, gradient norm {norm:.3f}")
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates == UPDATES:
                break
    mean_loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"after {accelerator.num_updates} updates: loss {mean_loss:.3f}")
    return mean_loss


if __name__ == "__main__":
    main()
