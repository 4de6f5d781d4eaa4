"""A small language model written by hand, which predicts each next token.

Fault: scaled_dot_product_attention is called without is_causal=True, so each position sees the token that it predicts.
Reported as paiml/entrenar#310; transformers#48745 is the same in four models.
Expect: nothing leaks: changing token t changes the losses of positions before t; the attention lacks a causal mask.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

WIDTH, VOCABULARY, LENGTH = 16, 20, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(x + self.attention(x)))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/unmasked", automatic_checkpoint_naming=True, total_limit=2)
)
rows = torch.randint(0, VOCABULARY, (80, LENGTH + 1))
loader = DataLoader(TensorDataset(rows), batch_size=8 // accelerator.num_processes, shuffle=True)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            scores = model(tokens[:, :-1])
            accelerator.backward(cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
