"""Optimizers that need whole matrices, on shards: losses of plain PyTorch on one process, and states in other layouts."""

from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.errors import UnsupportedError
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import capture_warnings
from tests.distributed.whole_updates import MAKERS, TOLERANCES, run_by_hand, run_prepared

NAMES = [name for name in MAKERS if name != "MatrixOptimizer"]


def compare(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, losses in found.items():
        expected_losses = expected[name][-len(losses) :]
        assert losses == pytest.approx(expected_losses, rel=TOLERANCES.get(name, 1e-5)), name
        assert expected_losses[0] != pytest.approx(expected_losses[-1], rel=1e-2), name


def check_layout(layout: str, num_ranks: int, names: list[str], model: str = "gpt") -> None:
    (expected,) = run_ranks(run_by_hand, 1, names, model, timeout=250)
    for found in run_ranks(run_prepared, num_ranks, layout, names, model, timeout=250):
        compare(found, expected)


def test_muon_and_adafactor_match_one_process_and_resume_elsewhere(tmp_path):
    names = ["Muon", "Adafactor"]
    (expected,) = run_ranks(run_by_hand, 1, names, "gpt")
    for found in run_ranks(run_prepared, 2, "fsdp", names, "gpt", str(tmp_path)):
        compare(found, expected)
    compare(run_ranks(run_prepared, 1, "ddp", names, "gpt", "", str(tmp_path))[0], expected)


def test_matrix_optimizer_updates_convolutions_and_batched_matrices_as_on_one_process():
    check_layout("fsdp", 2, ["MatrixOptimizer"], "mixed")


class KeepsParameters(torch.optim.SGD):
    """Steps on the parameters that the constructor got."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def prepare_kept_parameters() -> None:
    message = r"in its attribute 'mine'.*from param_groups"
    accelerator, model = Accelerator(cpu=True, strategy="fsdp"), torch.nn.Linear(4, 4)
    optimizer = KeepsParameters(model.parameters(), 0.1)
    accelerator.prepare(model)
    with pytest.raises(UnsupportedError, match=message):
        accelerator.prepare(optimizer)
    accelerator, model = Accelerator(cpu=True, strategy="fsdp"), torch.nn.Linear(4, 4)
    optimizer = KeepsParameters(model.parameters(), 0.1)
    with pytest.raises(UnsupportedError, match=message):
        accelerator.prepare(optimizer, model)


def test_optimizer_that_keeps_its_parameters_is_refused_on_all_ranks():
    run_ranks(prepare_kept_parameters, 2)


def list_warnings(layout: str) -> list[str]:
    with capture_warnings() as warnings:
        run_prepared(layout, ["MatrixOptimizer"], "mixed")
    return warnings


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_inner_optimizer_of_a_prepared_one_counts_as_prepared(layout):
    for warnings in run_ranks(list_warnings, 2, layout):
        assert not [line for line in warnings if "not prepared" in line]


@pytest.mark.slow
def test_all_optimizers_match_one_process_on_two_ranks_and_resumed_on_four(tmp_path):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    saved = [name for name in NAMES if name != "Shampoo"]  # its state holds objects that only pickle could store
    (expected,) = run_ranks(run_by_hand, 1, NAMES, "gpt", timeout=250)
    compare(run_ranks(run_prepared, 2, "fsdp", saved, "gpt", str(tmp_path), timeout=280)[1], expected)
    compare(run_ranks(run_prepared, 2, "fsdp", ["Shampoo"], "gpt", timeout=250)[0], expected)
    compare(run_ranks(run_prepared, 4, "hsdp=2", saved, "gpt", "", str(tmp_path), timeout=280)[3], expected)


@pytest.mark.slow
def test_optimizers_match_one_process_on_two_mesh_axes():
    check_layout("fsdp+tp=2", 4, ["Muon", "Adafactor", "SOAP", "Prodigy"])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp", "hsdp=2", "fsdp+tp=2"])
def test_all_optimizers_match_one_process_on_four_ranks(layout):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    check_layout(layout, 4, NAMES)
