"""In a pipeline, torch's own norm of gradients is an error, because each rank has gradients of its own stages only."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from headway import Accelerator
from headway.errors import UnsupportedError
from tests.distributed.ranks import run_ranks


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def compute_plain_norm() -> float:
    model = build_model()
    torch.autograd.backward(model(torch.ones(8, 4)).square().mean())
    return clip_grad_norm_(model.parameters(), 1e-3).item()


def clip_stages() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy="pp")
    model = build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(8, 4)).square().mean())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before = [gradient.clone() for gradient in gradients]
    errors = []
    for call in (
        lambda: clip_grad_norm_(model.parameters(), 1e-3),
        lambda: nn.utils.clip_grad_norm_(get_first_trained(model), 1e-3),
        lambda: nn.utils.get_total_norm(gradients),
    ):
        with pytest.raises(UnsupportedError, match=r"accelerator\.clip_grad_norm_") as exc_info:
            call()
        errors.append(str(exc_info.value))
    unchanged = all(torch.equal(*pair) for pair in zip(before, gradients))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3).item()
    optimizer.step()
    other = nn.Linear(2, 2)
    torch.autograd.backward(other(torch.ones(2)).sum())
    other_norm = clip_grad_norm_(other.parameters(), 1.0).item()
    accelerator.free_memory()
    is_restored = nn.utils.get_total_norm.__module__ == nn.utils.clip_grad_norm_.__module__
    return {
        "count": len(errors), "unchanged": unchanged, "norm": norm, "other": other_norm, "is_restored": is_restored
    }  # fmt: skip


def get_first_trained(model: nn.Module) -> list[nn.Parameter]:
    return [next(parameter for parameter in model.parameters() if parameter.grad is not None)]


def test_norm_of_one_ranks_stages_is_an_error() -> None:
    for found in run_ranks(clip_stages, 2):
        assert found["count"] == 3
        assert found["unchanged"]
        assert found["norm"] == pytest.approx(compute_plain_norm(), rel=1e-5)
        assert found["other"] == pytest.approx(6**0.5)
        assert found["is_restored"]
