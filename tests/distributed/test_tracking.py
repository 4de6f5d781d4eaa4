"""Trackers of real processes: only rank 0 writes, and a run that is killed and restarted is one run in every tracker."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, Tracker
from headway.core.tracking.runlog_reader import read_run
from tests.distributed.ranks import run_ranks
from tests.unit.core.tracking.otlp_receiver import run_collector
from tests.unit.core.tracking.test_trackers import read_events
from tests.unit.core.tracking.wandb_file import read_offline_run


class RecordingTracker(Tracker):
    name = "noted"

    def __init__(self):
        self.calls = []

    def store_init_configuration(self, values):
        self.calls.append("config")

    def log(self, values, step=None, **kwargs):
        self.calls.append(values)

    def finish(self):
        self.calls.append("finish")


class AllRanksTracker(RecordingTracker):
    name = "everywhere"
    main_process_only = False


def log_on_every_rank(folder):
    os.chdir(folder)
    main, everywhere = RecordingTracker(), AllRanksTracker()
    accelerator = Accelerator(
        cpu=True, log_with=["tensorboard", main, everywhere], project_config=ProjectConfiguration(folder)
    )
    accelerator.init_trackers("p", {"lr": 0.1})
    rank = accelerator.process_index
    accelerator.log({"loss": 1.0 + rank}, step=1)
    accelerator.log_images({"one": torch.zeros(4, 4)}, step=1)
    accelerator.log_event("evaluation", rank=rank)
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    writer.add_scalar("by hand", 3.0, 1)  # many scripts do this on every rank
    found = [tracker.name for tracker in accelerator.trackers], bool(writer)
    accelerator.end_training()
    return found, main.calls, everywhere.calls


def test_only_rank_0_writes(tmp_path):
    first, second = run_ranks(log_on_every_rank, 2, str(tmp_path))
    assert first == (
        (["tensorboard", "noted", "everywhere"], True), ["config", {"loss": 1.0}, "finish"], ["config", {"loss": 1.0}, "finish"]
    )  # fmt: skip
    assert second == ((["everywhere"], False), [], ["config", {"loss": 2.0}, "finish"])
    run = read_run(tmp_path / "p")
    assert [point[::2] for point in run.values["loss"]] == [(1, 1.0)]
    assert run.starts[0].world_size == 2
    assert [each.details for each in run.events] == [{"rank": 0}]
    assert run.is_ended
    assert set(read_events(tmp_path / "p").Tags()["scalars"]) == {"loss", "by hand"}


def log_to_collector(address):
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
    accelerator = Accelerator(cpu=True, log_with="opentelemetry", on_non_finite="skip")
    accelerator.init_trackers("p", {"lr": 0.1})
    rank = accelerator.process_index
    model, loader = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for number, (x,) in enumerate(loader):
        accelerator.backward(model(x).sum() * (float("nan") if (rank, number) == (1, 1) else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": 10.0 * rank + accelerator.num_updates})
    accelerator.end_training()


def test_only_rank_0_sends_to_a_collector():
    with run_collector() as (collector, address):
        run_ranks(log_to_collector, 2, address)
    assert dict(collector.metrics) == {"loss": 2.0, "headway.step": 2.0}
    assert len({each["service.instance.id"] for each in collector.resources}) == 1
    assert [name for name, _ in collector.records] == ["headway.config", "headway.non_finite", "headway.end"]
    assert collector.records[1][1]["step"] == 1


KILLED = """
import os, random, signal
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, log_with=["tensorboard", "wandb", "mlflow"], project_config=project)
accelerator.init_trackers("p", {"lr": 0.1}, {"mlflow": {"tracking_uri": "file:store"}})
model = torch.nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
accelerator.trackers[0].is_first = accelerator.resume("latest") is None
for epoch in accelerator.epochs(2):
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach(), "drawn": random.random()})
        if accelerator.num_updates % 4 == 0:
            accelerator.save_state()
        if accelerator.num_updates == 10 and accelerator.trackers[0].is_first:
            os.killpg(0, signal.SIGKILL)  # also kills processes that the trackers started
accelerator.end_training()
"""


@pytest.mark.slow
def test_killed_and_restarted_run_is_one_run_in_every_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # avoids creating a database, which takes seconds
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv(
        "WANDB_SERVICE", raising=False
    )  # set by an earlier test of this process, and not the service that is killed here
    for code in (-signal.SIGKILL, 0):
        result = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, start_new_session=True, capture_output=True,
                             text=True, timeout=250)  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
    run = read_run(tmp_path / "run" / "p")
    assert [start.attempt for start in run.starts] == [1, 2]
    assert [point[0] for point in run.values["loss"]] == list(range(1, 13))
    events = [(each.name, each.step) for each in run.events if each.name in ("restart", "resumed", "checkpoint")]
    assert events == [("checkpoint", 4), ("checkpoint", 8), ("restart", 0), ("resumed", 8), ("checkpoint", 12)]
    assert run.summary["num_updates"] == 12
    losses = [pytest.approx(point[2]) for point in run.values["loss"]]

    assert [(each.step, each.value) for each in read_events(tmp_path / "run" / "p").Scalars("loss")] == list(
        enumerate(losses, 1)
    )

    first, second = sorted((tmp_path / "run" / "p" / "wandb").glob("offline-run-*"))
    before, after = read_offline_run(first, is_finished=False), read_offline_run(second)
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2] == after["id"]
    assert after["exit"] == 0
    rows = {row["global_step"]: row["loss"] for row in before["rows"] + after["rows"]}
    assert [
        rows.get(step) for step in range(1, 13)
    ] == losses  # values that were not yet written at the kill were sent again

    from mlflow import MlflowClient

    client = MlflowClient(f"file:{tmp_path}/store")
    (found,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted({each.step for each in history}) == list(range(1, 13))
    assert [each.value for each in history if each.step > 10] == losses[10:]
