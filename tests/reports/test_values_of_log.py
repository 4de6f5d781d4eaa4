"""Tests of `accelerator.log` with values that cannot be stored, or without a tracker: it warns exactly once."""

import logging

import numpy
import pytest
import torch

from headway import Accelerator

UNSUPPORTED = {
    "tensor": (torch.ones(3), "a tensor of shape (3,)"),
    "one element": (torch.ones(1), "a tensor of shape (1,)"),
    "complex": (torch.tensor(1j), "a tensor of shape ()"),
    "array": (numpy.ones((2, 2)), "an array of shape (2, 2)"),
    "list": ([1.0, 2.0], "builtins.list"),
    "object": (object(), "builtins.object"),
}
SUPPORTED = {
    "float": (0.5, 0.5),
    "bool": (True, True),
    "inf": (float("inf"), float("inf")),
    "0-d tensor": (torch.tensor(2.0), 2.0),
    "0-d array": (numpy.array(3), 3),
    "numpy scalar": (numpy.float32(4), 4.0),
    "text": ("warm-up", "warm-up"),
}


@pytest.fixture(autouse=True)
def warning_log(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def test_unsupported_value_is_named_once(tmp_path, warning_log):
    from headway.core.tracking.runlog_reader import read_run

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("run")
    for _ in range(2):
        for name, (value, _) in UNSUPPORTED.items():
            accelerator.log({"nested": {name: value}})
        accelerator.log({name: value for name, (value, _) in SUPPORTED.items()} | {"none": None})
    accelerator.end_training()
    lines = [record.getMessage() for record in warning_log.records if "leaves out" in record.getMessage()]
    assert len(lines) == len(UNSUPPORTED)
    for line, (name, (_, kind)) in zip(lines, UNSUPPORTED.items()):
        assert f"'nested/{name}', {kind}" in line
    stored = read_run(tmp_path / "run").values
    assert {name: points[0][2] for name, points in stored.items() if not name.startswith("headway/")} == {
        name: expected for name, (_, expected) in SUPPORTED.items()
    }


@pytest.mark.parametrize("has_trackers", [False, True])
def test_log_without_a_tracker_warns_once(has_trackers, warning_log):
    accelerator = Accelerator(cpu=True)
    if has_trackers:
        accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": torch.ones(3)})
    lines = [record.getMessage() for record in warning_log.records if "log() has no effect" in record.getMessage()]
    assert len(lines) == 1
    assert "project_dir" in lines[0]
    assert "log_with" in lines[0]
