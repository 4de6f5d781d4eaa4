"""Test the page of a forecast: well formed, without scripts or downloads, and with escaped names."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from headway.core.tracking.report.forecast_page import render_forecast_page

MIB = 1 << 20


def make_forecast(**changes):
    return {
        "device": "rtx-3090", "batch_size": 8, "allocated": 100 * MIB, "reserved": 120 * MIB, "least": 1000 * MIB,
        "total": 1200 * MIB, "most": 1300 * MIB, "split": {"weights": 60 * MIB, "activations": 40 * MIB},
        "peak": "step 2 backward", "peak_line": "train.py:12", "budget": 2000 * MIB, "fits": True, "largest_batch": 20,
        "longest_sequence": None, "num_traces": 4, "seconds": 3.0, "caveats": ("a caveat",),
        "timeline": {"places": [0, 5, 9], "sizes": {"weights": [60 * MIB] * 3, "activations": [0, 40 * MIB, 0]},
                     "phases": [("set-up", 0), ("step 1 forward", 1), ("end", 9)]},
        "by_batch": [(4, 900 * MIB), (8, 1300 * MIB), (24, 2400 * MIB)],
    } | changes  # fmt: skip


def parse_drawings(page):
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_both_charts_are_drawn():
    page = render_forecast_page("GPT-2", make_forecast())
    over_time, by_batch = parse_drawings(page)
    areas = [each for each in over_time.iter("path") if each.find("title") is not None]
    assert [each.find("title").text for each in areas] == ["weights", "activations"]
    texts = [each.text for each in over_time.iter("text")]
    assert texts.count("step 1") == texts.count("forward") == 1
    assert "step 1 forward" in [each.text for each in over_time.iter("title")]
    assert "set-up" not in texts
    assert "96 MiB" in texts
    assert "largest: 20" in [each.text for each in by_batch.iter("text")]
    assert "longest sequence" not in page
    assert "64,000" in render_forecast_page("GPT-2", make_forecast(longest_sequence=64_000))
    assert "a caveat" in page
    assert "train.py:12" in page


def test_areas_are_stacked():
    over_time = parse_drawings(render_forecast_page("x", make_forecast()))[0]
    roofs = []
    for area in (each for each in over_time.iter("path") if each.find("title") is not None):
        points = [tuple(map(float, point.split())) for point in re.findall(r"[\d.]+ [\d.]+", area.get("d"))]
        roofs.append(([y for _, y in points[:3]], [y for _, y in points[3:]][::-1]))
    (low_roof, low_floor), (high_roof, high_floor) = roofs
    assert high_floor == low_roof
    assert len(set(low_floor)) == 1
    assert high_roof[1] < high_floor[1]  # y decreases upward
    assert high_roof[0] == high_floor[0]


@pytest.mark.parametrize(("fits", "word"), [(True, "fits"), (False, "does not fit"), (None, "too close to tell")])
def test_answer_is_shown(fits, word):
    assert f">{word}</span>" in render_forecast_page("x", make_forecast(fits=fits))


def test_page_leaves_out_charts_without_a_budget_or_a_search():
    page = render_forecast_page("x", make_forecast(budget=None, fits=None, largest_batch=None, by_batch=[]))
    assert page.count("<svg") == 1
    assert "budget" not in page
    assert (
        len(
            parse_drawings(render_forecast_page("x", make_forecast(timeline={"places": [], "sizes": {}, "phases": []})))
        )
        == 2
    )


def test_page_has_no_scripts_and_escapes_names():
    page = render_forecast_page(
        "<script>alert(1)</script>", make_forecast(device="<b>", peak_line="<i>", caveats=("<u>",))
    )
    assert "<script" not in page
    assert "script-src 'none'" in page
    for markup in ("<b>", "<i>", "<u>"):
        assert markup not in page


def test_title_counts_the_steps_and_labels_do_not_overlap():
    names = [f"step {step} {name}" for step in (1, 2, 3) for name in ("forward", "backward", "update")]
    places = [1, 20, 60, 62, 80, 118, 120, 140, 199]  # some phases are narrower than their names
    phases = [("set-up", 0), *zip(names, places), ("end", 200)]
    timeline = {"places": [0, 100, 200], "sizes": {"weights": [60 * MIB] * 3}, "phases": phases}
    page = render_forecast_page("x", make_forecast(timeline=timeline))
    assert "Memory over 3 training steps" in page
    over_time = parse_drawings(page)[0]
    rows = {}
    for text in over_time.iter("text"):
        if text.text.startswith(("step", "forward", "backward", "update")):
            rows.setdefault(text.get("y"), []).append((float(text.get("x")), text.text))
    assert [text for _, text in rows[min(rows, key=float)]] == ["step 1", "step 2", "step 3"]
    for labels in rows.values():
        for (x, text), (following, _) in pairwise(labels):
            assert x + 6 * len(text) <= following
        assert labels[-1][0] + 6 * len(labels[-1][1]) <= 960


def test_caveats_are_introduced_as_assumptions():
    page = render_forecast_page("x", make_forecast())
    assert page.index("Assumptions") < page.index("known only roughly") < page.index("a caveat")
    assert "Assumptions" not in render_forecast_page("x", make_forecast(caveats=()))
