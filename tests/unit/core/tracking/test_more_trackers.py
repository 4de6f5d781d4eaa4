"""Test Comet, Aim, ClearML, DVCLive, SwanLab and Trackio with the real packages, offline, by reading back their files.

The test environment has none of these packages, because they need other versions of its packages. To run a test,
install one package in a separate environment and run this file there.
"""

import io
import json
import logging
import sys
import uuid
import zipfile
from pathlib import Path

import numpy
import pytest

from headway import Accelerator, ProjectConfiguration
from headway.common.optional import is_available
from headway.core.tracking.runlog_reader import read_run
from headway.errors import OptionalDependencyMissing
from tests.unit.core.tracking.test_trackers import CONFIG, log_everything

pytestmark = pytest.mark.slow

NAMES = ["comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"]
VARIABLES = """
    COMET_API_KEY CLEARML_PROJECT CLEARML_TASK CLEARML_API_ACCESS_KEY CLEARML_API_SECRET_KEY SWANLAB_API_KEY SWANLAB_MODE
"""


@pytest.fixture(autouse=True)
def _isolated_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)


def start(name, project="p", config=CONFIG, **init_kwargs):
    accelerator = Accelerator(cpu=True, log_with=name, project_config=ProjectConfiguration("run"))
    accelerator.init_trackers(project, config, {name: init_kwargs})
    assert [tracker.name for tracker in accelerator.trackers] == [name]
    return accelerator


def continue_run(accelerator):
    """Continue a run after a kill: it was not ended, and the next process logs a later step."""
    accelerator.log({"loss": 0.25}, step=4)
    accelerator.end_training()


def list_failures(project="p"):
    return [each.details for each in read_run(f"run/{project}").events if each.name.startswith("tracker_")]


