"""An autoencoder with three losses that are added: a reconstruction, a label, and a penalty on the code."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.label = nn.Linear(3, 4)

    def forward(self, x):
        code = self.encoder(x)
        return code, self.decoder(code), self.label(code)


set_seed(2)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/losses", automatic_checkpoint_naming=True, total_limit=2)
)
kinds = torch.randint(0, 4, (80,))
rows = torch.randn(4, 8)[kinds] + 0.3 * torch.randn(80, 8)
loader = DataLoader(TensorDataset(rows, kinds), batch_size=8 // accelerator.num_processes, shuffle=True)
model = AutoEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            code, rebuilt, scores = model(x)
            losses = {
                "rebuilt": mse_loss(rebuilt, x),
                "label": 0.5 * cross_entropy(scores, y),
                "code": 0.01 * code.square().mean(),
            }
            accelerator.backward(sum(losses.values()))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
accelerator.end_training()
