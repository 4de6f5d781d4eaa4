"""A GPT with a handwritten causal mask.

Fault: The mask only hides tokens at least two places ahead, so each position sees the next token, which it must predict.
Expect: nothing leaks: later tokens change earlier outputs; masked_fill or weights @ v line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=2)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(32, 24), nn.Embedding(16, 24)
        self.attention = nn.ModuleList(Attention(24, 3) for _ in range(2))
        self.head = nn.Linear(24, 32)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.attention:
            x = x + layer(x)
        return self.head(x)


def main():
    set_seed(9)
    accelerator = Accelerator()
    ids = torch.randint(0, 32, (96, 14))
    loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