@pytest.mark.parametrize("name", NAMES)
def test_missing_package_is_named_with_its_install_command(name):
    if is_available(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(OptionalDependencyMissing, match=f"log_with='{name}' needs {name}, .*: pip install {name}$"):
        Accelerator(cpu=True, log_with=name, project_config=ProjectConfiguration("run"))


def test_comet_receives_all_values_and_continues_the_run(tmp_path, caplog):
    pytest.importorskip("comet_ml", reason="comet_ml is not installed")
    with caplog.at_level(logging.INFO, "headway"):
        accelerator = start("comet_ml")
    assert "there is no API key, so the experiment is written offline" in caplog.text
    key = accelerator.get_tracker("comet_ml", unwrap=True).get_key()
    assert accelerator.get_tracker("comet_ml").identity == {"experiment_key": key}
    log_everything(accelerator)
    accelerator.end_training()
    assert list_failures() == []
    (archive,) = (tmp_path / "run" / "p").glob(f"{key}*.zip")
    with zipfile.ZipFile(archive) as read:
        about = json.loads(read.read("experiment.json"))
        messages = [json.loads(line) for line in read.read("messages.json").splitlines()]
    assert (about["offline_id"], about["project_name"]) == (key, "p")
    metrics = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
    losses = [(each["step"], each["metricValue"]) for each in metrics if each["metricName"] == "loss"]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert {each["metricName"] for each in metrics} >= {"loss", "eval/accuracy", "odd name!"}
    others = {each["payload"]["key"]: each["payload"]["value"] for each in messages if each["type"] == "log_other"}
    assert others["note"] == "warm"
    told = [each["payload"] for each in messages if each["type"] == "parameter_msg"]
    parameters = {each["paramName"]: each["paramValue"] for one in told for each in [one.get("param") or one["params"]]}
    assert (parameters["lr"], parameters["model|layers"]) == (0.1, [1, 2])
    files = [each["payload"] for each in messages if each["type"] == "file_upload"]
    names = {told.get("fileName") or told.get("figName", "") for told in (each["additional_params"] for each in files)}
    assert {"samples", "maps/0", "maps/1", "weights.bin"} <= names
    assert any("vocabulary.txt" in name for name in names)


def test_aim_receives_all_values_and_continues_the_run(tmp_path):
    aim = pytest.importorskip("aim", reason="aim is not installed")
    from aim.storage.context import Context

    accelerator = start("aim", "team/p", log_system_params=False, system_tracking_interval=None)
    run = accelerator.get_tracker("aim", unwrap=True)
    assert accelerator.get_tracker("aim").writer is run
    log_everything(accelerator)
    run.close()  # killed, and started again
    continue_run(start("aim", "team/p", log_system_params=False, system_tracking_interval=None))
    assert list_failures("team/p") == []
    repo = tmp_path / "run"
    assert aim.Repo(str(repo)).list_all_runs() == [run.hash]
    read = aim.Run(run.hash, repo=str(repo), system_tracking_interval=None)
    assert (read.name, read.experiment) == ("team/p", "team/p")
    assert read["hparams"] == CONFIG
    losses = read.get_metric("loss", Context({})).dataframe()
    assert list(zip(losses["step"], losses["value"])) == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    steps, (texts, *_) = read.get_text_sequence("note", Context({})).data.items_list()
    assert (steps, [each.data for each in texts]) == ([3], ["warm"])
    steps, (images, *_) = read.get_image_sequence("maps", Context({})).data.items_list()
    assert (steps, [len(each) for each in images]) == ([3], [2])
    assert (read.artifacts.keys()) >= {"weights.bin"}
    assert [path.read_text() for path in repo.rglob("vocabulary.txt")] == ["words"]
    read.close()


def test_clearml_receives_all_values(monkeypatch, tmp_path, caplog):
    clearml = pytest.importorskip("clearml", reason="clearml is not installed")
    monkeypatch.setattr(sys, "argv", ["train.py"])  # Task.init reads the command line
    quiet = {"auto_connect_frameworks": False, "auto_resource_monitoring": False, "auto_connect_streams": False}
    with caplog.at_level(logging.INFO, "headway"):
        accelerator = start("clearml", **quiet)
    assert "clearml is not configured here, so the task is written offline" in caplog.text
    task = accelerator.get_tracker("clearml", unwrap=True)
    assert accelerator.get_tracker("clearml").task is task
    assert accelerator.get_tracker("clearml").identity is None
    log_everything(accelerator)
    accelerator.log({"eval_f1": 0.75}, step=3)
    folder = Path(task.get_offline_mode_folder())
    accelerator.end_training()
    assert list_failures() == []
    assert clearml.Task.current_task() is None
    told = [each for line in (folder / "metrics.jsonl").read_text().splitlines() for each in json.loads(line)]
    scalars = {(each["metric"], each["variant"], each["iter"]): each.get("value") for each in told}
    assert [scalars["loss", "train", step] for step in (1, 2, 3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert (scalars["accuracy", "eval", 1], scalars["f1", "eval", 3]) == (0.5, 0.75)
    assert {("samples", "train", 3), ("maps", "train/0", 3), ("maps", "train/1", 3)} <= set(scalars)
    about = json.loads((folder / "task.json").read_text())
    assert (about["project_name"], about["name"]) == ("p", "p")
    (kept,) = about["configuration"].values()
    assert "layers = [1, 2]" in kept["value"]
    assert {each["key"] for each in about["execution"]["artifacts"]} == {"weights.bin", "words"}
    # A task that the script has created is used, and not closed.
    own = clearml.Task.init("q", "mine", auto_connect_arg_parser=False, reuse_last_task_id=False, **quiet)
    accelerator = start("clearml", "q")
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert clearml.Task.current_task() is own
    own.close()


def test_dvclive_receives_all_values_and_continues_the_run(tmp_path):
    pytest.importorskip("dvclive", reason="dvclive is not installed")
    accelerator = start("dvclive", save_dvc_exp=False)
    assert accelerator.get_tracker("dvclive").live is accelerator.get_tracker("dvclive", unwrap=True)
    log_everything(accelerator)
    continue_run(start("dvclive", config=CONFIG | {"nothing": None}, save_dvc_exp=False))
    assert list_failures() == []
    folder = tmp_path / "run" / "p" / "dvclive"
    rows = [line.split("\t") for line in (folder / "plots" / "metrics" / "loss.tsv").read_text().splitlines()]
    assert rows[0] == ["step", "loss"]
    assert [(int(step), float(loss)) for step, loss in rows[1:]] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25),
    ]  # fmt: skip
    told = json.loads((folder / "metrics.json").read_text())
    assert (told["eval"]["accuracy"], told["loss"], told["step"]) == (0.5, 0.25, 4)
    import yaml

    assert yaml.safe_load((folder / "params.yaml").read_text()) == CONFIG
    images = {path.name for path in (folder / "plots" / "images").iterdir()}
    assert images == {f"{name}-00000003{part}.png" for name, part in [("samples", ""), ("maps", "-0"), ("maps", "-1")]}


def test_live_object_of_the_script_is_used(tmp_path):
    dvclive = pytest.importorskip("dvclive", reason="dvclive is not installed")
    live = dvclive.Live(str(tmp_path / "mine"), save_dvc_exp=False)
    accelerator = start("dvclive", live=live)
    assert accelerator.get_tracker("dvclive", unwrap=True) is live
    accelerator.log({"loss": 2.0}, step=1)
    accelerator.end_training()
    assert json.loads((tmp_path / "mine" / "metrics.json").read_text())["loss"] == 2.0


def read_swanlab_records(folder):
    """Return the text of a run's file as SwanLab's own reader parses it."""
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    return b"\n".join(iter(reader.scan, None))


def test_swanlab_receives_all_values(tmp_path, caplog):
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    with caplog.at_level(logging.INFO, "headway"):
        accelerator = start("swanlab", "team/p")
    assert "no user is logged in, so the run is written offline" in caplog.text
    run = accelerator.get_tracker("swanlab", unwrap=True)
    assert accelerator.get_tracker("swanlab").identity == {"id": run.id}
    log_everything(accelerator)
    folder = Path(run.dir)
    assert folder.is_relative_to(tmp_path / "run" / "team" / "p" / "swanlab")
    accelerator.end_training()
    assert list_failures("team/p") == []
    import yaml

    kept = yaml.safe_load((folder / "files" / "config.yaml").read_text())
    assert kept["lr"]["value"] == 0.1
    assert kept["model"]["value"] == CONFIG["model"]
    told = read_swanlab_records(folder)
    assert all(word in told for word in (b"team-p", b"loss", b"eval/accuracy", b"odd name!"))
    assert numpy.float64(1 / 3).tobytes() in told or numpy.float32(1 / 3).tobytes() in told
    assert [path.read_text() for path in (folder / "media" / "text").iterdir()] == ["warm"]
    assert len(list((folder / "media" / "image").iterdir())) == 2  # both maps are the same image
    assert {path.name for path in folder.rglob("*")} >= {"weights.bin", "vocabulary.txt"}


def test_trackio_receives_all_values_and_continues_the_run(monkeypatch, tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    team = uuid.uuid4().hex  # the database's folder was set when the package was imported
    accelerator = start("trackio", f"{team}/p", auto_log_cpu=False, auto_log_gpu=False)
    name = accelerator.get_tracker("trackio", unwrap=True).name
    log_everything(accelerator)
    accelerator.get_tracker("trackio", unwrap=True).finish()  # killed, and started again
    continue_run(start("trackio", f"{team}/p", auto_log_cpu=False, auto_log_gpu=False))
    assert list_failures(f"{team}/p") == []
    assert SQLiteStorage.get_runs(f"{team}-p") == [name]
    rows = SQLiteStorage.get_logs(f"{team}-p", name)
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert [row["note"] for row in rows if "note" in row] == ["warm"]
    (images,) = [row for row in rows if "samples" in row]
    assert {"samples", "maps/0", "maps/1"} <= set(images)
    media = Path(utils.MEDIA_DIR) / images["samples"]["file_path"]
    from PIL import Image

    assert Image.open(io.BytesIO(media.read_bytes())).size == (5, 6)
    kept = SQLiteStorage.get_run_config(f"{team}-p", name)
    assert {each: kept[each] for each in CONFIG} == CONFIG


def read_comet(folder):
    (archive,) = folder.rglob("*.zip")
    with zipfile.ZipFile(archive) as read:
        messages = [json.loads(line) for line in read.read("messages.json").splitlines()]
    return [
        (each["payload"]["metric"]["step"], each["payload"]["metric"]["metricValue"])
        for each in messages
        if each["type"] == "metric_msg" and each["payload"]["metric"]["metricName"] == "loss"
    ]


def read_dvclive(folder):
    rows = [line.split("\t") for line in (folder / "plots" / "metrics" / "loss.tsv").read_text().splitlines()[1:]]
    return [(int(step), float(loss)) for step, loss in rows]


def use_directly(kind, *args, **kwargs):
    """Use one of Accelerate's trackers without an Accelerator, as some scripts do, and return it."""
    tracker = kind(*args, **kwargs)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    for step in (1, 2):
        tracker.log({"loss": 1.0 / step}, step=step)
    return tracker


EXPECTED = [(1, 1.0), (2, 0.5)]


def test_comet_tracker_works_without_an_accelerator(tmp_path):
    comet_ml = pytest.importorskip("comet_ml", reason="comet_ml is not installed")
    from headway.compat.accelerate.trackers import CometMLTracker

    config = comet_ml.ExperimentConfig(offline_directory=str(tmp_path / "files"))
    use_directly(CometMLTracker, "mine", online=False, experiment_config=config).finish()
    assert read_comet(tmp_path / "files") == EXPECTED


def test_aim_tracker_works_without_an_accelerator(tmp_path):
    aim = pytest.importorskip("aim", reason="aim is not installed")
    from aim.storage.context import Context

    from headway.compat.accelerate.trackers import AimTracker

    tracker = use_directly(
        AimTracker, "mine", str(tmp_path / "repo"), log_system_params=False, system_tracking_interval=None
    )
    run_hash = tracker.tracker.hash
    tracker.finish()
    read = aim.Run(run_hash, repo=str(tmp_path / "repo"), system_tracking_interval=None)
    losses = read.get_metric("loss", Context({})).dataframe()
    assert (read.name, list(zip(losses["step"], losses["value"]))) == ("mine", EXPECTED)
    read.close()


def test_clearml_tracker_works_without_an_accelerator(monkeypatch):
    pytest.importorskip("clearml", reason="clearml is not installed")
    from headway.compat.accelerate.trackers import ClearMLTracker

    monkeypatch.setattr(sys, "argv", ["train.py"])
    quiet = {"auto_connect_frameworks": False, "auto_resource_monitoring": False, "auto_connect_streams": False}
    tracker = use_directly(ClearMLTracker, "mine", reuse_last_task_id=False, **quiet)
    tracker.log_table("table", columns=["a"], data=[[1], [2]], step=2)
    folder = Path(tracker.tracker.get_offline_mode_folder())
    tracker.finish()
    told = [each for line in (folder / "metrics.jsonl").read_text().splitlines() for each in json.loads(line)]
    assert [(each["iter"], each["value"]) for each in told if each["metric"] == "loss"] == EXPECTED
    assert [each["type"] for each in told if each["metric"] == "table"] == ["plot"]


def test_dvclive_tracker_works_without_an_accelerator(tmp_path):
    pytest.importorskip("dvclive", reason="dvclive is not installed")
    from headway.compat.accelerate.trackers import DVCLiveTracker

    use_directly(DVCLiveTracker, "ignored", dir=str(tmp_path / "live"), save_dvc_exp=False).finish()
    assert read_dvclive(tmp_path / "live") == EXPECTED


def test_swanlab_tracker_works_without_an_accelerator(tmp_path):
    pytest.importorskip("swanlab", reason="swanlab is not installed")
    from headway.compat.accelerate.trackers import SwanLabTracker

    tracker = use_directly(SwanLabTracker, "mine", log_dir=str(tmp_path / "logs"))
    folder = Path(tracker.tracker.dir)
    tracker.finish()
    told = read_swanlab_records(folder)
    assert b"mine" in told
    assert told.count(b"loss") >= 2


def test_trackio_tracker_works_without_an_accelerator():
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    from headway.compat.accelerate.trackers import TrackioTracker

    project = uuid.uuid4().hex
    tracker = use_directly(TrackioTracker, project, auto_log_cpu=False, auto_log_gpu=False)
    name = tracker.tracker.name
    tracker.finish()
    rows = SQLiteStorage.get_logs(project, name)
    assert [(row["step"], row["loss"]) for row in rows] == EXPECTED
    assert SQLiteStorage.get_run_config(project, name)["lr"] == 0.1
