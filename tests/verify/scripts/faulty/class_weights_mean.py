"""A classifier for rare events, with weights per class in the loss.

Fault: cross_entropy(weight=) divides by the sum of the weights of this rank's labels, which differs from rank to rank;
so the update is a mean of means. Reported in general as torchtune#1875.
Expect: same result on n processes: the loss is a weighted mean; its weight is the sum of the class weights of the
batch.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(1)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/rare", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = (x.sum(1) > 2).long()
class_weights = torch.tensor([1.0, 9.0])
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels, weight=class_weights)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
