"""`clip_grad_norm_` takes the types of norms that torch takes, as numbers and as text, in each layout."""

from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import run_ranks

TYPES: list[Any] = [2, "2", "inf", float("inf"), "-inf", float("-inf"), 0, "0", 1, "1", 3.0, -1]


def built() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
    )


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.arange(8.0).reshape(2, 4)).square().sum()
    return loss


def clipped(layout: dict[str, Any]) -> list[tuple[float, list[torch.Tensor]]]:
    accelerator = Accelerator(cpu=True, **layout)
    net = built()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.0))
    found = []
    for norm_type in TYPES:
        accelerator.backward(loss_of(model))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        grads: list[Any] = [parameter.grad for parameter in model.parameters()]
        found.append((float(norm), [getattr(grad, "full_tensor", grad.clone)() for grad in grads]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_hand() -> list[tuple[float, list[torch.Tensor]]]:
    """Plain torch, one process; each rank reads the same rows."""
    net, found = built(), []
    for norm_type in TYPES:
        loss_of(net).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=norm_type)
        found.append((float(norm), [p.grad.clone() for p in net.parameters() if p.grad is not None]))
        net.zero_grad()
    return found


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
def test_each_type_of_norm_is_torchs(num_ranks: int, layout: dict[str, Any]) -> None:
    for found in run_ranks(clipped, num_ranks, layout):
        for norm_type, (norm, grads), (wanted, wanted_grads) in zip(TYPES, found, by_hand()):
            assert norm == pytest.approx(wanted, rel=1e-4), norm_type
            for grad, wanted_grad in zip(grads, wanted_grads):
                torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-6, msg=str(norm_type))
