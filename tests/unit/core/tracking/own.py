"""Tracker that records its calls, and helpers for tests of the Accelerator's tracking."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, Tracker
from headway.core.tracking.runlog_reader import read_run


class Own(Tracker):
    """Tracker that records every call, of all runs, in one list."""

    name = "own"

    def __init__(self, fails=(), identity=None):
        self.calls, self.fails, self.own = [], set(fails), identity

    @property
    def identity(self):
        return self.own

    def begin(self, run):
        self.note("begin", run)
        if self.own is not None:
            self.own = run.identity or {"id": len(self.calls)}

    def store_init_configuration(self, values):
        self.note("config", values)

    def log(self, values, step=None, **kwargs):
        self.note("log", values, step, kwargs)

    def log_images(self, values, step=None, **kwargs):
        self.note("images", {name: [each.shape for each in images] for name, images in values.items()}, step)

    def log_artifact(self, path, name, step=None, **kwargs):
        self.note("artifact", path, name, step)

    def rewind(self, step):
        self.note("rewind", step)

    def flush(self):
        self.note("flush")

    def finish(self):
        self.note("finish")

    def note(self, *call):
        if call[0] in self.fails:
            raise ValueError("the server is gone")
        self.calls.append(call)

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


def build(*trackers, folder="run", automatic=False):
    return Accelerator(
        cpu=True, log_with=list(trackers) or None,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=automatic),
    )  # fmt: skip


def trained(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def update(accelerator, model, optimizer, loader, num):
    for _, (x,) in zip(range(num), loader):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def events(project="p"):
    return [(each.name, each.step) for each in read_run(Path("run", project)).events]
