"""Models sharded by FSDP2: checks for non-finite gradients, norms, optimizers made before `prepare`, and calls on one rank."""

import copy
import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import Accelerator, GradScalerKwargs
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import PrepareError, StateError, UnsupportedError
from tests.distributed.ranks import run_ranks


def make_parts() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    return model, x, x[:, :2] * 2


def gather_weights(model: nn.Module) -> torch.Tensor:
    """Return all weights, gathered from all ranks, as one vector."""
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])


# ---------------------------------------------------------------- non-finite gradients


def train_with_infinite_gradient() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy="fsdp", on_non_finite="skip")
    model, x, y = make_parts()
    given = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ledger, guard = accelerator.strategy.everyone.ledger, accelerator.non_finite
    assert guard is not None
    skipped, exchanges, norms = [], [], []
    for update in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y), weight=len(x))
            if update == 1 and accelerator.process_index == 1:
                accelerator.strategy.get_local_gradients(given)[0].view(-1)[0] = math.inf
            before = ledger.sequence
            if update != 2:
                norms.append(accelerator.clip_grad_norm_(given, 0.5).item())
            optimizer.step()
            exchanges.append(ledger.sequence - before)
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    inside = Accelerator(cpu=True, strategy="fsdp", gradient_accumulation_steps=2)
    other = inside.prepare(make_parts()[0])
    with inside.accumulate(other):
        inside.backward(mse_loss(other(x), y), weight=len(x))
        norm = inside.clip_grad_norm_(other.parameters(), 0.5)
    return {
        "skipped": skipped, "exchanges": exchanges, "norms": norms, "report": guard.report, "weights": gather_weights(model),
        "inside": (type(norm) is torch.Tensor, norm.ndim),
    }  # fmt: skip


def train_by_hand(updates: int) -> tuple[list[float], torch.Tensor]:
    model, x, y = make_parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for update in range(updates):
        mse_loss(model(x), y).backward()
        if update != 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, gather_weights(model)


def test_skipping_takes_one_collective_and_is_equal_on_all_ranks() -> None:
    first, second = run_ranks(train_with_infinite_gradient, 2)
    norms, weights = train_by_hand(3)  # the skipped update did not happen, and the one after it was not clipped
    for found in (first, second):
        assert found["skipped"] == [False, True, False, False]
        # Good updates need a collective for the norm, if clipped, and one for the check. Before updates 1, 2 and 4,
        # ranks are also compared. The first clipping checks that all ranks clip with the same limit.
        assert [found["exchanges"][i] for i in (0, 2, 3)] == [4, 1, 3]
        assert "gradients of 1 of 4 parameters are not (0.weight)" in found["report"], found["report"]
        assert not math.isfinite(found["norms"][1])
        torch.testing.assert_close(torch.tensor([found["norms"][0], found["norms"][2]]), torch.tensor(norms))
        torch.testing.assert_close(found["weights"], weights)
        assert found["inside"] == (True, 0)


def train_with_overflow() -> list[Any]:
    scaling = [GradScalerKwargs(init_scale=256.0)]
    accelerator = Accelerator(cpu=True, strategy="fsdp", mixed_precision="fp16", kwargs_handlers=scaling)
    model, x, y = make_parts()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.scaler is not None
    results: list[Any] = []
    for update in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x).float(), y), weight=len(x))
            if update == 1 and accelerator.process_index == 1:
                accelerator.strategy.get_local_gradients(model.parameters())[0].view(-1)[0] = math.inf
            accelerator.unscale_gradients()
            gradient = accelerator.strategy.get_local_gradients(model.parameters())[1].abs().max().item()
            optimizer.step()
            results.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), gradient < 100))
            optimizer.zero_grad()
    return results


def test_overflow_on_one_rank_skips_the_update_on_all() -> None:
    first, second = run_ranks(train_with_overflow, 2)
    assert [each[0] for each in first] == [each[0] for each in second] == [False, True, False]
    assert [each[1] for each in first] == [each[1] for each in second] == [256.0, 128.0, 128.0]
    assert all(each[2] for each in first)


# ---------------------------------------------------------------- optimizers made before prepare

PREPARATIONS: dict[str, Callable[[Accelerator, nn.Module, torch.optim.Optimizer], Any]] = {
    "together": lambda acc, model, optimizer: acc.prepare(model, optimizer),
    "optimizer first": lambda acc, model, optimizer: reversed(acc.prepare(optimizer, model)),
    "one after the other": lambda acc, model, optimizer: (acc.prepare(model), acc.prepare(optimizer)),
    "optimizer, then model": lambda acc, model, optimizer: reversed((acc.prepare(optimizer), acc.prepare(model))),
}


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    mse_loss(model(x), y).backward()
    optimizer.step()
    model.zero_grad()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW for the first layer. Tests add the last layer's parameters as a second group."""
    return torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}], lr=0.05)  # type: ignore[index]


def _find_number(optimizer: Any, parameter: torch.Tensor) -> int:
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return next(index for index, each in enumerate(flat) if each is parameter)


