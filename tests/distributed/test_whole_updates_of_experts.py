"""Optimizers of whole parameters on distributed experts: losses of one process, other layouts, and float16."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.layouts.whole_updates import ownership
from tests.distributed.cut_models import mixtral
from tests.distributed.layouts import build_seeded
from tests.distributed.ranks import run_ranks
from tests.distributed.whole_updates import MAKERS, UPDATES

NAMES = ["MatrixOptimizer", "Adafactor", "SOAP", "Shampoo"]
TOLERANCES = {"SOAP": 5e-2}
"""Relative tolerances of losses. The default is 1e-8, in float64.

On one process, SOAP's losses change by 2% after 20 updates if the initial weights change in their last bits.
"""
TOLERANCES_FP16 = {"MatrixOptimizer": 2e-3, "Adafactor": 5e-5, "Shampoo": 5e-5}
OVERFLOW = 4
"""Update in which one rank's gradient overflows in float16."""
HALF = UPDATES // 2
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def build_model(precision: str) -> nn.Module:
    model: nn.Module = build_seeded(0, mixtral)
    return model.double() if precision == "no" else model


def make_rows(number: int) -> torch.Tensor:
    """Return eight rows of one update, whose next tokens can be learned."""
    start = torch.randint(0, 37, (8, 1), generator=torch.Generator().manual_seed(number))
    return (start + 3 * torch.arange(12)) % 37


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


Curve = list[tuple[float, float]]
"""Loss and gradient norm of each update."""


def run_by_hand(names: Sequence[str], precision: str = "no") -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for name in names:
        model, scaler = build_model(precision), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        optimizers, found[name] = MAKERS[name](model), []
        for number in range(UPDATES):
            with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                loss = compute_loss(model, make_rows(number))
            scaler.scale(loss).backward()
            if precision == "fp16" and number == OVERFLOW:
                dict(model.named_parameters())[EXPERTS].grad[-1, 0, 0] = math.inf  # type: ignore[index]
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            found[name].append((loss.item(), norm.item()))
    return found


def run_prepared(
    layout: str, names: Sequence[str], precision: str = "no", save: str = "", load: str = ""
) -> tuple[dict[str, Curve], dict[str, list[bool]], dict[str, float]]:
    """Train on this rank's rows in two micro-batches. With `save`, save before the tenth update; `load` continues there.

    Returns:
        By name, the losses and norms, whether the first optimizer skipped each update, and the last loss scale.
    """
    ownership.BUCKET_BYTES = 3000  # several buckets even for a small model
    found: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = {}, {}, {}
    for name in names:
        accelerator = Accelerator(
            cpu=True,
            strategy=layout,
            mixed_precision=precision,
            gradient_accumulation_steps=2,  # type: ignore[arg-type]
        )
        model = build_model(precision)
        optimizers: list[Any] = MAKERS[name](model)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if load:
            accelerator.load_state(str(Path(load, name)))
        shard, curve, skipped = accelerator.strategy.data_shard, [], []
        for number in range(HALF if load else 0, UPDATES):
            if save and number == HALF:
                accelerator.save_state(str(Path(save, name)), blocking=True)
            losses = []
            for ids in make_rows(number).chunk(shard.count)[shard.index].chunk(2):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = compute_loss(model, ids)
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    if accelerator.sync_gradients:
                        if precision == "fp16" and number == OVERFLOW and accelerator.process_index == 1:
                            get_local_shard(dict(model.named_parameters())[EXPERTS].grad)[-1, 0, 0] = math.inf
                        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            loss = accelerator.strategy.data_group.reduce_numbers([sum(losses) / 2])[0] / shard.count
            curve.append((loss, norm))
            skipped.append(optimizers[0].step_was_skipped)
        found[0][name], found[1][name] = curve, skipped
        found[2][name] = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
        accelerator.free_memory()
    return found


def compare(found: dict[str, Curve], expected: dict[str, Curve], tolerances: dict[str, float]) -> None:
    for name, curve in found.items():
        expected_curve, tolerance = expected[name][-len(curve) :], tolerances.get(name, 1e-8)
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in expected_curve], rel=tolerance), name
        assert expected[name][0][0] > 1.05 * expected_curve[-1][0], name
        norms = [(norm, other) for (_, norm), (_, other) in zip(curve, expected_curve) if math.isfinite(other)]
        if name != "SOAP":  # its norms vary more than its losses
            assert [one for one, _ in norms] == pytest.approx([other for _, other in norms], rel=100 * tolerance), name


def check_layout(layout: str, num_ranks: int, names: Sequence[str]) -> None:
    (expected,) = run_ranks(run_by_hand, 1, names, timeout=250)
    for found, _, _ in run_ranks(run_prepared, num_ranks, layout, names, timeout=280):
        compare(found, expected, TOLERANCES)


def test_muon_on_experts_matches_one_process():
    check_layout("ep", 2, ["MatrixOptimizer"])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "num_ranks"), [("cp=2+ep=2", 4), ("fsdp=2+ep=2+tp=2", 8)])
def test_muon_and_adafactor_update_experts_as_on_one_process(layout, num_ranks):
    check_layout(layout, num_ranks, ["MatrixOptimizer", "Adafactor"])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_ranks"), [("ep", 2), ("fsdp+ep=2", 4), ("ep=2+tp=2", 4)])
def test_all_optimizers_on_experts_match_one_process(layout, num_ranks):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    check_layout(layout, num_ranks, NAMES)


@pytest.mark.slow
def test_expert_states_load_in_other_layouts(tmp_path):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    names = [name for name in NAMES if name != "Shampoo"]  # its state holds objects that only pickle could store
    (expected,) = run_ranks(run_by_hand, 1, names, timeout=250)
    saves = {"ep": 2, "fsdp+ep=2": 4, "ddp": 1}
    loads = {"ep": "fsdp+ep=2", "fsdp+ep=2": "ddp", "ddp": "ep"}
    for layout, num_ranks in saves.items():
        folder = str(tmp_path / layout)
        compare(
            run_ranks(run_prepared, num_ranks, layout, names, "no", folder, timeout=280)[0][0], expected, TOLERANCES
        )
        after = loads[layout]
        found = run_ranks(run_prepared, saves[after], after, names, "no", "", folder, timeout=280)
        compare(found[-1][0], expected, TOLERANCES)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_ranks"), [("fsdp", 2), ("ep", 2), ("fsdp+ep=2", 4), ("ep=2+tp=2", 4)])
def test_float16_matches_one_process_and_overflow_skips_updates_on_all_ranks(layout, num_ranks):
    names = ["MatrixOptimizer", "Adafactor", "Shampoo"]
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    (expected,) = run_ranks(run_by_hand, 1, names, "fp16", timeout=250)
    for found, skipped, scales in run_ranks(run_prepared, num_ranks, layout, names, "fp16", timeout=280):
        compare(found, expected, TOLERANCES_FP16)
        for name in names:
            assert [number for number, is_skipped in enumerate(skipped[name]) if is_skipped] == [OVERFLOW], name
            assert scales[name] == 32768.0, name
