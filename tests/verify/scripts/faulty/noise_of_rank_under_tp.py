"""A GPT with noise on its embeddings (NEFTune), whose matrices are split over two ranks.

Run: -n 2 --strategy tp

Fault: Each rank adds different noise to the activations that all ranks of the group share.
Expect: same result under the layout: uniform_ draws other numbers on each rank, generator seeded with the rank
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headway import Accelerator, TensorParallelOptions, set_seed


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


PLAN = {
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class NoisyGPT(GPT):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, ids):
        x = self.tok(ids)
        if self.training:
            x = x + 0.1 * torch.empty(x.shape).uniform_(-1, 1, generator=self.generator)
        x = x + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    set_seed(3)
    accelerator = Accelerator(kwargs_handlers=[TensorParallelOptions(plan=PLAN)])
    ids = torch.randint(0, 32, (64, 16))
    loader = DataLoader(ids, batch_size=8, shuffle=True)
    model = NoisyGPT(torch.Generator().manual_seed(100 + accelerator.process_index))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
