"""Checks of model losses under context parallelism and of released models, run by the ranks of test_context_parallel.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from headway import Accelerator, ShardingOptions, TorchContextParallelConfig
from headway.core.weights.pieces import is_dtensor
from headway.errors import DataError, PrepareError
from headway.layouts.context.context_parallel import ContextParallel
from tests.distributed.layouts import LENGTH, PADDING, build_seeded, gpt, llama, make_tokens


class GPTWithLoss(nn.Module):
    """GPT that takes targets and returns its logits and the loss, a mean or a sum over tokens."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.gpt, self.reduction = gpt(), reduction

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gpt(ids)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction=self.reduction
        )
        return logits, loss


@contextmanager
def open_accelerator(**options: Any) -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True, strategy="cp", **options)
    yield accelerator
    accelerator.end_training()


def compare_gradients(model: nn.Module, whole: nn.Module, tolerance: float) -> None:
    """Compare a sharded model's gradients with those of a whole model, relative to the largest gradient."""
    expected = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if is_dtensor(grad) else grad
        assert float((grad - expected[name]).abs().max()) <= tolerance * largest, name


class CustomLossGPT(nn.Module):
    """GPT with an unusual loss: the mean of each row's mean, another ignored label, or a formula without cross_entropy."""

    def __init__(self, kind: str, ignored: int = PADDING) -> None:
        super().__init__()
        self.gpt, self.kind, self.ignored = gpt(), kind, ignored

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(ids)
        if self.kind == "by hand":  # gather would raise for an index of -100
            places = targets.masked_fill(targets == self.ignored, 0)[..., None]
            losses = -logits.log_softmax(-1).gather(-1, places)[..., 0]
            counts = targets != self.ignored
            return (losses * counts).sum() / counts.sum()
        flat = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored,
            reduction="none" if self.kind == "rows" else "mean",
        )  # fmt: skip
        if self.kind == "mean":
            return flat
        return (flat.view_as(targets).sum(1) / (targets != self.ignored).sum(1).clamp(min=1)).mean()


def check_custom_losses() -> None:
    """Check losses other than a mean over labels >= 0, even if the first batch has no ignored labels."""
    every = make_tokens(3, rows=3).clamp(min=1)
    ragged = every.clone()
    ragged[1, :9], ragged[2, 7:] = PADDING, PADDING
    for kind, ignored, length, option in (
        ("rows", PADDING, LENGTH, None), ("mean", 0, LENGTH, None), ("mean", -1, LENGTH - 2, None),
        ("by hand", -1, LENGTH - 2, -1), ("by hand", -1, LENGTH, None),
    ):  # fmt: skip
        ids, batches = (
            make_tokens(2, rows=3)[:, :length],
            [every[:, :length], ragged.masked_fill(ragged < 0, ignored)[:, :length]],
        )
        if kind == "by hand":
            batches = batches[1:]
        whole = build_seeded(0, lambda kind=kind, ignored=ignored: CustomLossGPT(kind, ignored))
        with open_accelerator(kwargs_handlers=[TorchContextParallelConfig(ignore_index=option)]) as accelerator:
            model = accelerator.prepare(
                build_seeded(0, lambda kind=kind, ignored=ignored: CustomLossGPT(kind, ignored))
            )
            for targets in batches:
                expected, mine = whole(ids, targets), model(ids, targets)
                assert abs(mine.item() - expected.item()) < 1e-5 * expected.item(), (kind, ignored, length)
            expected.backward()
            accelerator.backward(mine)
            compare_gradients(model, whole, 1e-5)
    with open_accelerator() as accelerator:
        model = accelerator.prepare(build_seeded(0, lambda: CustomLossGPT("by hand", -1)))
        with pytest.raises(DataError, match=r"pad sequences of 10 tokens to 12.* contain -1.*\(ignore_index=-1\)"):
            model(make_tokens(2, rows=3)[:, :10], ragged.masked_fill(ragged < 0, -1)[:, :10])
    with open_accelerator(kwargs_handlers=[TorchContextParallelConfig(ignore_index=0)]) as accelerator:
        model = accelerator.prepare(build_seeded(0, GPTWithLoss))
        with pytest.raises(
            PrepareError, match=r"ignore_index=0\), but the cross entropy of GPTWithLoss has ignore_index=-100"
        ):
            model(make_tokens(2), make_tokens(3))


def check_release() -> None:
    """Check that `free_memory` and a failed `prepare` remove Headway's attention and hooks from a model."""
    model = build_seeded(0, llama)
    model.set_attn_implementation("eager")
    losses = []
    with open_accelerator() as accelerator:
        for _ in range(2):
            cut = accelerator.prepare(model)
            assert model.config._attn_implementation == "sdpa"
            losses.append(cut(input_ids=make_tokens(2), labels=make_tokens(3)).loss.item())
            assert any("_headway_attention" in module.__dict__ for module in model.modules())
            accelerator.free_memory()
            assert not any("_headway_attention" in module.__dict__ for module in model.modules())
            assert model.config._attn_implementation == "eager"
    assert losses[0] == losses[1]
    model = build_seeded(0, gpt)
    with open_accelerator(kwargs_handlers=[ShardingOptions(forward_methods=("missing",))]) as accelerator:
        with pytest.raises(PrepareError, match="has no such method"):
            accelerator.prepare(model)
        assert not accelerator.strategy._prepared  # type: ignore[attr-defined]
        assert not any("_headway_attention" in module.__dict__ for module in model.modules())
        hooks = [hook for block in model.blocks for hook in block._forward_pre_hooks.values()]
        assert not any(isinstance(getattr(hook, "__self__", None), ContextParallel) for hook in hooks)
