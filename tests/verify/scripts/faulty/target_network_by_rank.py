"""A predictor that learns the outputs of a fixed random network, as in random network distillation.

Fault: the fixed network is not prepared, and its weights are drawn from a seed that contains the rank, so each rank
learns a different target.
Expect: same result on n processes: the loss differs at update 1; a model outside prepare has other weights on each
rank.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/distillation", automatic_checkpoint_naming=True, total_limit=2)
)
states = torch.randn(80, 4)
loader = DataLoader(TensorDataset(states), batch_size=8 // accelerator.num_processes, shuffle=True)
predictor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(predictor.parameters(), lr=0.01)
predictor, optimizer, loader = accelerator.prepare(predictor, optimizer, loader)
with torch.random.fork_rng():
    torch.manual_seed(1000 + accelerator.process_index)
    target = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False).to(accelerator.device)
accelerator.resume()

for _ in accelerator.epochs(2):
    for (rows,) in loader:
        with accelerator.accumulate(predictor):
            accelerator.backward(nn.functional.mse_loss(predictor(rows), target(rows)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
