"""Hooks and steps that fail on one rank end the save or the load on all ranks, also if other hooks contain collectives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


def _prepare() -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(nn.Linear(4, 2))


def fail_in_hooks(folder: str) -> None:
    accelerator, _ = _prepare()
    calls = []

    def fail(*_: Any) -> None:
        if accelerator.process_index == 1:
            raise ValueError("disk quota of the hook")

    def fail_or_gather(*_: Any) -> None:
        fail()
        accelerator.gather(torch.ones(1))

    def gather(*_: Any) -> None:
        calls.append(accelerator.gather(torch.ones(1)))

    def use_torch(*_: Any) -> None:
        calls.append(torch.distributed.barrier())

    for hooks, message in (
        ([fail], "disk quota"),
        ([fail, gather], "disk quota"),
        ([fail, use_torch], "disk quota"),
        ([fail_or_gather], "disk quota" if accelerator.process_index == 1 else "do not fit together"),
    ):
        handles = [accelerator.register_save_state_pre_hook(hook) for hook in hooks]
        with pytest.raises(CheckpointError, match=message):
            accelerator.save_state(folder)
        assert not Path(folder).exists()
        for handle in handles:
            handle.remove()
        assert accelerator.gather(torch.ones(1)).sum() == 2  # ranks are still in step
    seen: list[str] = []
    handles = []
    if accelerator.process_index == 1:  # only one rank has these hooks
        handles = [
            accelerator.register_save_state_pre_hook(lambda models, weights, place: Path(place, "own").write_text("1")),
            accelerator.register_load_state_pre_hook(lambda models, place: seen.append(Path(place, "own").read_text())),
        ]
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    assert seen == ["1"] * accelerator.process_index
    for handle in handles:
        handle.remove()
    for hooks in ([fail], [fail, gather], [fail, use_torch]):
        handles = [accelerator.register_load_state_pre_hook(hook) for hook in hooks]
        kind, message = (
            (ValueError, "^disk") if accelerator.process_index == 1 else (CheckpointError, "rank 1: ValueError")
        )
        with pytest.raises(kind, match=message):
            accelerator.load_state(folder)
        for handle in handles:
            handle.remove()
        assert accelerator.gather(torch.ones(1)).sum() == 2
    assert not calls
    accelerator.load_state(folder)


def test_hook_that_fails_on_one_rank_ends_saves_and_loads_on_all(tmp_path: Path) -> None:
    run_ranks(fail_in_hooks, 2, str(tmp_path / "saved"), timeout=240)


def fail_in_step() -> None:
    from torchao.optim import AdamW8bit

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2).to(torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), bf16_stochastic_round=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    accelerator.backward(model(torch.ones(3, 4, dtype=torch.bfloat16)).float().mean())

    def fail(*_: Any) -> None:
        raise ValueError("in the step")

    optimizer.register_step_pre_hook(fail)  # it comes after the hook that seeds
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="in the step"):
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    accelerator.wait_for_everyone()


def test_failed_step_with_stochastic_rounding_restores_generators() -> None:
    pytest.importorskip("torchao")
    run_ranks(fail_in_step, 2, timeout=240)
