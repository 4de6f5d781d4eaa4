"""Test the profiler, which writes one trace per rank, even if the block raises an error."""

import json

import pytest
import torch

from headway import Accelerator, ProfileKwargs
from headway.errors import ConfigError


def list_events(folder):
    """Return the names of the events in a trace."""
    return [event["name"] for event in json.loads((folder / "profile_0.json").read_text())["traceEvents"]]


@pytest.mark.parametrize("raises", [False, True])
def test_trace_is_written(tmp_path, raises):
    acc = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path / "new"))])

    def profile_product():
        with acc.profile():
            torch.ones(8, 8) @ torch.ones(8, 8)
            if raises:
                raise KeyError("in the block")

    if raises:
        with pytest.raises(KeyError, match="in the block"):
            profile_product()
    else:
        profile_product()
    assert "aten::mm" in list_events(tmp_path / "new")
    assert "aten::mm" in (tmp_path / "new" / "profile_0.txt").read_text()


def test_schedule_and_handler_may_be_given(tmp_path):
    seen = []
    options = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path),
        on_trace_ready=lambda profiler: seen.append(profiler.export_chrome_trace(str(tmp_path / "own.json"))),
    )  # fmt: skip
    with Accelerator(cpu=True).profile(options) as profiler:
        for _ in range(4):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    assert len(seen) == 1
    assert (tmp_path / "own.json").exists()


@pytest.mark.parametrize("wait", [0, 3])
def test_error_before_the_first_recording_is_raised_unchanged(tmp_path, wait):
    options = ProfileKwargs(schedule_option={"wait": wait, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path))
    with pytest.raises(KeyError, match="early"), Accelerator(cpu=True).profile(options):
        raise KeyError("early")


def test_without_a_folder_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile():
        torch.ones(2)
    assert list(tmp_path.iterdir()) == []


def test_unknown_activities_are_refused():
    with (
        pytest.raises(ConfigError, match=r"\['tpu'\].*allowed: .*\bcpu\b.*\bprivateuseone\b"),
        Accelerator(cpu=True).profile(ProfileKwargs(activities=["cpu", "tpu"])),
    ):
        pass
