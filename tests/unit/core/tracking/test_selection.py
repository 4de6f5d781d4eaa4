"""Test the selection of trackers by names, enumerations and objects."""

from enum import Enum
from importlib.metadata import EntryPoint

import pytest

from headway import LoggerType, Tracker
from headway.core.tracking import selection
from headway.core.tracking.selection import select_trackers
from headway.errors import ConfigError, OptionalDependencyMissing


class Own(Tracker):
    """Tracker that writes files."""

    name = "own"
    requires_logging_directory = True


class Plug(Tracker):
    """Tracker of another package."""

    name = "plug"


@pytest.fixture
def plugged(monkeypatch):
    """Install an entry point for the tracker "plug"."""
    entry = EntryPoint("plug", f"{__name__}:Plug", selection.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        selection, "entry_points", lambda group: [entry] if group == selection.ENTRY_POINT_GROUP else []
    )


def test_entry_point_with_capital_letters_is_selected(monkeypatch):
    entry = EntryPoint("PlugIn", f"{__name__}:Plug", selection.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        selection, "entry_points", lambda group: [entry] if group == selection.ENTRY_POINT_GROUP else []
    )
    assert list_names("PlugIn") == list_names("plugin") == ["PlugIn"]


def list_names(*args, has_folder=True, **kwargs):
    return [each.name for each in select_trackers(*args, has_folder=has_folder, **kwargs)]


def test_names_enumerations_and_objects_are_selected(plugged):
    class Other(Enum):
        MLFLOW = "mlflow"

    assert list_names(None) == []
    assert list_names("TensorBoard") == ["tensorboard"]
    assert list_names([LoggerType.WANDB, Other.MLFLOW, "tensorboard", "wandb", Own(), "jsonl"]) == [
        "wandb",
        "mlflow",
        "tensorboard",
        "own",
    ]
    (maker,) = select_trackers("plug", has_folder=False)
    assert maker.make.__name__ == "Plug"


def test_all_selects_each_installed_tracker_once(plugged, monkeypatch):
    own = Own()
    assert list_names(["all", own]) == ["mlflow", "plug", "tensorboard", "wandb", "own"]
    assert list_names("all", has_folder=False) == ["mlflow", "plug", "wandb"]
    monkeypatch.setattr(selection, "is_available", lambda name: name == "wandb")
    assert list_names("all") == ["plug", "wandb"]


def test_all_without_installed_trackers_causes_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(selection, "is_available", lambda name: False)
    assert list_names("all") == []
    assert "pip install 'headway[trackers]'" in caplog.text


def test_missing_package_is_an_error_on_rank_0_only(monkeypatch):
    monkeypatch.setattr(selection, "is_available", lambda name: False)
    with pytest.raises(
        OptionalDependencyMissing, match=r"log_with='wandb' needs wandb.*pip install 'headway\[trackers\]'"
    ):
        list_names("wandb")
    assert list_names("wandb", is_main=False) == ["wandb"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tensorbord", "no such tracker .did you mean 'tensorboard'"),
        (
            "sheets",
            "no such tracker; allowed: aim, clearml, comet_ml, dvclive, mlflow, opentelemetry, swanlab, tensorboard, trackio, wandb",
        ),
        (3, "log_with=3 is not a tracker"),
        ([object], "is not a tracker"),
    ],
    ids=str,
)
def test_invalid_tracker_is_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        list_names(asked)


@pytest.mark.parametrize("asked", ["tensorboard", Own()], ids=["name", "object"])
def test_trackers_that_write_files_need_a_folder(asked):
    with pytest.raises(ConfigError, match="writes files and needs a directory: pass project_dir="):
        list_names(asked, has_folder=False)


def test_tracker_needs_a_name():
    with pytest.raises(ConfigError, match="Tracker needs a `name`"):
        list_names(Tracker())
