"""A leading `~` in a path means the home folder, in Python as on the command line."""

from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from headway import (
    Accelerator,
    ExponentialMovingAverage,
    PowerDecay,
    ShardedDataset,
    disk_offload,
    load_checkpoint_in_model,
    reconstruct_average,
)
from headway.cli.options import CONFIG_FILE, LocalPath
from headway.core.tracking.runlog_reader import read_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return an empty home folder, in a process whose current folder is another one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    yield home
    assert not list(elsewhere.iterdir())


def test_weights_are_read_from_where_save_model_writes_them(home):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    accelerator.save_model(model, "~/weights")
    assert (home / "weights" / "model.safetensors").is_file()
    expected = model.weight.detach().clone()
    for load in (accelerator.load_weights, load_checkpoint_in_model):
        nn.init.zeros_(model.weight)
        load(model, "~/weights")
        assert torch.equal(model.weight, expected)


def test_shards_are_found_in_the_home_folder(home):
    (home / "data.jsonl").write_text('{"id": 0}\n{"id": 1}\n')
    for place in ("~/data.jsonl", "~/*.jsonl", Path("~/data.jsonl")):
        assert len(ShardedDataset(place, cache_dir="~/cache")) == 2


def test_artifact_of_a_run(home):
    accelerator = Accelerator(cpu=True, project_dir="~/run")
    accelerator.init_trackers("first")
    (home / "vocabulary.txt").write_text("a b c")
    accelerator.log_artifact("~/vocabulary.txt")
    accelerator.end_training()
    assert [medium.name for medium in read_run(home / "run" / "first").media] == ["vocabulary.txt"]


def test_snapshots_of_an_average(home):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = ExponentialMovingAverage(model, decay=PowerDecay(0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    average.save_snapshot("~/snapshots/0")
    reconstruct_average(["~/snapshots/0"], "~/averaged", 0.1)
    assert (home / "averaged" / "model.safetensors").is_file()


def test_offload_folder_is_created_in_the_home_folder(home):
    disk_offload(nn.Linear(4, 1), "~/offloaded")
    assert list((home / "offloaded").iterdir())


@pytest.mark.parametrize("option", [CONFIG_FILE, click.Option(["--config_file"], type=LocalPath(path_type=Path))])
def test_option_with_an_equals_sign(home, option):
    found = []
    command = click.Command("command", params=[option], callback=lambda config_file: found.append(Path(config_file)))
    assert CliRunner().invoke(command, ["--config_file=~/file"]).exit_code == 0
    assert found == [home / "file"]
