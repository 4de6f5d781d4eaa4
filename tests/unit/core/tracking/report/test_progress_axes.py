"""Test the axes of tokens and samples: which runs have them, and the counts at each step."""

import math

import pytest

from headway.core.tracking.report import html_page, load
from headway.core.tracking.report.drawing import draw_charts
from headway.core.tracking.report.panels import MAX_BUCKETS
from headway.core.tracking.report.progress_axes import find_progress_axes, interpolate_count, require_counts
from headway.errors import ConfigError
from tests.unit.core.tracking.report.logs import Log
from tests.unit.core.tracking.report.test_page import read_payload


def write_run(folder, name, **values_by_step):
    """Write the log of a run that logs a loss in each of 10 steps, and each named value at the steps of its dict."""
    log = Log(folder / name)
    log.run()
    for step in range(1, 11):
        counts = {key: values[step] for key, values in values_by_step.items() if step in values}
        log.values(step, loss=1 / step, **counts)
    return log.write()


def find_axes(*folders):
    return find_progress_axes(load(folders))


def test_counts_begin_at_zero_and_increase(tmp_path):
    axes = find_axes(write_run(tmp_path, "run", tokens_seen={2: 200, 4: 400, 5: 400, 6: float("nan"), 8: 1000}))
    assert axes == {"tokens": [[(0, 0), (2, 200), (4, 400), (8, 1000)]]}


def test_run_that_started_again_keeps_increasing_counts(tmp_path):
    axes = find_axes(write_run(tmp_path, "run", samples_seen={1: 5, 2: 10, 3: 4, 4: 8, 5: 12}))
    assert axes == {"samples": [[(0, 0), (1, 5), (2, 10), (5, 12)]]}


@pytest.mark.parametrize("name", ["tokens_seen", "num_input_tokens_seen", "train/tokens_seen"])
def test_names_of_the_trainer_and_with_a_prefix_count(tmp_path, name):
    assert find_axes(write_run(tmp_path, "run", **{name: {10: 7}})) == {"tokens": [[(0, 0), (10, 7)]]}


@pytest.mark.parametrize("counts", [{}, {"eval_tokens_seen": {10: 7}}, {"tokens_seen": {10: 0}}, {"tokens": {10: 7}}])
def test_runs_without_counts_have_no_such_axis(tmp_path, counts):
    counted = write_run(tmp_path, "counted", tokens_seen={10: 7}, samples_seen={10: 1})
    other = write_run(tmp_path, "other", samples_seen={10: 3}, **counts)
    assert find_axes(counted, other) == {"samples": [[(0, 0), (10, 1)], [(0, 0), (10, 3)]]}


def test_long_runs_keep_the_last_count(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in range(1, 5001):
        log.values(step, loss=1.0, tokens_seen=step * step)
    (counts,) = find_axes(log.write())["tokens"]
    assert len(counts) <= MAX_BUCKETS + 1
    assert counts[0] == (0, 0)
    assert counts[-1] == (5000, 5000**2)
    assert all(count == step * step for step, count in counts)


def test_page_has_a_button_and_the_counts_of_each_axis(tmp_path):
    page = html_page(load([write_run(tmp_path, "run", tokens_seen={5: 50, 10: 200})]))
    assert 'data-axis="tokens"' in page
    assert 'data-axis="samples"' not in page
    assert read_payload(page)["axes"] == {"tokens": [{"s": [0, 5, 10], "n": [0, 50, 200]}]}


@pytest.mark.parametrize(
    ("step", "count"), [(0, 0), (1, 100), (2, 200), (3, 300), (4, 400), (6, 700), (8, 1000), (10, 1300), (-1, -100)]
)
def test_counts_between_and_outside_of_logged_steps_follow_the_pace(step, count):
    assert interpolate_count([(0, 0), (2, 200), (4, 400), (8, 1000)], step) == pytest.approx(count)


def test_counts_that_are_missing_are_an_error_with_the_names_of_the_runs(tmp_path):
    runs = load(
        [write_run(tmp_path, "counted", samples_seen={10: 7}), write_run(tmp_path, "bare", samples_seen={9: 3})]
    )
    assert require_counts(runs, "samples") == [[(0, 0), (10, 7)], [(0, 0), (9, 3)]]
    with pytest.raises(ConfigError, match=r"'tokens' needs tokens_seen or .* counted, bare did not .* step, samples\."):
        require_counts(runs, "tokens")


@pytest.mark.slow
def test_pictures_place_values_marks_and_events_by_counts(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure", reason="PNGs need the plots extra")
    figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, path: figures.append(figure))
    for name, tokens_per_step in (("small", 100), ("large", 400)):
        log = Log(tmp_path / name)
        log.run()
        for step in range(1, 6):
            log.values(step, loss=math.nan if step == 3 else 1.0 / step)
            if step in (1, 5):
                log.values(step, tokens_seen=tokens_per_step * step)
        log.event("out_of_memory", 2)
        log.write()
    runs = load([tmp_path / "small", tmp_path / "large"])
    draw_charts(runs, tmp_path / "pictures", "tokens")
    (axes,) = figures[0].axes
    places = [[float(x) for x in line.get_xdata()] for line in axes.lines]
    assert axes.get_xlabel() == "tokens"
    assert [100, 200, 300, 400, 500] in places
    assert [400, 800, 1200, 1600, 2000] in places
    assert [300] in places  # the marks of NaN
    assert [1200] in places
    assert [200, 200] in places  # the vertical lines of the events
    assert [800, 800] in places
    assert axes.get_xlim()[1] == 2000
    figures.clear()
    draw_charts(runs, tmp_path / "pictures")
    assert figures[0].axes[0].get_xlabel() == "step"
    assert figures[0].axes[0].get_xlim()[1] == 5
