"""A language model on a stream of tokens that continues from pass to pass, like an endless corpus.

Fault: the stream keeps its position in an attribute without state_dict, and is not registered; a resumed run reads the
corpus from its beginning. A related report is datasets#8308.
Expect: resume is exact: the samples after the resume are those of the first pass; a stream without state.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Corpus(IterableDataset):
    """Windows of one long text. Each pass yields the next 16 of them."""

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length
        self.next_window = 0

    def __iter__(self):
        for _ in range(16):
            first = self.next_window * self.length % (len(self.tokens) - self.length - 1)
            self.next_window += 1
            yield self.tokens[first : first + self.length + 1]


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/corpus", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    text = torch.randint(0, 16, (1000,)).cumsum(0) % 16
    loader = DataLoader(Corpus(text, 9), batch_size=8 // accelerator.num_processes)
    model = Bigrams()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(5):
        for batch in loader:
            with accelerator.accumulate(model):
                scores = model(batch[:, :-1])
                accelerator.backward(nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