def train_with_early_optimizers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, prepare in PREPARATIONS.items():
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        model, x, y = make_parts()
        given, last = list(model.parameters()), list(model[2].parameters())  # type: ignore[index]
        optimizer = make_optimizer(model)
        step_by_hand(model, optimizer, x, y)
        model, prepared = prepare(accelerator, model, optimizer)
        prepared.add_param_group({"params": last})
        norms = []
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y), weight=len(x))
                norms.append(accelerator.clip_grad_norm_(given, 0.5).item())
                prepared.step()
                prepared.zero_grad()
        ids = {id(p) for p in model.parameters()}
        assert {id(p) for group in prepared.param_groups for p in group["params"]} == ids, name
        assert {id(p) for p in optimizer.state} == ids, name
        assert all(state["exp_avg"].to_local().shape == p.to_local().shape for p, state in optimizer.state.items()), (
            name
        )
        found[name] = torch.tensor(norms), gather_weights(model)
        # A state of whole tensors, as other libraries save it, is sharded like the parameters.
        state = prepared.state_dict()
        plain = {
            key: {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in each.items()}
            for key, each in state["state"].items()
        }
        prepared.load_state_dict({**state, "state": plain})
        for parameter, each in optimizer.state.items():
            torch.testing.assert_close(
                each["exp_avg"].to_local(), state["state"][_find_number(prepared, parameter)]["exp_avg"].to_local()
            )
        accelerator.free_memory()
    return found


def test_optimizer_made_before_prepare_works_in_any_order() -> None:
    model, x, y = make_parts()
    optimizer = make_optimizer(model)
    step_by_hand(model, optimizer, x, y)
    optimizer.add_param_group({"params": model[2].parameters()})  # type: ignore[index]
    norms = []
    for _ in range(3):
        mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(train_with_early_optimizers, 2):
        for name in PREPARATIONS:
            torch.testing.assert_close(found[name][0], torch.tensor(norms), msg=lambda t: f"{name}: {t}")
            torch.testing.assert_close(found[name][1], gather_weights(model), msg=lambda t: f"{name}: {t}")


def use_unprepared_optimizers() -> None:
    """Step optimizers that were not prepared and hold the former parameters. The steps raise errors."""
    accelerator = Accelerator(cpu=True, strategy="fsdp", gradient_accumulation_steps=2)
    model, x, y = make_parts()
    stray = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model)
    with accelerator.accumulate(prepared):
        accelerator.backward(mse_loss(prepared(x), y), weight=len(x))
        with pytest.raises(StateError, match="stepped inside an accumulation window"):
            stray.step()
    with accelerator.accumulate(prepared):
        accelerator.backward(mse_loss(prepared(x), y), weight=len(x))
    with pytest.raises(StateError, match="its step changes nothing"):
        stray.step()
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    accelerator.prepare(foreign)
    with pytest.raises(PrepareError, match="2 parameters that belong to no prepared model"):
        accelerator.prepare(nn.Linear(1, 1))


def test_optimizers_with_former_parameters_are_errors() -> None:
    run_ranks(use_unprepared_optimizers, 2)


# ---------------------------------------------------------------- models


def copy_model() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, x, _ = make_parts()
    model = accelerator.prepare(model)
    for attempt in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled: under the fsdp strategy"):
            attempt(model)
    # After an evaluation, the root's parameters are whole until names or parameters are read.
    with torch.no_grad():
        model(x)
    registry = accelerator._preparation._prepared
    assert {id(p) for _, p in registry.iterate_named("named_parameters")} == registry.list_ids()


def test_sharded_model_cannot_be_copied_and_keeps_its_names_after_evaluation() -> None:
    run_ranks(copy_model, 2)


def call_on_one_rank() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, x, _ = make_parts()
    model = accelerator.prepare(model)
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match=r"on rank 0 only: rank 1 has continued to .*test_parts.py:"):
            model(x)
    accelerator.wait_for_everyone()

    @accelerator.on_main_process
    def show() -> None:
        with pytest.raises(UnsupportedError, match=r"on rank 0 only"), torch.no_grad():
            model(x)

    show()
    accelerator.wait_for_everyone()
    for _ in range(2):  # different lines on each rank, but all ranks call the model
        if accelerator.is_main_process:
            out = model(x)
        else:
            out = model(x + 1)
    assert out.shape == (8, 2)


def test_calling_a_sharded_model_on_one_rank_is_an_error() -> None:
    run_ranks(call_on_one_rank, 2)


def prepare_meta_model() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PrepareError, match="2 parameters of Linear are on the meta device"):
        Accelerator(cpu=True).prepare(model)


def test_ddp_rejects_a_model_on_the_meta_device() -> None:
    run_ranks(prepare_meta_model, 2)


def read_weights_on_one_rank(folder: str) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, _, _ = make_parts()
    model = accelerator.prepare(model)
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match=r"^save_model\(\) is called at .* on rank 0 only: .*full weights"):
            accelerator.save_model(model, folder)
        with pytest.raises(UnsupportedError, match=r"^get_state_dict\(\) is called at .* on rank 0 only"):
            accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder)
    assert bool(accelerator.get_state_dict(model)) == accelerator.is_main_process


def test_reading_whole_weights_on_one_rank_is_an_error(tmp_path: Path) -> None:
    run_ranks(read_weights_on_one_rank, 2, str(tmp_path / "weights"))
    assert (tmp_path / "weights" / "model.safetensors").exists()


def save_late_on_rank_0(folder: str) -> int:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(make_parts()[0])
    for number in range(2):
        accelerator.get_state_dict(model)  # rank 0 has only received, and the other ranks have only sent
        if accelerator.is_main_process:
            time.sleep(0.5)  # for example, to write the weights
        accelerator.save_state(Path(folder, str(number)))
    accelerator.get_state_dict(model)
    return len(read_manifest(Path(folder, "1")).state["streams"])


def test_late_rank_after_whole_weights_still_takes_part_in_the_save(tmp_path: Path) -> None:
    assert run_ranks(save_late_on_rank_0, 3, str(tmp_path)) == [
        3,
        3,
        3,
    ]  # with two ranks, both would pass the same number of messages
