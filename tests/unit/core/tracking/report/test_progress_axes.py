"""Test the axes of tokens and samples: which runs have them, and the counts at each step."""

import pytest

from headway.core.tracking.report import html_page, load
from headway.core.tracking.report.panels import MAX_BUCKETS
from headway.core.tracking.report.progress_axes import find_progress_axes
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
