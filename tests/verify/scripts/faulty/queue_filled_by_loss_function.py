"""Contrastive learning with a queue of earlier embeddings as negatives, and automatic micro-batching.

Fault: the loss function puts its embeddings into the queue; a batch that is run again after an out-of-memory error puts
them there a second time.
Expect: out of memory is harmless: loss differs after the replay; a side effect of the loss function (Queue.add).
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Queue:
    def __init__(self, size, width):
        self.rows = normalize(torch.randn(size, width), dim=1)

    def add(self, rows):
        self.rows = torch.cat((rows.detach(), self.rows))[: len(self.rows)]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/queue", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    x = torch.randn(96, 6)
    views = TensorDataset(x + 0.1 * torch.randn(96, 6), x + 0.1 * torch.randn(96, 6))
    loader = DataLoader(views, batch_size=8 // accelerator.num_processes, shuffle=True)
    queue = Queue(32, 4)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(queue)
    accelerator.resume()

    def contrast(piece):
        first, second = (normalize(model(view), dim=1) for view in piece)
        positive = (first * second).sum(1, keepdim=True)
        scores = torch.cat((positive, first @ queue.rows.T), 1) / 0.2
        queue.add(second)
        return cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    for _ in accelerator.epochs(1):
        for batch in loader:
            accelerator.forward_backward(batch, contrast)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
