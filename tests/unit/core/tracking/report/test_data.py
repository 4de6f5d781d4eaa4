"""Test how the report reads run logs: series, events, restarts, labels, differences, and damaged or missing logs."""

import json
import math
from pathlib import Path

import pytest

from headway.core.tracking.report import load
from headway.core.tracking.report.key_figures import infer_run_status, list_differences, list_key_figures
from headway.core.tracking.report.log_search import find_log
from headway.core.tracking.report.page import html_page
from headway.core.tracking.runlog import RunLog
from headway.errors import ConfigError, TrackingError
from tests.unit.core.tracking.report.logs import BEGAN, Log, write_realistic_log


def test_log_of_the_writer_is_read(tmp_path):
    log = RunLog(tmp_path / "run")
    log.write_start("digits", {"optimizer": {"lr": 0.1}}, world_size=2, device="cpu", versions={"torch": "2.13"})
    for step in range(5):
        log.write_values(step, {"loss": 1.0 / (step + 1), "note": "warm"})
    log.write_event("checkpoint", 4, path="checkpoint_4")
    log.write_end({"train_loss": 0.2})
    log.close()
    (run,) = load([tmp_path / "run"])
    assert (run.label, run.project, run.is_finished, run.ends_in_partial_line) == ("run", "digits", True, False)
    assert run.config == {"optimizer.lr": 0.1}
    assert [(step, value) for step, _, value in run.series["loss"]] == [(step, 1.0 / (step + 1)) for step in range(5)]
    assert run.texts == {"note": "warm"}
    assert [(event.kind, event.step) for event in run.events] == [("checkpoint", 4)]
    assert run.summary == {"train_loss": 0.2}


def test_values_without_a_step_get_the_latest_step(tmp_path):
    log = Log(tmp_path / "run", pace=1.0)
    log.run()
    log.values(10, loss=3.0)
    log.values(None, temperature=60.0)
    log.values(20, loss=2.0)
    log.event("note")
    (run,) = load([log.write()])
    assert run.series["temperature"] == [(10, 2.0, 60.0)]
    assert [(event.step, event.has_step) for event in run.events] == [(20, False)]


def test_run_without_steps_uses_seconds(tmp_path):
    log = Log(tmp_path / "run", pace=2.0)
    log.run()
    log.values(None, loss=3.0)
    log.values(None, loss=2.0)
    (run,) = load([log.write()])
    assert not run.has_steps
    assert run.last_step is None
    assert run.series["loss"] == [(2.0, 2.0, 3.0), (4.0, 4.0, 2.0)]


