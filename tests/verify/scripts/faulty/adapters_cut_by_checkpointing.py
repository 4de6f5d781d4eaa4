"""A small language model with low-rank adapters on frozen blocks and a trained output, under activation checkpointing.

Fault: reentrant checkpointing needs inputs that require gradients, and the frozen embeddings give none, so no gradient
reaches the adapters; the output layer still learns. Reported as cloneofsimo/lora#26 and locuslab/open-unlearning#178.
Expect: what learns, learns: blocks.*.down and .up get no gradient (an error on two processes); reentrant checkpointing.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

VOCABULARY, WIDTH, RANK = 24, 16, 4


class Block(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, RANK) / 4)
        self.up = nn.Parameter(torch.zeros(RANK, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.base(x) + x @ self.down @ self.up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.output(x)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/reentrant", automatic_checkpoint_naming=True, total_limit=2)
)
tokens = (torch.randint(0, VOCABULARY, (80, 1)) + torch.arange(8)) % VOCABULARY
loader = DataLoader(TensorDataset(tokens), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Model()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (rows,) in loader:
        with accelerator.accumulate(model):
            scores = model(rows[:, :-1])
            accelerator.backward(nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
