"""Test the built-in trackers with the real packages: their files are read back with the packages' own readers."""

import logging
import socket
import time
from pathlib import Path

import pytest
import torch

from headway import Accelerator, ProjectConfiguration
from headway.core.tracking.runlog_reader import read_run
from tests.unit.core.tracking.wandb_file import read_offline_run

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "name": "small"}}


@pytest.fixture(autouse=True)
def _isolated_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def start(name, project="p", config=CONFIG, **init_kwargs):
    accelerator = Accelerator(cpu=True, log_with=name, project_config=ProjectConfiguration("run"))
    accelerator.init_trackers(project, config, {name: init_kwargs})
    assert [tracker.name for tracker in accelerator.trackers] == [name]
    return accelerator


def log_everything(accelerator, steps=(1, 2, 3)):
    """Log values for each step, then texts, images and artifacts."""
    for step in steps:
        accelerator.log({"loss": 1.0 / step, "eval": {"accuracy": 0.5}}, step=step)
    accelerator.log({"note": "warm", "odd name!": 2.0}, step=3)
    accelerator.log_images({"samples": torch.ones(3, 6, 5), "maps": torch.zeros(2, 1, 6, 5)}, step=3)
    Path("weights.bin").write_text("weights")
    accelerator.log_artifact("weights.bin")
    Path("folder").mkdir(exist_ok=True)
    Path("folder", "vocabulary.txt").write_text("words")
    accelerator.log_artifact("folder", name="words")