def test_steps_out_of_order_and_unusual_values_are_read(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in ((5, 1), (3, True), (4, math.nan), (10**30, 10**400)):
        log.line("values", step=step, values={"loss": value if value == value else "nan"})
    (run,) = load([log.write()])
    assert [step for step, _, _ in run.series["loss"]] == [3, 4, 5, 2**53]
    assert run.series["loss"][0][2] == 1.0
    assert math.isnan(run.series["loss"][1][2])
    assert run.series["loss"][-1][2] == math.inf


def test_run_status_is_inferred(tmp_path):
    def write_and_infer(name, tail="", *, ends=False, event=None, time=BEGAN):
        log = Log(tmp_path / name)
        log.time = time
        log.run()
        log.values(1, loss=1.0)
        if event:
            log.event(event, 1)
        if ends:
            log.line("end", summary={})
        return infer_run_status(load([log.write(tail)])[0]).word

    from time import time as now

    assert write_and_infer("a", ends=True) == "finished"
    assert write_and_infer("b") == "no end"
    assert write_and_infer("c", '{"kind":"valu') == "cut off"
    assert write_and_infer("d", event="preempted") == "preempted"
    assert write_and_infer("e", time=now() - 5) == "no end yet"


def test_restart_without_an_event_is_an_event(tmp_path):
    (run,) = load([write_realistic_log(tmp_path / "run", steps=200)])
    assert [event.kind for event in run.events if event.kind in ("restart", "preempted", "resumed")] == [
        "preempted", "restart", "resumed",
    ]  # fmt: skip
    assert len(run.restarts) == 1
    facts = {fact.name: fact for fact in list_key_figures(run)}
    assert facts["Duration"].note == "2 attempts"
    assert facts["Incidents"].note == "1 out of memory, 1 preempted, 1 restart"
    assert facts["Peak memory"].value == "26.4 GiB"


def test_restart_logged_by_the_launcher_is_shown_once(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    log.values(25, loss=1.0)
    log.time += 7
    log.run(attempt=2)
    log.event("restart", 0, restart_count=0)
    log.event("resumed", 20)
    log.values(21, loss=1.0)
    log.time += 60
    log.run(attempt=3)
    log.values(22, loss=1.0)
    (run,) = load([log.write()])
    told = [(event.kind, {**event.details}) for event in run.events if event.kind == "restart"]
    pauses = [details.pop("pause_seconds") for _, details in told]
    assert told == [("restart", {"after_step": 25}), ("restart", {"attempt": 3, "after_step": 21})]
    assert pauses == pytest.approx([7, 60], abs=2)
    assert [event.step for event in run.events if event.kind == "restart"] == [25, 21]


def test_speed_is_computed_from_times_if_none_was_logged(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in range(1, 13):
        log.time = BEGAN + step / 4
        log.values(step, loss=1.0, lr=0.1)
    (run,) = load([log.write()])
    assert [value for _, _, value in run.series["steps_per_second"]] == pytest.approx([4.0] * 11)
    log.values(13, loss=1.0, samples_per_second=8.0)
    (run,) = load([log.write()])
    assert "steps_per_second" not in run.series


def test_labels_distinguish_runs(tmp_path):
    for name in ("a/digits", "b/digits", "c/text"):
        write_realistic_log(tmp_path / name, steps=20)
    assert [run.label for run in load([tmp_path / "a/digits", tmp_path / "c/text"])] == ["digits", "text"]
    assert [run.label for run in load([tmp_path / "a/digits", tmp_path / "b/digits"])] == ["a/digits", "b/digits"]
    assert len(load([tmp_path / "a/digits", tmp_path / "a/digits/log.jsonl"])) == 1


def test_only_different_settings_are_listed(tmp_path):
    one, other = load(
        [
            write_realistic_log(tmp_path / "a", seed=0, steps=20),
            write_realistic_log(tmp_path / "b", seed=1, lr=1e-3, steps=20),
        ]
    )
    assert list_differences([one, other]) == [("optimizer.lr", ["0.0003", "0.001"]), ("seed", ["0", "1"])]
    other.config["extra"] = None
    assert ("extra", [None, "null"]) in list_differences([one, other])


def test_error_for_a_wrong_path_lists_the_runs_nearby(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ConfigError, match=r"no run at .*missing.*log\.jsonl.*no run was found in .*folders below it"
    ) as exc_info:
        load([tmp_path / "missing"])
    assert "notes.txt" not in str(exc_info.value)
    with pytest.raises(ConfigError, match=r"is not a run: there is no .*log\.jsonl"):
        load([tmp_path])
    write_realistic_log(tmp_path / "deep" / "run", steps=5)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there are runs at deep/run$"):
        load([Path("missing")])
    with pytest.raises(ConfigError, match=r"there are runs at deep/run$"):
        load([tmp_path / "missing" / "further"])
    assert (
        load([tmp_path])[0].path == (tmp_path / "deep" / "run" / "log.jsonl").resolve()
    )  # the only run below the folder
    write_realistic_log(tmp_path / "other", steps=5)
    with pytest.raises(ConfigError, match=r"folders below it do: headway report .*deep.run"):
        load([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there are runs at .*other") as exc_info:
        load([tmp_path / "empty"])
    assert "deep/run" in str(exc_info.value)
    with pytest.raises(TrackingError):
        load([tmp_path / "notes.txt"])


def test_unreadable_lines_are_reported(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    log.values(1, loss=1.0)
    log.lines.append("{broken")
    log.values(2, loss=1.0)
    (run,) = load([log.write()])
    assert run.damaged_lines == [3]
    assert len(run.series["loss"]) == 2
    assert json.dumps(run.config) == "{}"


def write_restarted(folder, **details):
    """Write and load the log of a run that was restarted once, whose last process ran for two seconds."""
    log = Log(folder, pace=1.0)
    log.run()
    log.event("tracker", tracker="wandb", identity={"id": "abc123"})
    for step in (1, 2, 3):
        log.values(step, loss=1.0 / step, **{"eval/accuracy": 0.5 + 0.1 * step, "eval/runtime": 2.0})
    log.time += 30
    log.run(attempt=2)
    log.event("restart", step=0, **details, restart_count=1)
    log.values(4, loss=0.1)
    log.line("end", summary={"num_updates": 4, "seconds": 2.0})
    log.write()
    return load([folder])[0]


def test_restart_names_its_reason_and_no_dictionary_is_printed(tmp_path):
    reason = "rank 1 of 2 failed first (ended by SIGKILL)"
    run = write_restarted(tmp_path / "a", reason=reason)
    page = html_page([run])
    assert f"{reason}, restart count 1, after step 3" in page
    assert "tracker wandb, identity id abc123" in page
    assert "tracker connected" in page
    assert "A tracker has opened its run." in page
    assert "{&#x27;" not in page


def test_durations_on_a_page_agree(tmp_path):
    run = write_restarted(tmp_path / "a")
    page = html_page([run])
    assert "<dt>Duration</dt><dd>38 s" in page
    assert "<dt>duration of the last attempt</dt><dd>2 s</dd>" in page
    assert "<dt>seconds</dt>" not in page
    write_realistic_log(tmp_path / "once", steps=5)
    assert "<dt>seconds</dt>" not in html_page(load([tmp_path / "once"]))


def test_metrics_are_compared(tmp_path):
    runs = [write_restarted(tmp_path / name) for name in ("a", "b")]
    figures = {fact.name: fact for fact in list_key_figures(runs[0])}
    assert (figures["Evaluation accuracy"].value, figures["Evaluation accuracy"].note) == ("0.8", "from 0.6 to 0.8")
    assert "Evaluation runtime" not in figures
    assert "<th>Evaluation accuracy</th>" in html_page(runs)


def test_run_is_found_some_folders_below(tmp_path):
    folder = write_realistic_log(tmp_path / "runs/demo/troubled/demo", steps=5)  # the folder of `make demo`
    assert find_log(tmp_path) == folder / "log.jsonl"
    write_realistic_log(tmp_path / "runs/demo/undisturbed/demo", steps=5)
    with pytest.raises(ConfigError, match=r"headway report .*/troubled/demo .*/undisturbed/demo$"):
        find_log(tmp_path)
