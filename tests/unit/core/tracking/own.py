"""Tracker that records its calls, and helpers for tests of the Accelerator's tracking."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, Tracker
from headway.core.tracking.runlog_reader import read_run


class OwnTracker(Tracker):
    """Tracker that records the calls of all runs in one list. Calls named in `fails` raise an error."""

    name = "own"

    def __init__(self, fails=(), identity=None):
        self.calls, self.fails, self.own = [], set(fails), identity

    @property
    def identity(self):
        return self.own

    def begin(self, run):
        self.record_call("begin", run)
        if self.own is not None:
            self.own = run.identity or {"id": len(self.calls)}

    def store_init_configuration(self, values):
        self.record_call("config", values)

    def log(self, values, step=None, **kwargs):
        self.record_call("log", values, step, kwargs)

    def log_images(self, values, step=None, **kwargs):
        self.record_call("images", {name: [each.shape for each in images] for name, images in values.items()}, step)

    def log_artifact(self, path, name, step=None, **kwargs):
        self.record_call("artifact", path, name, step)

    def rewind(self, step):
        self.record_call("rewind", step)

    def flush(self):
        self.record_call("flush")

    def finish(self):
        self.record_call("finish")

    def record_call(self, *call):
        if call[0] in self.fails:
            raise ValueError("the server is gone")
        self.calls.append(call)

    def list_calls(self, kind):
        """Return the arguments of all calls of this kind."""
        return [call[1:] for call in self.calls if call[0] == kind]


def build_accelerator(*trackers, folder="run", automatic=False):
    return Accelerator(
        cpu=True, log_with=list(trackers) or None,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=automatic),
    )  # fmt: skip


def prepare_training(accelerator):
    """Return a prepared model, optimizer and loader."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def train_batches(accelerator, model, optimizer, loader, num):
    """Train on the first `num` batches."""
    for _, (x,) in zip(range(num), loader):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def list_events(project="p"):
    """Return the (name, step) pairs of the events in a project's log."""
    return [(each.name, each.step) for each in read_run(Path("run", project)).events]
