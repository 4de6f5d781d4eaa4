"""Test the HTML page of a report: well formed, self-contained, escaped, and with the logged values."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway.core.tracking.report import html_page, load
from headway.core.tracking.report.data import RunData
from tests.unit.core.tracking.report.logs import Log, write_realistic_log

VOID = {"meta", "input", "br", "link", "img"}
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\'"&'


class Reader(HTMLParser):
    """Parser that checks the order of closing tags, and collects elements and text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict]] = []
        self.text: dict[str, str] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        key = self.open[-1] if self.open else ""
        self.text[key] = self.text.get(key, "") + data


def parse_svgs(page):
    body = page.partition("<body>")[2].partition("<script")[0]
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", body, re.DOTALL)]


def read_tables(page):
    """Return the rows of each chart's table of numbers, by the chart's title."""
    cards = re.findall(r"<figure.*?<h3>(.*?)</h3>.*?<noscript>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    rows = {title: re.findall(r"<tr>(.*?)</tr>", body) for title, body in cards}
    return {
        title: [re.findall(r"<t[hd]>(?:<i.*?</i>)?(.*?)</t[hd]>", row) for row in each] for title, each in rows.items()
    }


def read_payload(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def page_of_one_run(tmp_path_factory):
    return html_page(load([write_realistic_log(tmp_path_factory.mktemp("report") / "run", steps=1500)]))


@pytest.fixture(scope="module")
def page_of_three_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    paths = [
        write_realistic_log(folder / f"lr-{seed}", seed, steps=300, lr=10.0**-seed, is_ended=seed != 2)
        for seed in (1, 2, 3)
    ]
    return html_page(load(paths))


def test_page_is_well_formed_and_has_a_chart_for_each_series(page_of_one_run):
    reader = Reader(page_of_one_run)
    assert reader.text["h1"].strip() == "run"
    assert re.findall(r"<h3>(.*?)</h3>", page_of_one_run) == [
        "Loss", "Learning rate", "Gradient norm", "Accuracy", "Samples per second", "Tokens per second",
        "Model FLOPs utilization", "Time spent waiting for data", "Memory by phase",
    ]  # fmt: skip
    assert len(read_payload(page_of_one_run)["panels"]) == page_of_one_run.count('<div class="plot"') == 9


def test_page_without_scripts_shows_tables(page_of_one_run, tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([2.0, "nan", 0.5, 3.0, "inf", 1.0]):
        log.values(step, loss=value, memory=2**30)
    page = html_page(load([log.write()]))
    assert read_tables(page) == {
        "Loss": [["training", "2", "0.5", "3", "1", "6", "2"]],
        "Memory": [["in use", *["1.0 GiB"] * 4, "6", "-"]],
    }
    assert len(read_tables(page_of_one_run)) == 9
    columns = ["Line", "First", "Lowest", "Highest", "Last", "Values", "Not finite"]
    assert re.findall(r"<th>([^<]*)</th>", page)[:7] == columns


def test_page_fetches_nothing_and_only_its_own_script_may_run(page_of_one_run):
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\((?!#)|https?:""", page_of_one_run)
    policy = next(
        attributes["content"] for _, attributes in Reader(page_of_one_run).found if "http-equiv" in attributes
    )
    script = re.findall(r"<script>(.*?)</script>", page_of_one_run, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_events_are_drawn_and_listed(page_of_one_run):
    words = ["out of memory", "preempted", "restart", "resumed", "checkpoint"]
    titles = [event[3] for event in read_payload(page_of_one_run)["runs"][0]["events"]]
    assert titles[0] == "step 150: checkpoint, path checkpoints/checkpoint_150, seconds 1.4 s"
    assert all(any(word in title for title in titles) for word in words)
    table = page_of_one_run[page_of_one_run.index("<h2>Events</h2>") :]
    assert all(word in table for word in words)
    assert "micro batch 64, replayed in 32, free bytes 295.6 MiB" in table


def test_non_finite_values_are_marked(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([2.0, "nan", "nan", 1.5, "inf", 1.0, "-inf"]):
        log.values(step, loss=value)
    page = html_page(load([log.write()]))
    (line,) = read_payload(page)["panels"][0]["lines"]
    assert [[mark[0], *mark[1:3], mark[5]] for mark in line["m"]] == [
        ["nan", 1, 2, 2],
        ["inf", 4, 4, 1],
        ["-inf", 6, 6, 1],
    ]
    assert line["v"] == [2, None, None, 1.5, None, 1, None]


def test_series_without_finite_values_is_shown(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    log.values(1, loss="nan")
    log.values(2, loss="nan")
    page = html_page(load([log.write()]))
    Reader(page)
    assert read_tables(page)["Loss"] == [["training", "-", "-", "-", "-", "2", "2"]]


def test_single_value_is_in_a_table_and_has_no_chart(tmp_path):
    """A chart of one point, such as a value that the Trainer logs at its end, would show nothing."""
    paths = []
    for name, runtime in (("a", 95.0), ("b", 3.0)):
        log = Log(tmp_path / name)
        log.run()
        for step in (1, 2):
            log.values(step, loss=1.0 / step)
        log.values(2, train_runtime=runtime, eval_loss=0.5, **({"only": 7} if name == "b" else {}))
        paths.append(log.write())
    page = html_page(load(paths[:1]))
    (panel,) = read_payload(page)["panels"]
    assert [(line["label"], line["dotted"]) for line in panel["lines"]] == [("training", False), ("evaluation", True)]
    table = page.partition("<h2>Single values</h2>")[2].partition("</section>")[0]
    assert re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", table)[1:] == [
        ("train_runtime", "<td>1 min 35 s<small>step 2</small></td>")
    ]
    table = html_page(load(paths)).partition("<h2>Single values</h2>")[2].partition("</section>")[0]
    rows = dict(re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", table))
    assert rows["only"] == '<td class="none">-</td><td>7<small>step 2</small></td>'
    assert "1 min 35 s" in rows["train_runtime"]
    assert "Single values" not in html_page(load([write_realistic_log(tmp_path / "lively", steps=50)]))


def test_run_with_only_single_values(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    log.values(1, accuracy=0.75)
    page = html_page(load([log.write()]))
    Reader(page)
    assert read_tables(page) == {}
    assert "<td>0.75<small>" in page
    assert "logged no values" not in page


def test_several_runs_are_compared(page_of_three_runs):
    Reader(page_of_three_runs)
    assert "3 runs" in page_of_three_runs
    assert "2 of 3 finished" in page_of_three_runs
    assert re.findall(r"<th>([A-Z][^<]*)</th>", page_of_three_runs)[:4] == ["Run", "State", "Updates", "Duration"]
    assert '<span class="pill bad"' in page_of_three_runs
    assert "killed in the middle of a line" in page_of_three_runs
    assert {line["color"] for line in read_payload(page_of_three_runs)["panels"][0]["lines"]} == {0, 1, 2}
    assert [row[0] for row in read_tables(page_of_three_runs)["Loss"]] == [
        f"lr-{n} · {what}" for n in (1, 2, 3) for what in ("training", "evaluation")
    ]
    differences = page_of_three_runs.partition("<h2>Differences</h2>")[2].partition("<details")[0]
    assert re.findall(r"<tr><th>(.*?)</th>", differences) == ["Setting", "optimizer.lr", "seed"]
    assert "<td>0.01</td>" in differences


def test_text_from_a_log_is_escaped(tmp_path):
    paths = []
    for name in ("a", "b"):
        log = Log(tmp_path / f"{name} <b>&'\"")
        log.run(EVIL, {EVIL: EVIL, "nested": {EVIL: name}}, device=EVIL, versions={EVIL: EVIL})
        for step in (1, 2):
            log.values(step, **{EVIL: 1.0, "loss": 2.0, f"eval_{EVIL}": 1.0, f"memory/{EVIL}": 5.0, "text": EVIL})
        log.values(2, **{f"single {EVIL}": 1.0})
        log.event(EVIL, 1, **{EVIL: EVIL})
        log.event("out_of_memory", 1, note=EVIL)
        log.line("end", summary={EVIL: EVIL})
        paths.append(log.write())
    for chosen in (paths, paths[:1]):
        page = html_page(load(chosen))
        reader = Reader(page)
        assert [tag for tag, _ in reader.found if tag == "script"] == ["script", "script"]
        assert not [tag for tag, _ in reader.found if tag in ("img", "b") and "onerror" in _]
        assert not [name for _, attributes in reader.found for name in attributes if name.startswith("on")]
        parse_svgs(page)
        assert EVIL in read_payload(page)["panels"][-1]["title"]
        assert page.count("</script>") == 2
        assert not set("<>&") & set(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_data_equals_the_drawn_values(page_of_one_run):
    data = read_payload(page_of_one_run)
    loss = data["panels"][0]
    assert [line["label"] for line in loss["lines"]] == ["training", "evaluation"]
    train = loss["lines"][0]
    assert len(train["s"]) == len(train["t"]) == len(train["v"]) == len(train["lo"]) <= 1200
    assert train["s"][0] == 1
    assert train["s"][-1] == 1500
    assert train["m"][0][0] == "nan"
    assert [event[0] for event in data["runs"][0]["events"] if event[0] == "out_of_memory"]


def test_size_of_the_page_is_independent_of_the_number_of_points():
    points = [(float(step), step * 0.1, (step * 7919 % 1000) / 10.0) for step in range(30_000)]
    series = dict.fromkeys("abcdefghij", points)
    page = html_page([RunData("big", Path("log.jsonl"), series=series, is_finished=True)])
    assert len(page) < 1_500_000
    line = read_payload(page)["panels"][0]["lines"][0]
    assert (min(line["lo"]), max(line["hi"])) == (0, 99.9)


def test_run_without_values(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    page = html_page(load([log.write()]))
    Reader(page)
    assert "has logged no values yet" in page


def test_extreme_numbers_are_drawn(tmp_path):
    log = Log(tmp_path / "run")
    log.run(config={"huge": 10**400}, versions={})
    for step, value in enumerate([1e308, -1e308, 5e-324, 0.0, 10**400]):
        log.line("values", step=step * 10**17, values={"loss": value, "grad_norm": 5e-324 * step, "mfu": value})
    log.event("checkpoint", 10**300, size=10**400)
    page = html_page(load([log.write()]))
    Reader(page)
    assert len(read_tables(page)) == 3
    assert len(read_payload(page)["panels"]) == 3
