"""Optimizers that read whole matrices, on shards: losses of one process by hand, and states under other layouts."""

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import listening
from tests.distributed.whole_updates import MAKERS, TOLERANCES, run_by_hand, run_prepared

NAMES = [name for name in MAKERS if name != "MatrixOptimizer"]


def compare(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, losses in found.items():
        wanted = expected[name][-len(losses) :]
        assert losses == pytest.approx(wanted, rel=TOLERANCES.get(name, 1e-5)), name
        assert wanted[0] != pytest.approx(wanted[-1], rel=1e-2), name


def check(layout: str, num_ranks: int, names: list[str], model: str = "gpt") -> None:
    (expected,) = run_ranks(run_by_hand, 1, names, model, timeout=250)
    for found in run_ranks(run_prepared, num_ranks, layout, names, model, timeout=250):
        compare(found, expected)


def test_muon_and_adafactor_on_two_ranks_are_those_of_one_process_and_resume_elsewhere(tmp_path):
    names = ["Muon", "Adafactor"]
    (expected,) = run_ranks(run_by_hand, 1, names, "gpt")
    for found in run_ranks(run_prepared, 2, "fsdp", names, "gpt", str(tmp_path)):
        compare(found, expected)
    compare(run_ranks(run_prepared, 1, "ddp", names, "gpt", "", str(tmp_path))[0], expected)


def test_convolutions_and_batches_of_matrices():
    check("fsdp", 2, ["MatrixOptimizer"], "mixed")


def list_warnings(layout: str) -> list[str]:
    with listening() as said:
        run_prepared(layout, ["MatrixOptimizer"], "mixed")
    return said


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_optimizer_that_a_prepared_one_steps_counts_as_prepared(layout):
    for said in run_ranks(list_warnings, 2, layout):
        assert not [line for line in said if "not prepared" in line]


@pytest.mark.slow
def test_every_kind_on_two_ranks_and_after_a_resume_on_four(tmp_path):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    saved = [name for name in NAMES if name != "Shampoo"]  # its state holds objects that only pickle could store
    (expected,) = run_ranks(run_by_hand, 1, NAMES, "gpt", timeout=250)
    compare(run_ranks(run_prepared, 2, "fsdp", saved, "gpt", str(tmp_path), timeout=280)[1], expected)
    compare(run_ranks(run_prepared, 2, "fsdp", ["Shampoo"], "gpt", timeout=250)[0], expected)
    compare(run_ranks(run_prepared, 4, "hsdp=2", saved, "gpt", "", str(tmp_path), timeout=280)[3], expected)


@pytest.mark.slow
def test_several_axes():
    check("fsdp+tp=2", 4, ["Muon", "Adafactor", "SOAP", "Prodigy"])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp", "hsdp=2", "fsdp+tp=2"])
def test_every_kind_on_four_ranks(layout):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    check(layout, 4, NAMES)
