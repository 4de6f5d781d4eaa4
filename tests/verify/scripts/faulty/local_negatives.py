"""Two towers that are trained by a contrastive loss with the negatives of the batch.

Fault: the negatives are those of this rank's rows alone, so with more processes each row has fewer of them. Asked about
in facebookresearch/simsiam#20 and microsoft/UniCL#5.
Expect: same result on n processes: the loss itself differs at update 1; rows depend on other rows, gather the
embeddings.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(4, 5)

    def forward(self, left, right):
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/towers", automatic_checkpoint_naming=True, total_limit=2)
)
causes = torch.randn(96, 3)
pairs = TensorDataset(causes @ torch.randn(3, 6), causes @ torch.randn(3, 4))
loader = DataLoader(pairs, batch_size=12 // accelerator.num_processes, shuffle=True, drop_last=True)
model = Towers()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for left, right in loader:
        with accelerator.accumulate(model):
            a, b = model(left, right)
            scores = 4 * a @ b.T
            accelerator.backward(cross_entropy(scores, torch.arange(len(a), device=scores.device)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
