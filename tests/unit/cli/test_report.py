"""Test `headway report`: the HTML page, PNG pictures, and the choice of runs."""

import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.cli.main import group
from headway.errors import ConfigError, OptionalDependencyMissing
from tests.unit.core.tracking.report.logs import Log, write_realistic_log


def run_command(*words):
    return CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=True)


def test_page_is_written_next_to_the_first_log(tmp_path):
    write_realistic_log(tmp_path / "a", steps=20)
    write_realistic_log(tmp_path / "b", seed=1, steps=20)
    output = run_command("report", tmp_path / "a", tmp_path / "b" / "log.jsonl")
    assert output.exit_code == 0, output.exception
    page = tmp_path / "a" / "report.html"
    assert output.output.startswith(f"{page} (")
    assert "<h1>2 runs</h1>" in page.read_text(encoding="utf-8")


def test_out_sets_the_path_of_the_page(tmp_path):
    write_realistic_log(tmp_path / "a", steps=20)
    target = tmp_path / "new" / "page.html"
    assert run_command("report", tmp_path / "a", "--out", target).exit_code == 0
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (tmp_path / "a" / "report.html").exists()


def test_missing_run_and_unwritable_path_are_refused(tmp_path):
    write_realistic_log(tmp_path / "a", steps=20)
    with pytest.raises(ConfigError, match="no run at"):
        raise run_command("report", tmp_path / "missing").exception
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another file with --out"):
        raise run_command("report", tmp_path / "a", "--out", tmp_path / "file" / "page.html").exception


@pytest.mark.slow
def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="PNGs need the plots extra")
    for name in ("a", "$b_{"):
        log = Log(tmp_path / name)
        log.run()
        for step in range(30):
            log.values(step, **{"loss": 1.0 / (step + 1) if step != 7 else math.nan, "_odd$_{ name": 1.0})
            log.values(step, eval_loss=0.5)
        log.event("out_of_memory", 5)
        log.event("resumed", 6)
        log.write()
    output = run_command("report", tmp_path / "a", tmp_path / "$b_{", "--png", tmp_path / "pictures")
    assert output.exit_code == 0, output.exception
    written = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in written] == ["01-loss.png", "02-odd-name.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)
    assert [line for line in output.output.splitlines() if line.endswith(".png")] == [str(path) for path in written]


def test_missing_matplotlib_is_reported_before_any_work(tmp_path, monkeypatch):
    write_realistic_log(tmp_path / "a", steps=20)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionalDependencyMissing, match=r"headway\[plots\]"):
        raise run_command("report", tmp_path / "a", "--png", tmp_path / "pictures").exception
    assert not (tmp_path / "a" / "report.html").exists()


def test_without_arguments_the_only_run_nearby_is_drawn(tmp_path, monkeypatch):
    write_realistic_log(tmp_path / "runs" / "a", steps=20)
    monkeypatch.chdir(tmp_path)
    assert run_command("report").output.startswith(f"{Path('runs/a/report.html').resolve()} (")
    write_realistic_log(tmp_path / "runs" / "b", seed=1, steps=20)
    with pytest.raises(ConfigError, match="headway report runs/a runs/b"):
        raise run_command("report").exception


def test_axis_without_pictures_or_counts_is_refused_before_any_work(tmp_path):
    write_realistic_log(tmp_path / "a", steps=20)
    with pytest.raises(ConfigError, match=r"--axis tokens chooses the axis of PNG files.*add --png"):
        raise run_command("report", tmp_path / "a", "--axis", "tokens").exception
    pytest.importorskip("matplotlib", reason="PNGs need the plots extra")
    words = ("report", tmp_path / "a", "--png", tmp_path / "pictures", "--axis")
    with pytest.raises(ConfigError, match=r"needs samples_seen at two steps .* which a did not log"):
        raise run_command(*words, "samples").exception
    assert not (tmp_path / "a" / "report.html").exists()
    assert run_command(*words, "epochs").exit_code == 2
