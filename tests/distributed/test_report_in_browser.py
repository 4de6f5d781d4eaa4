"""The report in a real browser, headless Chromium: it draws, in both color schemes; its controls work; its console is silent."""

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

from headway.core.tracking.report import html_page, load, looks
from tests.unit.core.tracking.report.logs import Log, lively

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs headless Chromium: apt-get install chromium")

# Runs in the page: what it finds is written into an attribute, where --dump-dom shows it.
PROBE = """
Element.prototype.setPointerCapture = () => {};  // made-up pointers cannot be captured
window.requestAnimationFrame = (draw) => setTimeout(draw, 1);  // under virtual time there may be no frames
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


def probed(page):
    """The page with the probe, which its security policy is told to let run."""
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src 'sha256-{digest}' ")
    return allowed.replace("</body>", f"<script>{PROBE}</script></body>")


def browse(page, folder, width, height, *flags):
    """The page as the browser leaves it, its picture, and what its console said."""
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
    said = (folder / "log").read_text(errors="replace")
    assert process.returncode == 0, said[-3000:]
    console = [line for line in said.splitlines() if "CONSOLE" in line]
    return (folder / "dom").read_text(encoding="utf-8"), folder / "page.png", console


def pixels(path):
    """Rows of (red, green, blue), 0 to 255."""
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    return (image.imread(path)[..., :3] * 255).round().astype(int)


def count(found, code):
    wanted = [int(code[index : index + 2], 16) for index in (1, 3, 5)]
    return int((abs(found - wanted).max(axis=-1) <= 3).sum())


def drawn_charts(dom):
    """The charts of the page as the script left them, in the order of the page."""
    found = re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', dom.partition("<script")[0], re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


def classes(svg, first):
    return [element for element in svg.iter() if element.get("class", "").split()[:1] == [first]]


def test_what_is_drawn(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([1.0, 2.0, "nan", "nan", 3.0, "inf", 1.0, 2.0, "-inf"]):
        log.values(step, loss=value, memory=step * 2**28, mfu=step / 20, tokens_per_second=10_000 * step)
    log.event("out_of_memory", 4)
    log.event("checkpoint", 6)
    dom, _, console = browse(html_page(load([log.write()])), tmp_path / "browser", 1400, 1600)
    assert console == []
    charts = drawn_charts(dom)
    assert [svg.get("aria-label") for svg in charts] == [
        "Loss: run training", "Tokens per second: run", "Model FLOPs utilization: run", "Memory: run in use",
    ]  # fmt: skip
    loss = charts[0]
    (line,) = classes(loss, "line")
    assert line.get("d").count("M") == 3
    assert len(re.findall(r"M[\d.]+ [\d.]+h0", line.get("d"))) == 1, "a value between two gaps is a dot"
    assert len(classes(loss, "nonfinite")) == 3
    assert (len(classes(loss, "rule")), len(classes(loss, "foot"))) == (1, 1)
    ticks = [[text.text for text in svg.iter("text") if text.get("x") == "48"] for svg in charts[1:]]
    assert ticks == [
        ["0", "25k", "50k", "75k", "step"], ["0%", "20%", "40%", "step"],
        ["0 B", "1 GiB", "2 GiB", "step"],
    ]  # fmt: skip
    assert misplaced(charts) == []


def misplaced(charts):
    places = [element.get(name, "") for svg in charts for element in svg.iter() for name in ("d", "x", "y", "cx", "cy")]
    return [place for place in places if re.search(r"NaN|Infinity|e\+", place)]


def test_strange_numbers_are_drawn(tmp_path):
    log = Log(tmp_path / "run")
    log.run()
    for step, value in enumerate([1e308, -1e308, 5e-324, 0.0, 10**400]):
        log.line("values", step=step * 10**17, values={"loss": value, "grad_norm": 5e-324 * step, "mfu": value})
    log.event("checkpoint", 10**300, size=10**400)
    dom, _, console = browse(html_page(load([log.write()])), tmp_path / "browser", 1400, 1600)
    assert console == []
    assert len(drawn_charts(dom)) == 3
    assert misplaced(drawn_charts(dom)) == []


@pytest.mark.parametrize(
    ("width", "scheme", "colors", "ground"),
    [(1400, 1, looks.LINES, looks.PAGE), (600, 0, looks.LINES_DARK, looks.PAGE_DARK)],
    ids=["light-wide", "dark-narrow"],
)
def test_the_page_in_a_browser(width, scheme, colors, ground, tmp_path):
    runs = [lively(tmp_path / f"run-{seed}", seed, steps=400, lr=lr) for seed, lr in ((0, 3e-4), (1, 3e-3), (2, 1e-4))]
    page = html_page(load(runs))
    height = 3600 if width > 1000 else 6500
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    dom, picture, console = browse(probed(page), tmp_path / "browser", width, height, flag)
    assert len(console) == 1, console
    assert "the probe speaks" in console[0]
    told = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1]))

    assert told["overflow"] <= 0
    assert len(told["boxes"]) == len(told["up"]) == 13

    assert sorted(told["lines"]) == ["line c0", "line c0", "line c1", "line c1", "line c2", "line c2"]
    assert told["tip"].startswith("step ")
    assert all(f"run-{seed} · training" in told["tip"] for seed in range(3))
    assert told["crosses"] == 13
    assert told["zoomed"] != told["across"] == told["unzoomed"]
    assert told["canUnzoom"]
    assert all(label.endswith(("s", "min")) for label in told["time"])
    assert sorted(told["hidden"][0]) == ["line c0", "line c0", "line c2", "line c2"]
    assert set(told["log"]) & {"1", "2", "5", "10"}
    assert told["isSmoother"]
    assert told["isBack"]

    found = pixels(picture)
    assert found.shape[1] == width
    for left, top, right, bottom in told["boxes"]:
        chart = found[top:bottom, left:right]
        assert count(chart, ground) > 0.5 * (right - left) * (bottom - top)
        # Where runs are alike the last one covers the others.
        assert count(chart, colors[2]) > 50
    loss = found[told["boxes"][0][1] : told["boxes"][0][3], told["boxes"][0][0] : told["boxes"][0][2]]
    rate = found[told["boxes"][1][1] : told["boxes"][1][3], told["boxes"][1][0] : told["boxes"][1][2]]
    assert count(loss, colors[1]) > 50
    assert all(count(rate, code) > 50 for code in colors[:3])
