"""A denoiser that learns from rows with noise, drawn in the loop.

Fault: the generator of the noise is seeded with the rank, so the noise of a row depends on the process that has it. The
habit comes from scripts like the one in facebookresearch/detr#297.
Expect: same result on n processes: inputs of the model differ from update 1 on; the generator seeded with
process_index.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Noise:
    """Noise from a generator that is part of the checkpoint."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, rows):
        """Return this rank's part of the noise of the global batch."""
        count = accelerator.num_processes
        everyone = torch.randn(count * len(rows), *rows.shape[1:], generator=self.generator)
        return 0.3 * everyone.chunk(count)[accelerator.process_index]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/noise", automatic_checkpoint_naming=True, total_limit=2)
)
clean = torch.randn(80, 2) @ torch.randn(2, 8)
loader = DataLoader(TensorDataset(clean), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
noise = Noise(100 + accelerator.process_index)
accelerator.register_for_checkpointing(noise)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (rows,) in loader:
        with accelerator.accumulate(model):
            rebuilt = model(rows + noise.draw(rows))
            accelerator.backward(nn.functional.mse_loss(rebuilt, rows))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
