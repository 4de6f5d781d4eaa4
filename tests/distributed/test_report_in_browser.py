"""The HTML report in headless Chromium: charts are drawn in both color schemes, controls work, and the console is empty."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from xml.etree import ElementTree

import pytest

from headway.core.tracking.report import html_page, line_styles, load
from tests.unit.core.tracking.report.logs import Log, write_realistic_log

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs headless Chromium: apt-get install chromium")

# Runs before the page's own script, which may request a frame at once. Under virtual time there may be no frames.
FRAMES = "window.requestAnimationFrame = (draw) => setTimeout(draw, 1);"

# Runs in the page and writes its results to an attribute, which --dump-dom prints.
PROBE = """
Element.prototype.setPointerCapture = () => {};  // made-up pointers cannot be captured
console.info("the probe speaks");
const told = {}, frames = () => new Promise((done) => setTimeout(done, 200));
const plots = [...document.querySelectorAll(".plot")], first = plots[0];
const labels = (plot, isUp) => [...plot.querySelectorAll("text")]
  .filter((text) => (Number(text.getAttribute("x")) === 48) === isUp).map((text) => text.textContent);
const point = (kind, share) => {
  const box = first.getBoundingClientRect();
  first.dispatchEvent(new PointerEvent(kind, { clientX: box.left + box.width * share, clientY: box.top + 100, bubbles: true }));
};
const lines = () => [...first.querySelectorAll(".line")].map((path) => path.getAttribute("class"));
(async () => {
  await frames();
  told.up = plots.map((plot) => labels(plot, true).filter((label) => label !== "step"));
  told.boxes = plots.map((plot) => plot.getBoundingClientRect())
    .map((box) => [box.left, box.top, box.right, box.bottom].map(Math.round));
  told.overflow = document.documentElement.scrollWidth - innerWidth;
  told.across = labels(first, false);
  told.lines = lines();
  point("pointermove", 0.5);
  told.tip = document.querySelector(".tip").innerText;
  told.crosses = document.querySelectorAll('.cross[d^="M"]').length;
  point("pointerdown", 0.4); point("pointermove", 0.6); point("pointerup", 0.6);
  await frames();
  told.zoomed = labels(first, false);
  told.canUnzoom = !document.getElementById("unzoom").hidden;
  first.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  await frames();
  told.unzoomed = labels(first, false);
  document.querySelector("[data-axis=time]").click();
  await frames();
  told.time = labels(first, false);
  document.querySelector("[data-axis=step]").click();
  document.querySelector('[data-run="1"]').click();
  document.querySelector("[data-kind=out_of_memory]").click();
  await frames();
  told.hidden = [lines(), first.querySelectorAll(".event").length];
  document.querySelector('[data-run="1"]').click();
  document.querySelector("[data-kind=out_of_memory]").click();
  const log = [...document.querySelector("figure .tools").querySelectorAll("button")].find((button) => button.textContent === "log");
  log.click();
  await frames();
  told.log = labels(first, true);
  log.click();
  await frames();
  const slider = document.getElementById("smoothing"), before = first.querySelector(".line").getAttribute("d");
  slider.value = "10"; slider.dispatchEvent(new Event("input")); await frames();
  told.isSmoother = first.querySelector(".line").getAttribute("d") !== before;
  slider.value = slider.defaultValue; slider.dispatchEvent(new Event("input"));
  first.dispatchEvent(new PointerEvent("pointerleave", { bubbles: true }));
  await frames();
  told.isBack = first.querySelector(".line").getAttribute("d") === before;
  document.body.dataset.told = JSON.stringify(told);
})();
"""


def add_probe(page):
    """Return the page with the probe, and with a security policy that lets the probe run."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (FRAMES, PROBE)]
    allowed = page.replace("script-src ", "script-src " + "".join(f"'sha256-{digest}' " for digest in digests))
    return allowed.replace("<body>", f"<body><script>{FRAMES}</script>").replace(
        "</body>", f"<script>{PROBE}</script></body>"
    )


