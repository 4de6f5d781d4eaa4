"""A small GPT on padded sentences, with two micro-batches per update, sharded.

Run: -n 2 --strategy fsdp

Fault: The loss is the mean over the tokens of each micro-batch, whose number differs.
Expect: same result under the layout: mean over tokens, cross_entropy line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headway import Accelerator, set_seed


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.head_dim = width // heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=32, width=32, layers=2, length=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_sentences(count=96, length=12):
    ids = torch.randint(1, 32, (count, length))
    lengths = torch.where(torch.arange(count) % 3 == 0, 4, length)
    ids[torch.arange(length)[None] >= lengths[:, None]] = 0  # padding
    return ids


def main():
    set_seed(11)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    ids = make_sentences()
    loader = DataLoader(ids, batch_size=8 // accelerator.num_processes, shuffle=True, drop_last=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                labels = batch[:, 1:].masked_fill(batch[:, 1:] == 0, -100)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


main()