def read_events(folder):
    """Return TensorBoard's reader of the event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0, "images": 0})
    read.Reload()
    return read


def test_tensorboard_receives_all_values():
    accelerator = start("tensorboard")
    log_everything(accelerator)
    tracker = accelerator.get_tracker("tensorboard")
    assert tracker.writer is accelerator.get_tracker("tensorboard", unwrap=True)
    tracker.writer.add_images("by hand", torch.zeros(2, 6, 5, 3), 1, dataformats="NHWC")
    tracker.log_images({"direct": torch.zeros(6, 5)}, step=1)
    accelerator.end_training()
    read = read_events("run/p")
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert set(read.Tags()["scalars"]) == {"loss", "eval/accuracy", "odd name!"}
    assert read.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"warm"]
    assert b'"layers"' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert (read.Images("samples")[0].width, read.Images("samples")[0].height) == (5, 6)
    assert {"maps/0", "maps/1", "by hand", "direct"} <= set(read.Tags()["images"])
    hparams = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"model/layers" in hparams
    assert b"[1, 2]" in hparams


def test_tensorboard_skips_values_that_a_resume_supersedes():
    log_everything(start("tensorboard"))
    time.sleep(1.1)  # event files are read in the order of their names, which start with the time in seconds
    accelerator = start("tensorboard")
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.get_tracker("tensorboard").rewind(1)
    assert accelerator.get_tracker("tensorboard", unwrap=True) is writer
    accelerator._recorder.run_logger._is_run_decided = True
    accelerator.log({"loss": 20.0}, step=2)
    accelerator.end_training()
    assert [(each.step, each.value) for each in read_events("run/p").Scalars("loss")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.slow
def test_wandb_writes_offline_without_a_login(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "headway"):
        accelerator = start("wandb", "team/p")
    assert "no user is logged in, so the run is written offline" in caplog.text
    log_everything(accelerator)
    run = accelerator.get_tracker("wandb", unwrap=True)
    (event,) = [each for each in read_run("run/team/p").events if each.name == "tracker"]
    assert event.details == {"tracker": "wandb", "identity": {"id": run.id}}
    accelerator.end_training()
    told = read_offline_run(Path("run"))
    assert (told["id"], told["project"], told["exit"]) == (run.id, "team-p", 0)
    assert {name: told["config"][name] for name in CONFIG} == CONFIG
    losses = [(row["global_step"], row["loss"]) for row in told["rows"] if "loss" in row]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [row["note"] for row in told["rows"] if "note" in row] == ["warm"]
    (images,) = [row for row in told["rows"] if "samples/_type" in row]
    assert (images["samples/width"], images["samples/height"], images["maps/count"]) == (5, 6, 2)
    assert told["artifacts"] == [("file", "weights.bin"), ("file", "words")]


@pytest.mark.slow
def test_wandb_writes_offline_if_the_server_is_unreachable(monkeypatch, caplog):
    import wandb

    with socket.socket() as taken:  # bound but not listening, so that every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = wandb.Settings(base_url=url, api_key="0" * 40, init_timeout=1, silent=True)
        accelerator = start("wandb", settings=settings)
        accelerator.log({"loss": 1.0}, step=1)
        accelerator.end_training()
    assert "the server cannot be reached" in caplog.text
    (folder,) = Path("run").rglob("offline-run-*")
    assert [row["loss"] for row in read_offline_run(folder)["rows"]] == [1.0]


@pytest.mark.slow
def test_mlflow_receives_all_values_and_continues_the_run(tmp_path):
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/store.db"
    accelerator = start("mlflow", tracking_uri=store, run_name="first")
    run_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    log_everything(accelerator)
    # The run is killed here. The next process continues without a resume, with another learning rate.
    import mlflow

    mlflow.end_run("KILLED")
    accelerator = start("mlflow", config=CONFIG | {"lr": 0.2}, tracking_uri=store)
    log_everything(accelerator, (4,))
    accelerator.end_training()
    assert mlflow.active_run() is None
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_id, run.info.status, run.info.run_name) == (run_id, "FINISHED", "first")
    assert run.data.params == {"lr": "0.1", "model/layers": "[1, 2]", "model/name": "small"}
    assert run.data.tags["lr after restart"] == "0.2"
    assert run.data.tags["note"] == "warm"
    history = client.get_metric_history(run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
        (4, 0.25),
    ]
    assert client.get_metric_history(run_id, "odd name_")[0].value == 2.0
    assert {each.path for each in client.list_artifacts(run_id)} == {"images", "weights.bin", "words"}
    images = {each.path for each in client.list_artifacts(run_id, "images")}
    assert images == {
        f"images/{name}-00000003{part}.png" for name, part in [("samples", ""), ("maps", "-0"), ("maps", "-1")]
    }
    (tmp_path / "copies").mkdir()
    copy = client.download_artifacts(run_id, "words", str(tmp_path / "copies"))
    assert Path(copy, "vocabulary.txt").read_text() == "words"
    # Values belong to the tracker's run, even while another run or none is active.
    accelerator = start("mlflow")
    own_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    with mlflow.start_run(nested=True) as nested:
        accelerator.log({"loss": 1.0, "note": "nested"}, step=1)
    assert client.get_run(own_id).data.tags["note"] == "nested"
    assert "note" not in client.get_run(nested.info.run_id).data.tags
    mlflow.end_run()
    accelerator.log({"note": "ended"}, step=2)
    assert mlflow.active_run() is None
    assert client.get_run(own_id).data.tags["note"] == "ended"
    accelerator.end_training()
    # The end of the tracker's run ends no other run, even if the script has started one afterwards.
    for is_ended in (True, False):
        accelerator = start("mlflow")
        own_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
        if is_ended:
            mlflow.end_run("KILLED")
        other = mlflow.start_run(nested=True)
        accelerator.end_training()
        assert client.get_run(own_id).info.status == ("KILLED" if is_ended else "FINISHED")
        assert mlflow.active_run().info.run_id == other.info.run_id
        mlflow.end_run()
    mlflow.end_run()
    # A run that the script has started is used, and not ended.
    with mlflow.start_run() as own:
        accelerator = start("mlflow")
        accelerator.log({"loss": 1.0}, step=1)
        accelerator.end_training()
        assert mlflow.active_run().info.run_id == own.info.run_id
    assert client.get_run(own.info.run_id).data.metrics == {"loss": 1.0}