def browse(page, folder, width, height, *flags):
    """Open a page in the browser. Return the final DOM, the screenshot's path, and the console lines."""
    folder.mkdir(parents=True)
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000",
        f"--window-size={width},{height}", f"--screenshot={folder / 'page.png'}", "--dump-dom", *flags,
        (folder / "page.html").as_uri(),
    ]  # fmt: skip
    with (folder / "dom").open("w") as dom, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=dom, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    log_text = (folder / "log").read_text(errors="replace")
    assert process.returncode == 0, log_text[-3000:]
    console = [line for line in log_text.splitlines() if "CONSOLE" in line]
    return (folder / "dom").read_text(encoding="utf-8"), folder / "page.png", console


def read_pixels(path):
    """Return rows of (red, green, blue) from 0 to 255."""
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    return (image.imread(path)[..., :3] * 255).round().astype(int)


def count_pixels(found, code):
    expected = [int(code[index : index + 2], 16) for index in (1, 3, 5)]
    return int((abs(found - expected).max(axis=-1) <= 3).sum())


def find_charts(dom):
    """Return the charts as the script drew them, in page order."""
    found = re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', dom.partition("<script")[0], re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


def find_elements(svg, first):
    return [element for element in svg.iter() if element.get("class", "").split()[:1] == [first]]


def test_charts_break_lines_at_non_finite_values_and_mark_events(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([1.0, 2.0, "nan", "nan", 3.0, "inf", 1.0, 2.0, "-inf"]):
        log.values(step, loss=value, memory=step * 2**28, mfu=step / 20, tokens_per_second=10_000 * step)
    log.event("out_of_memory", 4)
    log.event("checkpoint", 6)
    dom, _, console = browse(html_page(load([log.write()])), tmp_path / "browser", 1400, 1600)
    assert console == []
    charts = find_charts(dom)
    assert [svg.get("aria-label") for svg in charts] == [
        "Loss: run training", "Tokens per second: run", "Model FLOPs utilization: run", "Memory: run in use",
    ]  # fmt: skip
    loss = charts[0]
    (line,) = find_elements(loss, "line")
    assert line.get("d").count("M") == 3
    assert len(re.findall(r"M[\d.]+ [\d.]+h0", line.get("d"))) == 1, "a value between two gaps is a dot"
    assert len(find_elements(loss, "nonfinite")) == 3
    assert (len(find_elements(loss, "rule")), len(find_elements(loss, "foot"))) == (1, 1)
    ticks = [[text.text for text in svg.iter("text") if text.get("x") == "48"] for svg in charts[1:]]
    assert ticks == [
        ["0", "25k", "50k", "75k", "step"], ["0%", "20%", "40%", "step"],
        ["0 B", "1 GiB", "2 GiB", "step"],
    ]  # fmt: skip
    assert find_invalid_coordinates(charts) == []


def find_invalid_coordinates(charts):
    places = [element.get(name, "") for svg in charts for element in svg.iter() for name in ("d", "x", "y", "cx", "cy")]
    return [place for place in places if re.search(r"NaN|Infinity|e\+", place)]


def test_extreme_numbers_are_drawn(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([1e308, -1e308, 5e-324, 0.0, 10**400]):
        log.line("values", step=step * 10**17, values={"loss": value, "grad_norm": 5e-324 * step, "mfu": value})
    log.event("checkpoint", 10**300, size=10**400)
    dom, _, console = browse(html_page(load([log.write()])), tmp_path / "browser", 1400, 1600)
    assert console == []
    assert len(find_charts(dom)) == 3
    assert find_invalid_coordinates(find_charts(dom)) == []


@pytest.mark.parametrize(
    ("width", "scheme", "colors", "ground"),
    [
        (1400, 1, line_styles.LINE_COLORS, line_styles.PAGE_COLOR),
        (600, 0, line_styles.LINE_COLORS_DARK, line_styles.PAGE_COLOR_DARK),
    ],
    ids=["light-wide", "dark-narrow"],
)
def test_page_fits_the_width_and_its_controls_work_in_a_browser(width, scheme, colors, ground, tmp_path):
    runs = [
        write_realistic_log(tmp_path / f"run-{seed}", seed, steps=400, lr=lr)
        for seed, lr in ((0, 3e-4), (1, 3e-3), (2, 1e-4))
    ]
    page = html_page(load(runs))
    height = 3600 if width > 1000 else 6500
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    dom, picture, console = browse(add_probe(page), tmp_path / "browser", width, height, flag)
    assert len(console) == 1, console
    assert "the probe speaks" in console[0]
    results = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1]))

    assert results["overflow"] <= 0
    assert len(results["boxes"]) == len(results["up"]) == 13

    assert sorted(results["lines"]) == ["line c0", "line c0", "line c1", "line c1", "line c2", "line c2"]
    assert results["tip"].startswith("step ")
    assert all(f"run-{seed} · training" in results["tip"] for seed in range(3))
    assert results["crosses"] == 13
    assert results["zoomed"] != results["across"] == results["unzoomed"]
    assert results["canUnzoom"]
    assert all(label.endswith(("s", "min")) for label in results["time"])
    assert sorted(results["hidden"][0]) == ["line c0", "line c0", "line c2", "line c2"]
    assert set(results["log"]) & {"1", "2", "5", "10"}
    assert results["isSmoother"]
    assert results["isBack"]

    found = read_pixels(picture)
    assert found.shape[1] == width
    for left, top, right, bottom in results["boxes"]:
        chart = found[top:bottom, left:right]
        assert count_pixels(chart, ground) > 0.5 * (right - left) * (bottom - top)
        # Where runs coincide, the last one covers the others.
        assert count_pixels(chart, colors[2]) > 50
    loss = found[results["boxes"][0][1] : results["boxes"][0][3], results["boxes"][0][0] : results["boxes"][0][2]]
    rate = found[results["boxes"][1][1] : results["boxes"][1][3], results["boxes"][1][0] : results["boxes"][1][2]]
    assert count_pixels(loss, colors[1]) > 50
    assert all(count_pixels(rate, code) > 50 for code in colors[:3])


