"""Test a requested global batch size on the remaining ranks of a run that has lost some."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import ConfigError

ROWS = 40


def train(folder, until):
    """Train until update `until` and save. Return the samples of each update. Batches have 4 rows."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, global_batch_size=10, project_config=project)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.arange(float(ROWS)).unsqueeze(1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    accelerator.resume("latest")
    windows, rows = [], []
    for _ in accelerator.epochs(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            rows += x.flatten().tolist()
            if accelerator.sync_gradients:
                windows, rows = [*windows, rows], []
                if accelerator.num_updates == until:
                    accelerator.save_state()
                    return windows
    return windows


@pytest.fixture
def lost_rank(monkeypatch):
    """Set the payload of a run that has one of two ranks left."""
    payload = {"version": 1, "settings": {}, "num_processes": 2, "min_processes": 1, "force": False}
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(payload))


def test_global_batch_is_kept_after_a_loss_even_if_it_is_no_multiple(lost_rank, tmp_path, caplog):
    windows = train(tmp_path, 2)
    assert windows == [[float(row) for row in range(begin, begin + 10)] for begin in (0, 10)]
    assert "the global batch of 10 samples is split unevenly among the ranks" in caplog.text
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint_0").about["global_batch"] == 10
    windows = train(tmp_path, 5)  # the resumed run keeps it, too
    assert windows == [[float(row % ROWS) for row in range(begin, begin + 10)] for begin in (20, 30, 40)]


def test_without_a_loss_an_unfit_global_batch_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"global_batch_size=10 is not a multiple .*\(4 samples\)"):
        train(tmp_path, 1)
