"""Test saves in the middle of a window, after which a run resumes with the state from the start of the window."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.checkpoint.format.manifest import read_manifest

STEPS, NUM_BATCHES = 3, 9


class Counting(torch.nn.Module):
    """Module with extra state and a buffer, which each forward changes."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("fading", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.count += 1
        self.fading = 0.9 * self.fading + x.detach().mean(0)  # a new tensor each time
        return x

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Run:
    """Training of a model with buffers and extra state, in windows of `STEPS` micro-batches."""

    def __init__(self, folder, is_automatic=True, is_compiled=False):
        torch.manual_seed(0)
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=is_automatic)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, project_config=project)
        model = torch.nn.Sequential(Counting(), torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        if is_compiled:  # the names of its buffers and extra states then contain "_orig_mod"
            model = torch.nn.Sequential(torch.compile(model[:3], backend="eager"), model[3])
        loader = DataLoader(TensorDataset(torch.randn(4 * NUM_BATCHES, 3)), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), loader
        )

    def train(self, num=None, save_at=()):
        """Train on `num` batches, or all. Save and stop after a batch whose number is in `save_at`."""
        for count, (x,) in enumerate(itertools.islice(self.loader, num), 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            if count in save_at:
                return self.accelerator.save_state(None if self.accelerator.project_configuration.automatic_checkpoint_naming
                                                   else save_at[count])  # fmt: skip
        return None

    def copy_state(self):
        return {name: torch.as_tensor(value["count"]) if isinstance(value, dict) else value.clone()
                for name, value in self.model.state_dict().items()}  # fmt: skip


@pytest.mark.parametrize(
    ("stop", "is_compiled"), [*((stop, False) for stop in range(1, NUM_BATCHES)), (1, True), (4, True)]
)
def test_buffers_and_extra_state_are_equal_after_a_save_in_mid_window(stop, is_compiled, tmp_path):
    whole = Run(str(tmp_path / "whole"), is_compiled=is_compiled)
    whole.train()
    first = Run(str(tmp_path / "cut"), is_compiled=is_compiled)
    first.train(save_at=(stop,))
    at_save = first.copy_state()
    rest = Run(str(tmp_path / "cut"), is_compiled=is_compiled)
    rest.accelerator.resume("latest")
    for _ in rest.accelerator.epochs(1):
        rest.train()
    for name, value in whole.copy_state().items():
        assert torch.equal(value, rest.copy_state()[name]), name
    assert all(torch.equal(value, first.copy_state()[name]) for name, value in at_save.items())


def test_state_that_is_not_reset_to_the_window_start_is_reported(tmp_path, caplog):
    run = Run(str(tmp_path), is_automatic=False)
    run.accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(run.optimizer, 1))
    run.train(save_at={2: tmp_path / "one"})
    assert (
        "it resumes at the window's start, but for registered objects and the models' buffers and the RNG states"
        in caplog.text
    )
    caplog.clear()
    run.train(save_at={STEPS + 2: tmp_path / "two"})
    assert "but for registered objects, which are saved as they are now" in caplog.text


class CountingInTensor(torch.nn.Linear):
    """Module whose extra state contains a tensor."""

    def __init__(self):
        super().__init__(3, 1)
        self.count = torch.zeros(1000)

    def forward(self, x):
        self.count += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_tensors_of_extra_states_are_saved_once_in_mid_window(tmp_path):
    run = Run(str(tmp_path))
    run.model, run.optimizer = run.accelerator.prepare(
        model := CountingInTensor(), torch.optim.SGD(model.parameters(), 0.1)
    )
    run.train(save_at=(1,))  # later windows record their start
    folder = run.train(save_at=(STEPS,))
    assert [name for name in read_manifest(folder).tensors if name.startswith("extra/")] == [
        "extra/1/_extra_state.count"
    ]


class CrossingRun:
    """Training whose windows of three micro-batches continue in the next epoch, over one or two loaders of four batches."""

    def __init__(self, folder, num_loaders):
        torch.manual_seed(0)
        plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_with_dataloader=False)
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_plugin=plugin, project_config=project, step_scheduler_with_optimizer=False
        )
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loaders = [DataLoader(TensorDataset(10.0 * i + torch.arange(4.0)), shuffle=True) for i in range(num_loaders)]
        self.model, self.optimizer, self.schedule, *self.loaders = self.accelerator.prepare(
            model, optimizer, schedule, *loaders
        )

    def train(self, save_at=0):
        """Return (epoch, sample, number of updates, learning rate of the update) of each micro-batch. Stop after a save.

        The rate is 0.0 if the micro-batch did not end a window.
        """
        found = []
        for epoch in self.accelerator.epochs(4):
            for loader in self.loaders:
                for (x,) in loader:
                    with self.accelerator.accumulate(self.model):
                        self.accelerator.backward(self.model(0.01 * x[:, None]).square().mean())
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                    rate = self.optimizer.param_groups[0]["lr"] if self.accelerator.sync_gradients else 0.0
                    found.append((epoch, float(x), self.accelerator.num_updates, rate))
                    if len(found) == save_at:
                        self.accelerator.save_state()
                        return found
            self.schedule.step()
        return found


@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.parametrize("stop", [5, 8, 10, 11])
def test_window_that_began_in_the_epoch_before_resumes_there(tmp_path, stop, num_loaders):
    whole = CrossingRun(tmp_path, num_loaders).train()
    assert CrossingRun(tmp_path, num_loaders).train(stop) == whole[:stop]
    resumed = CrossingRun(tmp_path, num_loaders)
    resumed.accelerator.resume("latest")
    assert resumed.train() == whole[stop - stop % STEPS :]
