"""Test the chart of the time that each rank waited for data, and the rank that waited longest."""

from headway.core.tracking.report import load
from headway.core.tracking.report.key_figures import list_key_figures
from headway.core.tracking.report.panels import build_panels
from tests.unit.core.tracking.report.logs import Log


def test_all_ranks_are_on_one_chart_and_the_longest_wait_is_named(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in (1, 2, 3):
        log.values(
            step, **{"data_wait": 0.1, "data_wait/rank_0": 0.1, "data_wait/rank_1": 0.4, "data_wait/rank_2": 0.2}
        )
    runs = load([log.write()])
    found = build_panels(runs)
    assert [(panel.section, panel.title, [line.label for line in panel.lines]) for panel in found] == [
        ("Speed", "Time spent waiting for data", [""]),
        ("Speed", "Time spent waiting for data, by rank", ["0", "1", "2"]),
    ]
    facts = {fact.name: (fact.value, fact.note) for fact in list_key_figures(runs[0])}
    assert facts["Waits longest for data"][0] == "rank 1"
    assert facts["Waits longest for data"][1].startswith("40")


def test_samples_and_tokens_seen_are_figures_and_no_charts(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step in (1, 2, 3):
        log.values(step, samples_seen=4 * step, tokens_seen=100 * step, padding_tokens_seen=step)
    runs = load([log.write()])
    assert build_panels(runs) == []
    facts = {fact.name: fact.value for fact in list_key_figures(runs[0])}
    assert (facts["Samples seen"], facts["Tokens seen"]) == ("12", "300")
