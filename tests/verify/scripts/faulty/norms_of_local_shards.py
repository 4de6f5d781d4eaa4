"""A net with layer-wise trust ratios (as in LARS), computed by hand from norms of weights and gradients.

Run: -n 2 --strategy fsdp

Fault: the norms are those of to_local(), this rank's shard, so under fsdp each rank scales its rows by its own ratio.
Reported for clipping as pytorch#72548 and pytorch#170862.
Expect: same result under the layout: equal with ddp, different with fsdp from update 1 on; norms of local shards.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def get_local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def scale_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            weight, gradient = get_local(parameter), get_local(parameter.grad)
            gradient.mul_(0.1 * weight.norm() / (gradient.norm() + 1e-6))


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/trust", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(80, 6)
    y = x.sin().sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for rows, expected in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), expected))
                scale_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
