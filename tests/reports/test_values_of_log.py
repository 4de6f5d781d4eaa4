"""`accelerator.log` of what cannot be kept, and without a place to keep it: one warning, never silence."""

import logging

import numpy
import pytest
import torch

from headway import Accelerator

LOST = {
    "tensor": (torch.ones(3), "a tensor of shape (3,)"),
    "one element": (torch.ones(1), "a tensor of shape (1,)"),
    "complex": (torch.tensor(1j), "a tensor of shape ()"),
    "array": (numpy.ones((2, 2)), "an array of shape (2, 2)"),
    "list": ([1.0, 2.0], "builtins.list"),
    "object": (object(), "builtins.object"),
}
KEPT = {
    "float": (0.5, 0.5),
    "bool": (True, True),
    "inf": (float("inf"), float("inf")),
    "0-d tensor": (torch.tensor(2.0), 2.0),
    "0-d array": (numpy.array(3), 3),
    "numpy scalar": (numpy.float32(4), 4.0),
    "text": ("warm-up", "warm-up"),
}


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def test_an_entry_that_nothing_keeps_is_named_once(tmp_path, heard):
    from headway.core.tracking.runlog_reader import read_run

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("run")
    for _ in range(2):
        for name, (value, _) in LOST.items():
            accelerator.log({"nested": {name: value}})
        accelerator.log({name: value for name, (value, _) in KEPT.items()} | {"none": None})
    accelerator.end_training()
    lines = [record.getMessage() for record in heard.records if "leaves out" in record.getMessage()]
    assert len(lines) == len(LOST)
    for line, (name, (_, kind)) in zip(lines, LOST.items()):
        assert f"'nested/{name}', {kind}" in line
    kept = read_run(tmp_path / "run").values
    assert {name: points[0][2] for name, points in kept.items() if not name.startswith("headway/")} == {
        name: wanted for name, (_, wanted) in KEPT.items()
    }


@pytest.mark.parametrize("begins", [False, True])
def test_without_a_place_to_keep_it_there_is_one_hint(begins, heard):
    accelerator = Accelerator(cpu=True)
    if begins:
        accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": torch.ones(3)})
    lines = [record.getMessage() for record in heard.records if "log() has no effect" in record.getMessage()]
    assert len(lines) == 1
    assert "project_dir" in lines[0]
    assert "log_with" in lines[0]
