"""PEFT's adapters under DeepSpeed's ZeRO, stages 1, 2 and 3, beside plain PyTorch and PEFT on one process."""

from typing import Any

import pytest
import torch

from headway.common.optional import is_available
from headway.errors import PrepareError
from tests.distributed.ranks import run_ranks

pytest.importorskip("peft")
from tests.distributed import adapters

pytestmark = [
    pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed"),
    pytest.mark.matrix,
]

CLOSE = 2e-4
"""Models are float32, and DeepSpeed sums gradients in another order. Parameters move by more than 0.01."""


def make(method: str) -> Any:
    model = "mixtral" if method in adapters.OF_MIXTURES else "llama"
    return adapters.make_adapted(model, method, dtype=torch.float32)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(adapters.list_trainable(model), lr=0.05)


def train_each(stage: str) -> dict[str, str]:
    """What differs from one process, or the error of `prepare`, by method."""
    found = {}
    for method in adapters.METHODS:
        accelerator = adapters.make_accelerator(stage)
        plain = make(method)
        begun = {name: each.detach().clone() for name, each in plain.named_parameters()}
        expected = adapters.train_by_hand(plain, make_optimizer(plain))
        model = make(method)
        try:
            model, optimizer = accelerator.prepare(model, make_optimizer(model))
        except PrepareError as error:
            found[method] = str(error)
            accelerator.free_memory()
            continue
        losses = adapters.train(accelerator, model, optimizer)
        weights = accelerator.get_state_dict(model)
        off = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        trained = [name for name, each in plain.named_parameters() if each.requires_grad and name in weights]
        if accelerator.is_main_process:
            assert trained, method
            off = max(off, *(float((weights[n] - plain.get_parameter(n)).abs().max()) for n in trained))
            moved = max(float((weights[n] - begun[n]).abs().max()) for n in trained)
            assert moved > 0.01, (method, moved)
        found[method] = "" if off < CLOSE else f"differs by {off:.1e}"
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_adapters_learn_as_on_one_process(stage: str) -> None:
    for found in run_ranks(train_each, 2, stage, timeout=580):
        refused = {"AdaLoRA"} if stage == "zero3" else set()
        assert {method for method, text in found.items() if text} == refused, found
        assert all("one of the layouts ddp, zero1 and zero2" in found[method] for method in refused)
