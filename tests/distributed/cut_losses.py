"""Losses that models compute from cut labels, and what a released model keeps: run by test_context_parallel.py in its ranks."""

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
from tests.distributed.layouts import LENGTH, PADDING, gpt, llama, seeded, text


class Judge(nn.Module):
    """A GPT that is given targets and computes a loss itself, as a mean or a sum."""

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
def running(**options: Any) -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True, strategy="cp", **options)
    yield accelerator
    accelerator.end_training()


def compare_gradients(model: nn.Module, whole: nn.Module, least: float) -> None:
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if is_dtensor(grad) else grad
        assert float((grad - wanted[name]).abs().max()) <= least * largest, name


class Other(nn.Module):
    """A GPT with a loss of another kind: a mean of its rows' means, with another ignored label, or without cross_entropy."""

    def __init__(self, kind: str, ignored: int = PADDING) -> None:
        super().__init__()
        self.gpt, self.kind, self.ignored = gpt(), kind, ignored

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(ids)
        if self.kind == "by hand":  # an index of -100 would be an error
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


def losses_of_other_kinds() -> None:
    """What is not a mean over labels >= 0 is right, too; also where the first batch shows nothing of it."""
    every = text(3, rows=3).clamp(min=1)
    ragged = every.clone()
    ragged[1, :9], ragged[2, 7:] = PADDING, PADDING
    for kind, ignored, length, option in (
        ("rows", PADDING, LENGTH, None), ("mean", 0, LENGTH, None), ("mean", -1, LENGTH - 2, None),
        ("by hand", -1, LENGTH - 2, -1), ("by hand", -1, LENGTH, None),
    ):  # fmt: skip
        ids, batches = (
            text(2, rows=3)[:, :length],
            [every[:, :length], ragged.masked_fill(ragged < 0, ignored)[:, :length]],
        )
        if kind == "by hand":
            batches = batches[1:]
        whole = seeded(0, lambda kind=kind, ignored=ignored: Other(kind, ignored))
        with running(kwargs_handlers=[TorchContextParallelConfig(ignore_index=option)]) as accelerator:
            model = accelerator.prepare(seeded(0, lambda kind=kind, ignored=ignored: Other(kind, ignored)))
            for targets in batches:
                wanted, mine = whole(ids, targets), model(ids, targets)
                assert abs(mine.item() - wanted.item()) < 1e-5 * wanted.item(), (kind, ignored, length)
            wanted.backward()
            accelerator.backward(mine)
            compare_gradients(model, whole, 1e-5)
    with running() as accelerator:
        model = accelerator.prepare(seeded(0, lambda: Other("by hand", -1)))
        with pytest.raises(DataError, match=r"pad sequences of 10 tokens to 12.* contain -1.*\(ignore_index=-1\)"):
            model(text(2, rows=3)[:, :10], ragged.masked_fill(ragged < 0, -1)[:, :10])
    with running(kwargs_handlers=[TorchContextParallelConfig(ignore_index=0)]) as accelerator:
        model = accelerator.prepare(seeded(0, Judge))
        with pytest.raises(
            PrepareError, match=r"ignore_index=0\), but the cross entropy of Judge has ignore_index=-100"
        ):
            model(text(2), text(3))


def nothing_stays() -> None:
    """After the run, and after a refusal, blocks hold no door, and so no group; they can be prepared again."""
    model = seeded(0, llama)
    model.set_attn_implementation("eager")
    losses = []
    with running() as accelerator:
        for _ in range(2):
            cut = accelerator.prepare(model)
            assert model.config._attn_implementation == "sdpa"
            losses.append(cut(input_ids=text(2), labels=text(3)).loss.item())
            assert any("_headway_attention" in module.__dict__ for module in model.modules())
            accelerator.free_memory()
            assert not any("_headway_attention" in module.__dict__ for module in model.modules())
            assert model.config._attn_implementation == "eager"
    assert losses[0] == losses[1]
    model = seeded(0, gpt)
    with running(kwargs_handlers=[ShardingOptions(forward_methods=("missing",))]) as accelerator:
        with pytest.raises(PrepareError, match="has no such method"):
            accelerator.prepare(model)
        assert not accelerator.strategy._prepared  # type: ignore[attr-defined]
        assert not any("_headway_attention" in module.__dict__ for module in model.modules())
        hooks = [hook for block in model.blocks for hook in block._forward_pre_hooks.values()]
        assert not any(isinstance(getattr(hook, "__self__", None), ContextParallel) for hook in hooks)
