"""A language model on sentences of very different lengths, padded to the longest of the batch.

Fault: the loss is the mean over this rank's tokens that are not padding, without weight=; ranks with few tokens count
as much as ranks with many. Reported in transformers#34373 and torchtune#1875.
Expect: same result on n processes: the mean is over tokens, not rows; backward(loss, weight=number of tokens).
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed

PAD = 0


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(20, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/tokens", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    sentences = [torch.randint(1, 20, (3 if n % 2 else 14,)) for n in range(80)]
    loader = DataLoader(
        sentences,
        batch_size=8 // accelerator.num_processes,
        shuffle=True,
        collate_fn=lambda rows: pad_sequence(rows, batch_first=True, padding_value=PAD),
    )
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                scores = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
