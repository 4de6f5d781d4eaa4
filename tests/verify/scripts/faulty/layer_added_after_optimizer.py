"""A language model whose vocabulary gets room for special tokens.

Fault: the embeddings for the special tokens are added to the model after the optimizer was made, so they are not
trained.
Expect: what learns, learns: special.weight gets gradients, but belongs to no optimizer; add it before the optimizer is
made.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

WORDS, SPECIAL = 20, 4


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS + SPECIAL)
        self.special = None

    def add_special_tokens(self):
        self.special = nn.Embedding(SPECIAL, 12)

    def forward(self, tokens):
        table = self.words.weight if self.special is None else torch.cat((self.words.weight, self.special.weight))
        return self.head(nn.functional.embedding(tokens, table).cumsum(1).tanh())


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/special", automatic_checkpoint_naming=True, total_limit=2)
)
tokens = torch.randint(0, WORDS + SPECIAL, (80, 8))
loader = DataLoader(TensorDataset(tokens), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model.add_special_tokens()
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
