"""Tests that `clip_grad_norm_` accepts torch's types of norms as numbers and as text in each layout."""

from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import run_ranks

TYPES: list[Any] = [2, "2", "inf", float("inf"), "-inf", float("-inf"), 0, "0", 1, "1", 3.0, -1]


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
    )


def compute_loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.arange(8.0).reshape(2, 4)).square().sum()
    return loss


def clip_prepared(layout: dict[str, Any]) -> list[tuple[float, list[torch.Tensor]]]:
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.0))
    results = []
    for norm_type in TYPES:
        accelerator.backward(compute_loss(model))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        grads: list[Any] = [parameter.grad for parameter in model.parameters()]
        results.append((float(norm), [getattr(grad, "full_tensor", grad.clone)() for grad in grads]))
        optimizer.step()
        optimizer.zero_grad()
    return results


def clip_by_hand() -> list[tuple[float, list[torch.Tensor]]]:
    """Clip in plain PyTorch in one process. All ranks read the same rows."""
    net, results = build_model(), []
    for norm_type in TYPES:
        compute_loss(net).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=norm_type)
        results.append((float(norm), [p.grad.clone() for p in net.parameters() if p.grad is not None]))
        net.zero_grad()
    return results


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, {}),
        (2, {"strategy": "fsdp"}),
        pytest.param(2, {}, marks=pytest.mark.matrix),
        pytest.param(2, {"strategy": "tp"}, marks=pytest.mark.matrix),
        pytest.param(2, {"on_non_finite": "skip"}, marks=pytest.mark.matrix),
        pytest.param(2, {"strategy": "fsdp", "on_non_finite": "skip"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_each_norm_type_matches_torch(num_ranks: int, layout: dict[str, Any]) -> None:
    for results in run_ranks(clip_prepared, num_ranks, layout):
        for norm_type, (norm, grads), (expected, expected_grads) in zip(TYPES, results, clip_by_hand()):
            assert norm == pytest.approx(expected, rel=1e-4), norm_type
            for grad, expected_grad in zip(grads, expected_grads):
                torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6, msg=str(norm_type))