ON_TOKENS = """
document.querySelector("[data-axis=tokens]").click();
"""


def test_axis_of_tokens_places_values_events_and_marks(tmp_path):
    """Two runs with the same loss by tokens, but batches of 100 and 400 tokens, are drawn at the same places."""
    folders = []
    for name, num_tokens in (("small", 100), ("large", 400)):
        log = Log(tmp_path / name)
        log.run()
        for step in range(1, 4000 // num_tokens + 1):
            seen = step * num_tokens
            values = {"loss": "nan" if seen == 2000 else 10 - seen / 500}
            # Counts that are logged at some steps only are interpolated.
            log.values(step, **values, **({"tokens_seen": seen} if step % 5 == 0 else {}))
        log.event("out_of_memory", 1200 // num_tokens)
        folders.append(log.write())
    page = html_page(load(folders))
    code = FRAMES + "addEventListener('load', () => {" + ON_TOKENS + "});"
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ").replace(
        "</body>", f"<script>{code}</script></body>"
    )
    dom, _, console = browse(page, tmp_path / "browser", 1400, 900)
    assert console == []
    (svg, *_) = find_charts(dom)
    ticks = [text.text for text in svg.iter("text") if float(text.get("x")) > 48]
    assert ticks == ["0", "500", "1000", "1500", "2000", "2500", "3000", "3500", "4000"]
    assert [text.text for text in svg.iter("text")].count("tokens") == 1
    small, large = (set(re.findall(r"[ML]([\d.]+ [\d.]+)", line.get("d"))) for line in find_elements(svg, "line"))
    assert len(large) == 9
    assert large <= small
    for kind in ("sign", "nonfinite"):
        places = [
            float(re.match(r"translate\(([\d.]+)", each.get("transform"))[1]) for each in find_elements(svg, kind)
        ]
        assert len(places) == 2
        assert max(places) - min(places) in ((0,) if kind == "nonfinite" else (0, 9))  # a sign moves aside for another
