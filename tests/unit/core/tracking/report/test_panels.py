"""Test the charts of a report: their titles, sections, lines, colors, axes and number of points."""

from pathlib import Path

import pytest

from headway.core.tracking.report import load
from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.key_figures import list_key_figures
from headway.core.tracking.report.panels import ALL_BUCKETS, build_panels, find_value_range
from tests.unit.core.tracking.report.logs import Log, write_realistic_log


def test_panels_of_one_run(tmp_path):
    found = build_panels(load([write_realistic_log(tmp_path / "run", steps=200)]))
    assert [(panel.section, panel.title, [line.label for line in panel.lines]) for panel in found] == [
        ("Training", "Loss", ["training", "evaluation"]),
        ("Training", "Learning rate", [""]),
        ("Training", "Gradient norm", [""]),
        ("Speed", "Samples per second", [""]),
        ("Speed", "Tokens per second", [""]),
        ("Speed", "Model FLOPs utilization", [""]),
        ("Speed", "Time spent waiting for data", [""]),
        ("Memory", "Memory by phase", ["in use", "forward", "backward", "optimizer", "peak"]),
        ("Evaluation", "Accuracy", [""]),
    ]
    assert [line.color for line in found[0].lines] == [0, 1]
    assert [panel.title for panel in found if panel.is_wide] == ["Loss", "Memory by phase", "Accuracy"]


def test_several_runs_have_one_color_each_and_a_chart_for_each_phase(tmp_path):
    found = build_panels(load([write_realistic_log(tmp_path / name, steps=40) for name in "ab"]))
    assert all({line.color for line in panel.lines} == {0, 1} for panel in found)
    assert [panel.title for panel in found if panel.section == "Memory"] == [
        "Memory, in use", "Memory in forward", "Memory in backward", "Memory in optimizer", "Memory, peak",
    ]  # fmt: skip


def test_other_values_have_separate_charts(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in (1, 2):
        log.values(step, reward=1.0, steps_per_second=3.0, spilled_bytes=10)
    found = build_panels(load([log.write()]))
    assert [(panel.section, panel.title, panel.unit) for panel in found] == [
        ("Speed", "Steps per second", "rate"), ("More", "reward", "number"), ("More", "spilled_bytes", "bytes"),
    ]  # fmt: skip


def test_names_in_other_styles_are_recognized(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in (1, 2):
        log.line("values", step=step, values={
            "train/loss": 2.0, "val/loss": 3.0, "eval/loss": 4.0, "lr": 0.1, "norm": 1.0, "d_loss": 1.0, "test_f1": 0.5,
            "val/accuracy": 0.5, "eval/accuracy": 0.6, "value_loss": 1.0, "validity": 1.0,
        })  # fmt: skip
    runs = load([log.write()])
    found = [(panel.section, panel.title, [line.label for line in panel.lines]) for panel in build_panels(runs)]
    assert sorted(found, key=lambda each: (each[0] != "Training", each[0] == "More")) == [
        ("Training", "Loss", ["training", "validation", "evaluation"]), ("Training", "Learning rate", [""]),
        ("Training", "Gradient norm", [""]), ("Training", "d_loss", [""]), ("Training", "value_loss", [""]),
        ("Evaluation", "F1", [""]), ("Evaluation", "Accuracy", ["validation", "evaluation"]),
        ("More", "validity", [""]),
    ]  # fmt: skip
    figures = {fact.name: fact.value for fact in list_key_figures(runs[0])}
    assert (figures["Best validation loss"], figures["Best evaluation loss"]) == ("3", "4")


def test_many_series_share_a_limited_number_of_points(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in range(1000):
        log.values(step, **{f"layer_{index}": float(step) for index in range(100)})
    found = build_panels(load([log.write()]))
    assert sum(len(line.series.means) for panel in found for line in panel.lines) <= ALL_BUCKETS


@pytest.mark.slow
@pytest.mark.timeout(60)  # quadratic work would take minutes
def test_very_many_names_take_seconds():
    names = [f"{kind}{index}" for kind in ("eval_", "memory/", "more_") for index in range(60_000)]
    points = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]
    found = build_panels([RunData("run", Path("run"), series=dict.fromkeys(names, points))])
    assert sum(len(panel.lines) for panel in found) == len(names)


def test_single_spike_does_not_determine_the_axis(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in range(300):
        log.values(step, grad_norm=1e9 if step == 77 else 1.0 + step % 7 / 10)
    panel, speed = build_panels(load([log.write()]))
    assert (panel.title, speed.title) == ("Gradient norm", "Steps per second")
    low, high = find_value_range(panel)
    assert low == 0
    assert 1.6 <= high < 2


def test_axes_of_extreme_values_have_a_width(tmp_path):
    for values in ([0.0], [5.0, 5.0], [1e308, -1e308], [5e-324, 0.0], [-3.0], ["nan"], ["inf", "-inf"]):
        log = Log(tmp_path / "run")
        log.run()
        for step, value in enumerate(values):
            log.values(step, loss=value, learning_rate=value)
        for panel in build_panels(load([log.write()])):
            low, high = find_value_range(panel)
            assert low < high, values
