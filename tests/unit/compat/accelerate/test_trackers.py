"""Test Accelerate's tracker classes and their table: trackers that scripts subclass, register and build by hand."""

from pathlib import Path

import accelerate
import accelerate.tracking as theirs
import pytest

import headway
from headway.compat.accelerate import trackers as ours
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.trackers import GeneralTracker, on_main_process
from headway.core.tracking.base import LoggerType
from headway.core.tracking.runlog_reader import read_run


@pytest.fixture(autouse=True)
def _isolated_table(tmp_path, monkeypatch):
    """Restore the table of trackers after the test, and run in an empty folder without MLflow's variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ours, "LOGGER_TYPE_TO_CLASS", dict(ours.LOGGER_TYPE_TO_CLASS))
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_NESTED_RUN", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


class Listed(GeneralTracker):
    """Tracker that records its calls, written like the trackers of scripts."""

    name = "listed"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.run_name, self.kwargs, self.told = run_name, kwargs, []

    @property
    def tracker(self):
        return self.told

    @on_main_process
    def start(self):
        self.told.append("start")

    @on_main_process
    def store_init_configuration(self, values):
        self.told.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.told.append((step, values))

    @on_main_process
    def finish(self):
        self.told.append("finish")


TOLD = ["start", {"lr": 0.1}, (3, {"loss": 0.5})]


def log_one_value(accelerator, **init_kwargs):
    accelerator.init_trackers("p", {"lr": 0.1}, init_kwargs)
    accelerator.log({"loss": 0.5}, step=3)


def test_table_has_the_same_names_as_accelerates():
    assert set(ours.LOGGER_TYPE_TO_CLASS) == set(theirs.LOGGER_TYPE_TO_CLASS)
    for name, kind in ours.LOGGER_TYPE_TO_CLASS.items():
        other = theirs.LOGGER_TYPE_TO_CLASS[name]
        assert (kind.name, kind.__name__) == (other.name, other.__name__)
        assert kind.requires_logging_directory == other.requires_logging_directory
        assert issubclass(kind, GeneralTracker)
        for method in ("log_images", "log_table", "log_figure", "log_artifacts"):
            assert hasattr(kind, method) or not hasattr(other, method), (name, method)


def test_available_and_filtered_trackers_equal_accelerates():
    assert {str(each) for each in ours.get_available_trackers()} == {
        str(each) for each in theirs.get_available_trackers()
    }
    accelerate.PartialState()  # Accelerate's logger needs it
    for asked in (None, "wandb", ["wandb", "wandb", "mlflow"], ["aim", "tensorboard"]):
        one, other = (kind.filter_trackers(asked, "logs") for kind in (theirs, ours))
        assert [str(each) for each in other] == [str(each) for each in one], asked
    one, other = ({str(each) for each in kind.filter_trackers("all", "logs")} for kind in (theirs, ours))
    assert other == one
    for kind in (theirs, ours):
        with pytest.raises(ValueError, match="moon"):
            kind.filter_trackers("moon")
        with pytest.raises(ValueError, match="logging_dir"):
            kind.filter_trackers("tensorboard")


def test_tracker_instance_is_used():
    tracker = Listed("mine")
    assert ours.filter_trackers(tracker) == [tracker]
    accelerator = AccelerateAccelerator(cpu=True, log_with=tracker)
    log_one_value(accelerator)
    assert (tracker.told, accelerator.get_tracker("listed", unwrap=True)) == (TOLD, tracker.told)
    accelerator.end_training()
    assert tracker.told[-1] == "finish"


def test_registered_class_is_found_by_name():
    ours.register_tracker_class(Listed)
    assert ours.LOGGER_TYPE_TO_CLASS["listed"] is Listed
    assert ours.filter_trackers(["listed"]) == ["listed"]
    accelerator = AccelerateAccelerator(cpu=True, log_with="listed")
    log_one_value(accelerator, listed={"tags": ["a"]})
    (tracker,) = accelerator.trackers
    assert type(tracker) is Listed
    assert (tracker.run_name, tracker.kwargs, tracker.told) == ("p", {"tags": ["a"]}, TOLD)
    accelerator.end_training()


def test_tracker_that_requires_a_folder_gets_it(tmp_path):
    class InFolder(Listed):
        name = "in_folder"
        requires_logging_directory = True

        def __init__(self, run_name, logging_dir, **kwargs):
            super().__init__(run_name, **kwargs)
            self.logging_dir = logging_dir

    ours.register_tracker_class(InFolder)
    with pytest.raises(headway.errors.ConfigError, match="needs a directory"):
        AccelerateAccelerator(cpu=True, log_with="in_folder")
    accelerator = AccelerateAccelerator(cpu=True, log_with=["in_folder"], project_dir=str(tmp_path))
    log_one_value(accelerator)
    assert str(accelerator.trackers[0].logging_dir) == str(tmp_path)
    accelerator.end_training()


@pytest.mark.parametrize("kind", [theirs, ours])
def test_incomplete_tracker_class_is_refused(kind):
    class Nameless(kind.GeneralTracker):
        requires_logging_directory = False

    class Homeless(kind.GeneralTracker):
        name = "homeless"

    for each in (dict, Nameless, Homeless):
        with pytest.raises(ValueError):
            kind.register_tracker_class(each)
    with pytest.raises(NotImplementedError, match="tracker"):
        Homeless()
    assert Homeless(True).name == "homeless"


def read_losses(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(each.step, each.value) for each in EventAccumulator(str(folder)).Reload().Scalars("loss")]


@pytest.mark.slow
def test_tensorboard_tracker_by_hand_and_by_name(tmp_path):
    tracker = ours.TensorBoardTracker("run", tmp_path / "logs")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.finish()
    assert read_losses(tmp_path / "logs" / "run") == [(3, 0.5)]
    accelerator = AccelerateAccelerator(cpu=True, log_with=LoggerType.TENSORBOARD, project_dir=str(tmp_path))
    log_one_value(accelerator)
    assert type(accelerator.get_tracker("tensorboard")) is ours.TensorBoardTracker
    accelerator.end_training()
    assert read_losses(tmp_path / "p") == [(3, 0.5)]
    assert not [each for each in read_run(tmp_path / "p").events if each.name == "tracker_failed"]


@pytest.mark.slow
def test_wandb_tracker_logs_values_and_a_table(tmp_path, monkeypatch):
    from tests.unit.core.tracking.wandb_file import read_offline_run

    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = ours.WandBTracker("mine", dir=str(tmp_path), mode="offline")
    accelerator = AccelerateAccelerator(cpu=True, log_with=tracker)
    log_one_value(accelerator)
    tracker.log_table("table", columns=["a"], data=[[1], [2]], step=4)
    accelerator.end_training()
    told = read_offline_run(tmp_path)
    assert told["project"] == "mine"
    assert [row["loss"] for row in told["rows"] if "loss" in row] == [0.5]
    assert [row["table/nrows"] for row in told["rows"] if "table/nrows" in row] == [2]


@pytest.mark.slow
def test_mlflow_tracker_reads_its_variables_and_logs_files(tmp_path, monkeypatch):
    import mlflow

    store = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "x"}')
    tracker = ours.MLflowTracker(
        "mine", logging_dir=(tmp_path / "files").as_uri(), run_name="first", tracking_uri=store
    )
    accelerator = AccelerateAccelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path))
    log_one_value(accelerator)
    Path("notes.txt").write_text("words")
    Path("folder").mkdir()
    Path("folder", "more.txt").write_text("more")
    tracker.log_artifact("notes.txt", artifact_path="texts")
    tracker.log_artifacts("folder", artifact_path="texts")
    accelerator.log_artifact("notes.txt")
    accelerator.end_training()
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.data.tags["team"], run.data.metrics) == ("first", "x", {"loss": 0.5})
    assert {each.path for each in client.list_artifacts(run.info.run_id, "texts")} == {
        "texts/notes.txt",
        "texts/more.txt",
    }
    assert (tmp_path / "files").is_dir()
