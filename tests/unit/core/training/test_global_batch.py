"""A global batch that the script asks for, on the ranks that are left of a run."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import ConfigError

ROWS = 40


def run(folder, until):
    """The samples of each update, of ten samples; 4 rows are read at once."""
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
def lost(monkeypatch):
    """One rank is left of two."""
    payload = {"version": 1, "settings": {}, "num_processes": 2, "min_processes": 1, "force": False}
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(payload))


def test_it_is_kept_after_a_loss_though_the_rest_does_not_divide_it(lost, tmp_path, caplog):
    windows = run(tmp_path, 2)
    assert windows == [[float(row) for row in range(begin, begin + 10)] for begin in (0, 10)]
    assert "the global batch of 10 samples is split unevenly among the ranks" in caplog.text
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint_0").about["global_batch"] == 10
    windows = run(tmp_path, 5)  # and by a checkpoint that such a run has made
    assert windows == [[float(row % ROWS) for row in range(begin, begin + 10)] for begin in (20, 30, 40)]


def test_without_a_loss_it_is_the_scripts_error(tmp_path):
    with pytest.raises(ConfigError, match=r"global_batch_size=10 is not a multiple .*\(4 samples\)"):
        run(tmp_path, 1)
