"""The piece size of automatic micro-batching is kept after a resume, because dropout masks are drawn for each piece."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.core.runtime.device import HARDWARE
from headway.extras.replay.allocator_pressure import AllocatorPressure
from tests.devices import ON_CPU
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device


class Net(torch.nn.Module):
    """Runs out of memory with more than three rows while it is armed."""

    def __init__(self, is_armed):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
        self.is_armed = is_armed

    def forward(self, x):
        if self.is_armed and len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.body(x)


def train(folder, is_armed, stop_after=None, steps=1):
    """Return the loss of each batch. On rank 0, memory is too small until the third update if `is_armed`."""
    set_seed(3)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=ON_CPU, microbatching="auto", project_config=project, gradient_accumulation_steps=steps
    )
    model = Net(is_armed and accelerator.is_main_process)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(96, 3, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes, shuffle=True)
    net, (model, optimizer, loader) = model, accelerator.prepare(model, optimizer, loader)
    # As on a CPU. A device measures piece sizes after a failure, and again after a resume (docs/microbatching.md).
    accelerator._training_step.transaction.allocator = AllocatorPressure(HARDWARE["cpu"], torch.device("cpu"))
    accelerator.resume("latest")
    losses = []
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            for piece in accelerator.microbatches(x):
                with accelerator.accumulate(model):
                    loss = model(piece).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            net.is_armed = net.is_armed and accelerator.num_updates < 3
            if len(losses) == stop_after:
                accelerator.save_state()
                return losses
    return losses


def run_whole_and_in_two(folder, steps):
    cut = f"{folder}/cut"
    whole = train(f"{folder}/whole", True, steps=steps)
    return whole, train(cut, True, 7, steps=steps), train(cut, False, steps=steps)


@pytest.mark.parametrize(("num_ranks", "steps"), [(1, 1), (2, 1), (1, 3)])
def test_piece_size_is_kept_after_a_resume(num_ranks, steps, tmp_path):
    """With windows of three batches, the seventh batch is within a window, so the resumed run goes back to its start."""
    for whole, first, rest in run_ranks(run_whole_and_in_two, num_ranks, str(tmp_path), steps):
        begun = 7 if steps == 1 else 6
        assert first == whole[:7]
        assert rest == whole[begun:]
