"""Random numbers of a pipeline stage depend only on the numbers of stage and micro-batch, so a resumed run draws the same."""

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, PipelineOptions, ProjectConfiguration, set_seed
from tests.devices import ON_CPU
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.dropout = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Model that draws from all random states, before, in and after its blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = (
            torch.nn.Linear(6, 8),
            torch.nn.ModuleList(Block() for _ in range(4)),
            torch.nn.Linear(8, 1),
        )

    def forward(self, x):
        x = self.first(x)
        scale = 1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()) if self.training else 1
        for block in self.blocks:
            x = block(x * scale)
        return torch.nn.functional.dropout(self.last(x), 0.2, self.training).squeeze(1)


def train(folder, schedule, is_called, stop_after=None):
    """Return the loss of each batch since the start. The 37 rows in micro-batches of 2 leave a ragged last batch."""
    set_seed(7)
    options = PipelineOptions(num_microbatches=4, schedule=schedule)
    accelerator = Accelerator(
        cpu=ON_CPU,
        strategy="pp",
        kwargs_handlers=[options],
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(37, 6, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    accelerator.resume("latest")
    losses = []
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            if is_called:
                with accelerator.accumulate(model):
                    loss = (model(x) - x.sum(1)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                loss = accelerator.forward_backward(x, lambda piece: (model(piece) - piece.sum(1)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == stop_after:
                accelerator.save_state()
                return losses
    return losses


def run_whole_and_in_two(folder, schedule, is_called):
    cut = f"{folder}/cut"
    whole = train(f"{folder}/whole", schedule, is_called)
    return whole, train(cut, schedule, is_called, 7), train(cut, schedule, is_called)


@pytest.mark.parametrize(
    ("schedule", "is_called"),
    [("gpipe", True), pytest.param("1f1b", False, marks=pytest.mark.matrix), ("interleaved", False)],
)
def test_resumed_pipeline_draws_the_same_random_numbers(schedule, is_called, tmp_path):
    for whole, first, rest in run_ranks(run_whole_and_in_two, 2, str(tmp_path), schedule, is_called):
        assert first == whole[:7]
        assert rest == whole[7:]
        assert len({*whole}) == len(whole) == 15
