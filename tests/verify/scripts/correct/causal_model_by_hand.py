"""A tiny handwritten GPT on padded sentences, with a causal mask, shifted targets, and real tokens as weight.

A bias of keys does not change attention. Its gradient is rounding noise, which Adam scales up to whole steps. On
two processes these 16 numbers differ by a quarter of the learning rate, and nothing else does.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed

VOCABULARY, WIDTH, HEADS, PAD = 24, 16, 2, 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.inner(self.second(x))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(12, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.blocks(x))


def collate(sentences):
    return pad_sequence(sentences, batch_first=True, padding_value=PAD)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/tiny_gpt", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    sentences = [1 + (torch.arange(4 + n % 8) * (1 + n % 3) + n) % (VOCABULARY - 1) for n in range(96)]
    loader = DataLoader(sentences, batch_size=8 // accelerator.num_processes, shuffle=True, collate_fn=collate)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                scores, targets = model(batch[:, :-1]), batch[:, 1:]
                loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
                accelerator.backward(loss, weight=(targets != PAD).sum(), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
