"""Norms of gradients, weights and updates under several layouts equal those of plain PyTorch on one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.cut_models import GPT, GPT_PLAN
from tests.distributed.ranks import run_ranks

NUM_UPDATES, LIMIT = 4, 0.05
PARTS = ["blocks.0", "blocks.1", "head", "norm", "places", "tokens"]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(tied=False).double()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW for the blocks and SGD for the rest."""
    blocks = [p for name, p in model.named_parameters() if name.startswith("blocks")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    return [torch.optim.AdamW(blocks, lr=1e-2, weight_decay=0.1), torch.optim.SGD(rest, lr=0.1)]


def make_rows() -> torch.Tensor:
    return torch.arange(NUM_UPDATES * 4 * 9).remainder(37).reshape(NUM_UPDATES, 4, 9)


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def measure(
    layout: str, per: str = "block", parts_of_loss: Sequence[float] = (1.0,)
) -> tuple[list[dict[str, Any]], list[float]]:
    """Train for `NUM_UPDATES` updates, and return the norms of each second one, and the last losses.

    Each batch has one backward for each part of its loss. The parts have a sum of 1.
    """
    from headway import Accelerator, ParameterNorms, TensorParallelOptions

    handlers = [TensorParallelOptions(plan=GPT_PLAN)] if "tp" in layout else []
    accelerator = Accelerator(cpu=True, strategy=layout, kwargs_handlers=handlers)
    model: Any = build_model()
    optimizers: Sequence[Any] = make_optimizers(model)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    norms = ParameterNorms(accelerator, model, every=2, per=per, log=False)
    shard = accelerator.strategy.data_shard
    found, losses = [], []
    for rows in make_rows():
        with accelerator.accumulate(model):
            for part in parts_of_loss:
                loss = compute_loss(model, rows.chunk(shard.count)[shard.index])
                accelerator.backward(loss * part)
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append({name: tuple(each) for name, each in norms.latest.items()})
        losses.append(float(loss.detach()))
    accelerator.free_memory()
    return found, losses


def measure_all(layouts: Sequence[str]) -> list[Any]:
    return [measure(layout)[0] for layout in layouts]


def measure_two_losses(layouts: Sequence[str]) -> list[Any]:
    return [measure(layout, parts_of_loss=(0.125, 0.875))[0] for layout in layouts]


def measure_by_hand(per_parameter: bool = False) -> list[dict[str, tuple[float, float, float]]]:
    model = build_model()
    optimizers = make_optimizers(model)
    found = []
    for rows in make_rows():
        compute_loss(model, rows).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        keys = list(grads) if per_parameter else PARTS
        norms = {}
        for key in keys:
            names = [name for name in grads if name == key or name.startswith(f"{key}.")]
            norms[key] = tuple(
                float(torch.cat([tensors[name].flatten() for name in names]).norm())
                for tensors in (grads, before, changes)
            )
        found.append(norms)
    return found


def check_norms(found: Sequence[dict[str, Any]], per_parameter: bool = False) -> None:
    expected = measure_by_hand(per_parameter)
    assert found[0] == {}
    assert found[1] == found[2]  # the third update was not measured
    for index in (1, 3):
        assert set(found[index]) == set(expected[index])
        for name, norms in found[index].items():
            assert norms == pytest.approx(expected[index][name], rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("per", ["block", "parameter"])
def test_norms_on_one_process(per: str) -> None:
    check_norms(measure("ddp", per)[0], per_parameter=per == "parameter")


def test_norms_of_replicas_and_shards() -> None:
    first, second = run_ranks(measure_all, 2, ("ddp", "fsdp"))
    assert first == second
    for found in first:
        check_norms(found)


def test_norms_of_two_losses_in_one_micro_batch() -> None:
    first, second = run_ranks(measure_two_losses, 2, ("ddp", "fsdp"))
    assert first == second
    for found in first:
        check_norms(found)


@pytest.mark.slow
def test_norms_of_split_layers_and_stages() -> None:
    first, second = run_ranks(measure_all, 2, ("tp", "pp"))
    assert first == second
    for found in first:
        check_norms(found)


@pytest.mark.matrix
def test_norms_on_a_mesh() -> None:
    for found in run_ranks(measure_all, 4, ("fsdp+tp=2", "hsdp=2", "pp=2+fsdp"))[0]:
        check_norms(found)
