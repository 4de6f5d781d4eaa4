"""Checkpoints across the two libraries: a run that one library saved in the middle of an epoch resumes with the other."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from headway.compat.accelerate.modules.models import load
from tests.ecosystem.both import Both, Numbers, Sides

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    return Both(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def run(both, tmp_path):
    def run(library: str, project: str, *flags: str, world_size: int = 1) -> list[Numbers]:
        args = ["--project", str(tmp_path / project), *flags]
        return both.run_on(library, "resume_midway", *args, world_size=world_size)

    return run


def measure_difference(one: Numbers, other: Numbers) -> float:
    return max(Sides([one], [other]).differences().values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_run_resumes_with_the_other_library(world_size, run, tmp_path):
    whole = {library: run(library, library, world_size=world_size) for library in ("accelerate", "headway")}
    for their, our in zip(*whole.values()):
        assert measure_difference(their, our) <= (0.0 if world_size == 1 else 1e-6)
    folder = {library: str(tmp_path / library / "checkpoints" / "checkpoint_0") for library in whole}
    again = {
        (by, wrote): run(by, f"{by}-{wrote}", "--resume", "--folder", folder[wrote], world_size=world_size)
        for by in whole
        for wrote in whole
    }
    for rank in range(world_size):
        theirs = again["accelerate", "accelerate"][rank]
        allowed = 0.0 if world_size == 1 else 1e-6
        assert measure_difference(theirs, again["headway", "accelerate"][rank]) <= allowed
        assert measure_difference(theirs, again["accelerate", "headway"][rank]) <= allowed
        # Headway's own checkpoint also has the order of the current epoch, so the run equals the uninterrupted one.
        ours, undisturbed = again["headway", "headway"][rank], whole["headway"][rank]
        assert ours["parameters"] == undisturbed["parameters"]
        assert ours["loss"] == undisturbed["loss"][-len(ours["loss"]) :]


@pytest.mark.parametrize("flags", [(), ("--binary",)], ids=["safetensors", "torch"])
def test_files_equal_those_of_accelerate(flags, run, tmp_path):
    for library in ("accelerate", "headway"):
        run(library, library, *flags)
    theirs, ours = (tmp_path / library / "checkpoints" / "checkpoint_0" for library in ("accelerate", "headway"))
    assert set(os.listdir(theirs)) < set(os.listdir(ours))
    for name in os.listdir(theirs):
        read = load_file if name.endswith(".safetensors") else load
        their, our = read(theirs / name), read(ours / name)
        if "step" in their:  # total number of micro-batches; only the position within the window matters
            their["step"] %= 2
        assert _is_equal(their, our), name


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))  # type: ignore[arg-type]
    return type(one) is type(other) and bool(numpy.all(one == other))


def test_newest_checkpoint_is_found_with_either_library(run, tmp_path):
    run("accelerate", "one")
    assert run("headway", "one", "--resume") == run("accelerate", "one", "--resume")


def test_pickled_code_is_not_run(tmp_path, monkeypatch):
    from headway.compat.accelerate.accelerator import AccelerateAccelerator
    from headway.errors import CheckpointError

    accelerator = AccelerateAccelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    torch.save(Path, tmp_path / "pytorch_model.bin")
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin is damaged, or contains objects that only unpickling"
    ):
        accelerator.load_state(tmp_path)
    assert all(map(torch.equal, before, model.parameters()))
