"""Selection of trackers by names and objects."""

from enum import Enum
from importlib.metadata import EntryPoint

import pytest

from headway import LoggerType, Tracker
from headway.core.tracking import selection
from headway.core.tracking.selection import select_trackers
from headway.errors import ConfigError, OptionalDependencyMissing


class Own(Tracker):
    name = "own"
    requires_logging_directory = True


class Plug(Tracker):
    name = "plug"


@pytest.fixture
def plugged(monkeypatch):
    entry = EntryPoint("plug", f"{__name__}:Plug", selection.GROUP)
    monkeypatch.setattr(selection, "entry_points", lambda group: [entry] if group == selection.GROUP else [])


def names(*args, has_folder=True, **kwargs):
    return [each.name for each in select_trackers(*args, has_folder=has_folder, **kwargs)]


def test_names_enums_and_objects(plugged):
    class Other(Enum):
        MLFLOW = "mlflow"

    assert names(None) == []
    assert names("TensorBoard") == ["tensorboard"]
    assert names([LoggerType.WANDB, Other.MLFLOW, "tensorboard", "wandb", Own(), "jsonl"]) == [
        "wandb",
        "mlflow",
        "tensorboard",
        "own",
    ]
    (maker,) = select_trackers("plug", has_folder=False)
    assert maker.make.__name__ == "Plug"


def test_all_are_those_installed_and_each_once(plugged, monkeypatch):
    own = Own()
    assert names(["all", own]) == ["mlflow", "plug", "tensorboard", "wandb", "own"]
    assert names("all", has_folder=False) == ["mlflow", "plug", "wandb"]
    monkeypatch.setattr(selection, "is_available", lambda name: name == "wandb")
    assert names("all") == ["plug", "wandb"]


def test_nothing_installed_is_said(monkeypatch, caplog):
    monkeypatch.setattr(selection, "is_available", lambda name: False)
    assert names("all") == []
    assert "pip install 'headway[trackers]'" in caplog.text


def test_what_is_not_installed_is_an_error_on_rank_0_only(monkeypatch):
    monkeypatch.setattr(selection, "is_available", lambda name: False)
    with pytest.raises(
        OptionalDependencyMissing, match=r"log_with='wandb' needs wandb.*pip install 'headway\[trackers\]'"
    ):
        names("wandb")
    assert names("wandb", is_main=False) == ["wandb"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tensorbord", "no such tracker .did you mean 'tensorboard'"),
        (
            "sheets",
            "no such tracker; allowed: aim, clearml, comet_ml, dvclive, mlflow, opentelemetry, swanlab, tensorboard, trackio, wandb",
        ),
        (3, "log_with=3 is no tracker"),
        ([object], "is no tracker"),
    ],
    ids=str,
)
def test_anything_else_is_an_error(asked, message):
    with pytest.raises(ConfigError, match=message):
        names(asked)


@pytest.mark.parametrize("asked", ["tensorboard", Own()], ids=["name", "object"])
def test_files_need_a_place(asked):
    with pytest.raises(ConfigError, match="writes files and needs a place: pass project_dir="):
        names(asked, has_folder=False)


def test_a_tracker_needs_a_name():
    with pytest.raises(ConfigError, match="Tracker needs a `name`"):
        names(Tracker())
