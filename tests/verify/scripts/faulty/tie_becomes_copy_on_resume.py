"""A tied language model that ties its head again after loading a checkpoint.

Fault: After a resume the head is a copy of the embedding, which no optimizer trains.
Expect: resume is exact: head.weight is another parameter / no longer tied to tok.weight after the resume
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed


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


def main():
    set_seed(4)
    project = ProjectConfiguration("runs/tied", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    ids = torch.randint(0, 32, (96, 16))
    loader = DataLoader(ids, batch_size=8 // accelerator.num_processes, shuffle=True)
    model = GPT()
    nn.init.normal_(model.tok.weight, std=0.1)
    model.head.weight = model.tok.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.resume("latest"):
        whole = accelerator.unwrap_model(model)
        whole.head.weight = nn.Parameter(whole.tok.weight.detach().clone())
    for epoch in accelerator.epochs(2):
        for batch in loader:
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()


main()
