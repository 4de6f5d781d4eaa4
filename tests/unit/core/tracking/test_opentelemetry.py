"""Test OpenTelemetry: the data that a collector on loopback receives over OTLP, and runs without a collector."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from headway import Accelerator, ProjectConfiguration
from headway.common import optional
from headway.core.runtime.events import notify_listeners
from headway.core.tracking import otlp, selection
from headway.core.tracking.runlog_reader import read_run
from headway.core.tracking.selection import select_trackers
from headway.errors import OptionalDependencyMissing
from tests.unit.core.tracking.otlp_receiver import run_collector

CONFIG = {"lr": 0.1, "model": {"layers": [1, 2], "name": "small"}}
AWAY = "http://127.0.0.1:9"  # nothing listens on the port of the discard service


@pytest.fixture(autouse=True)
def _isolated_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch):
    """Collector whose address is set in the environment."""
    with run_collector() as (found, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        yield found


def start(folder="run", **init_kwargs):
    accelerator = Accelerator(cpu=True, log_with="opentelemetry", project_config=ProjectConfiguration(folder))
    accelerator.init_trackers("p", CONFIG, {"opentelemetry": init_kwargs})
    return accelerator


def test_sent_data_of_a_run(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    random.seed(0)
    before = random.getstate()
    accelerator = start(resource={"team": "vision"})
    for step in (1, 2, 3):
        accelerator.log({"loss": torch.tensor(1.0 / step), "eval": {"accuracy": step}}, step=step)
    accelerator.log({"note": "warm", "2nd odd name!": 2.0, "worst": float("inf"), "done": True}, step=3)
    accelerator.log_event("evaluation", step=2, samples=400, parts=["a", "b"], left_out=None)
    notify_listeners("out_of_memory", step=3, ranks=[0], rows=8, pieces=4)
    accelerator.end_trackers({"best": 0.5})
    assert random.getstate() == before
    assert read_run("run/p").events[-1].name == "out_of_memory"  # the tracker has logged no failure

    (about,) = {tuple(sorted(each.items())) for each in collector.resources}
    about = dict(about)
    assert (about["service.name"], about["team"], about["deployment.environment.name"]) == ("p", "vision", "test")
    assert {each["Api-Key"] for each in map(normalize_headers, collector.headers)} == {"secret"}
    assert dict(collector.metrics) == {
        "loss": pytest.approx(1 / 3),
        "eval/accuracy": 3,
        "value.2nd_odd_name_": 2,
        "done": 1,
        "headway.step": 3,
    }
    (_, end) = collector.records.pop()
    assert (end["num_updates"], end["best"]) == (0, 0.5)
    assert collector.records == [
        ("headway.config", {"lr": 0.1, "model.layers": "[1, 2]", "model.name": "small"}),
        ("headway.text", {"step": 3, "note": "warm", "worst": "inf"}),
        ("headway.evaluation", {"step": 2, "samples": 400, "parts": '["a", "b"]'}),
        ("headway.out_of_memory", {"step": 3, "ranks": "[0]", "rows": 8, "pieces": 4}),
    ]


def normalize_headers(headers):
    return {name.title(): value for name, value in headers.items()}


def test_values_arrive_during_the_run(collector, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    accelerator = start()
    for step, loss in enumerate((0.5, 0.25)):
        accelerator.log({"loss": loss}, step=step)
        deadline = time.monotonic() + 60
        while ("loss", loss) not in collector.metrics:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    accelerator.end_training()


@pytest.mark.slow
def test_continued_run_keeps_its_instance_id(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    first = start()
    first.log({"loss": 1.0}, step=1)
    sender = first.get_tracker("opentelemetry")._sender
    first._recorder.run_logger = None  # "killed"
    sender.stdin.close()
    sender.wait(60)
    second = start()
    second.log({"loss": 0.5}, step=2)
    second.end_training()
    third = start()
    third.log({"loss": 1.0}, step=1)
    third.end_training()
    ids = list(dict.fromkeys(each["service.instance.id"] for each in collector.resources))
    assert len(ids) == 2, "the third run starts from the beginning"
    assert {each["service.name"] for each in collector.resources} == {"mine"}
    assert [value for name, value in collector.metrics if name == "loss"] == [1.0, 0.5, 1.0]
    assert [name for name, _ in collector.records] == [
        "headway.config",
        "headway.config",
        "headway.restart",
        "headway.resumed",
        "headway.end",
        "headway.config",
        "headway.started_over",
        "headway.end",
    ]


@pytest.mark.slow
def test_training_continues_without_a_collector(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", AWAY)
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT", 1.0)
    accelerator = start()
    begun = time.monotonic()
    while "the tracker opentelemetry failed" not in caplog.text:
        assert time.monotonic() - begun < 60
        accelerator.log({"loss": 1.0}, step=1)
        time.sleep(0.02)
    time.sleep(1.5)  # enough time for another warning
    for step in range(5):
        accelerator.log({"loss": 1.0}, step=step)
    assert [each.name for each in accelerator.trackers] == ["opentelemetry"]
    sender = accelerator.get_tracker("opentelemetry")._sender
    accelerator.end_training()
    assert sender.returncode == -signal.SIGKILL, "the sender must be killed, because it would try for 10 s"
    assert sum("opentelemetry" in each.getMessage() for each in caplog.records) == 1
    (event,) = [each for each in read_run("run/p").events if each.name == "tracker_failed"]
    assert "Connection refused" in event.details["error"]


def test_collector_that_refuses_is_named_at_the_end(collector, caplog):
    collector.status = 401
    accelerator = start()
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert "the collector cannot be reached, or refuses the data: Failed to export" in caplog.text
    assert "401" in caplog.text
    assert len(caplog.records) == 1
    assert [each.name for each in read_run("run/p").events if each.name.startswith("tracker_")] == ["tracker_failed"]


def test_sender_that_dies_is_named(collector, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0")  # the SDK raises ValueError
    accelerator = start()
    accelerator.get_tracker("opentelemetry")._sender.wait(60)
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
    assert "the process that sends the data has ended" in caplog.text
    assert "needs to be larger than zero" in caplog.text
    assert accelerator.trackers == []
    accelerator.end_training()


@pytest.mark.slow
def test_process_that_ends_without_end_training_has_sent_everything(collector):
    code = """
from headway import Accelerator
accelerator = Accelerator(cpu=True, log_with="opentelemetry")
accelerator.init_trackers("p")
accelerator.log({"loss": 1.0}, step=1)
raise SystemExit(3)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 3, result.stderr
    deadline = time.monotonic() + 60
    while not collector.metrics:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert dict(collector.metrics) == {"loss": 1.0, "headway.step": 1.0}


def test_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(selection, "is_available", lambda name: optional.is_available(name) and "otlp" not in name)
    with pytest.raises(
        OptionalDependencyMissing,
        match=r"log_with='opentelemetry' needs opentelemetry, which is not installed: pip install 'headway\[otel\]'$",
    ):
        start()


def test_all_includes_opentelemetry_if_an_endpoint_is_set(monkeypatch):
    def list_names():
        return [each.name for each in select_trackers("all", has_folder=True)]

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert "opentelemetry" not in list_names()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", AWAY)
    assert "opentelemetry" in list_names()
