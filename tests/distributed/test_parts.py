"""Parameters of which each rank holds a part: verdicts, norms and optimizers go by the strategy. The parts are FSDP2's."""

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


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    return model, x, x[:, :2] * 2


def whole(model: nn.Module) -> torch.Tensor:
    """All weights, from all ranks."""
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])


# ---------------------------------------------------------------- one exchange, one verdict


def verdicts() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, strategy="fsdp", on_non_finite="skip")
    model, x, y = make()
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
    other = inside.prepare(make()[0])
    with inside.accumulate(other):
        inside.backward(mse_loss(other(x), y), weight=len(x))
        norm = inside.clip_grad_norm_(other.parameters(), 0.5)
    return {
        "skipped": skipped, "exchanges": exchanges, "norms": norms, "report": guard.report, "weights": whole(model),
        "inside": (type(norm) is torch.Tensor, norm.ndim),
    }  # fmt: skip


def by_hand(updates: int) -> tuple[list[float], torch.Tensor]:
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for update in range(updates):
        mse_loss(model(x), y).backward()
        if update != 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, whole(model)


def test_the_verdict_is_one_exchange_and_all_ranks_have_the_same() -> None:
    first, second = run_ranks(verdicts, 2)
    norms, weights = by_hand(3)  # the update that was skipped did not happen, the one after it was not clipped
    for found in (first, second):
        assert found["skipped"] == [False, True, False, False]
        # Good updates: the norm, where it is asked for, and the verdict; before updates 1, 2, 4 ranks are compared, too.
        assert [found["exchanges"][i] for i in (0, 2, 3)] == [3, 1, 3]
        assert "gradients of 1 of 4 parameters are not (0.weight)" in found["report"], found["report"]
        assert not math.isfinite(found["norms"][1])
        torch.testing.assert_close(torch.tensor([found["norms"][0], found["norms"][2]]), torch.tensor(norms))
        torch.testing.assert_close(found["weights"], weights)
        assert found["inside"] == (True, 0)


def overflows() -> list[Any]:
    scaling = [GradScalerKwargs(init_scale=256.0)]
    accelerator = Accelerator(cpu=True, strategy="fsdp", mixed_precision="fp16", kwargs_handlers=scaling)
    model, x, y = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.scaler is not None
    told: list[Any] = []
    for update in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x).float(), y), weight=len(x))
            if update == 1 and accelerator.process_index == 1:
                accelerator.strategy.get_local_gradients(model.parameters())[0].view(-1)[0] = math.inf
            accelerator.unscale_gradients()
            gradient = accelerator.strategy.get_local_gradients(model.parameters())[1].abs().max().item()
            optimizer.step()
            told.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), gradient < 100))
            optimizer.zero_grad()
    return told


def test_an_overflow_in_one_rank_s_part_is_known_to_all() -> None:
    first, second = run_ranks(overflows, 2)
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


def step_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    mse_loss(model(x), y).backward()
    optimizer.step()
    model.zero_grad()


def with_state(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; the parameters of the last layer come later."""
    return torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}], lr=0.05)  # type: ignore[index]


def _number(optimizer: Any, parameter: torch.Tensor) -> int:
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return next(index for index, each in enumerate(flat) if each is parameter)


def early() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, prepare in PREPARATIONS.items():
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        model, x, y = make()
        given, last = list(model.parameters()), list(model[2].parameters())  # type: ignore[index]
        optimizer = with_state(model)
        step_plainly(model, optimizer, x, y)
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
        found[name] = torch.tensor(norms), whole(model)
        # A state of whole tensors, as another library has saved it, is cut like the parameters.
        state = prepared.state_dict()
        plain = {
            key: {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in each.items()}
            for key, each in state["state"].items()
        }
        prepared.load_state_dict({**state, "state": plain})
        for parameter, each in optimizer.state.items():
            torch.testing.assert_close(
                each["exp_avg"].to_local(), state["state"][_number(prepared, parameter)]["exp_avg"].to_local()
            )
        accelerator.free_memory()
    return found


def test_an_optimizer_made_before_prepare_learns_the_same_in_any_order() -> None:
    model, x, y = make()
    optimizer = with_state(model)
    step_plainly(model, optimizer, x, y)
    optimizer.add_param_group({"params": model[2].parameters()})  # type: ignore[index]
    norms = []
    for _ in range(3):
        mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(early, 2):
        for name in PREPARATIONS:
            torch.testing.assert_close(found[name][0], torch.tensor(norms), msg=lambda t: f"{name}: {t}")
            torch.testing.assert_close(found[name][1], whole(model), msg=lambda t: f"{name}: {t}")


def strays() -> None:
    """An optimizer that nobody prepared holds the parameters as they were; it is found all the same."""
    accelerator = Accelerator(cpu=True, strategy="fsdp", gradient_accumulation_steps=2)
    model, x, y = make()
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


def test_optimizers_that_hold_the_former_parameters_are_refused() -> None:
    run_ranks(strays, 2)


# ---------------------------------------------------------------- models


def copies() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, x, _ = make()
    model = accelerator.prepare(model)
    for attempt in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled: under the fsdp strategy"):
            attempt(model)
    # After an evaluation the root's parameters are whole ones, until somebody reads names or parameters.
    with torch.no_grad():
        model(x)
    registry = accelerator._preparation._prepared
    assert {id(p) for _, p in registry.iterate_named("named_parameters")} == registry.list_ids()


def test_a_model_in_parts_is_not_copied_and_keeps_its_names_after_an_evaluation() -> None:
    run_ranks(copies, 2)


def alone() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, x, _ = make()
    model = accelerator.prepare(model)
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match=r"on rank 0 only: rank 1 has gone on to .*test_parts.py:"):
            model(x)
    accelerator.wait_for_everyone()

    @accelerator.on_main_process
    def show() -> None:
        with pytest.raises(UnsupportedError, match=r"on rank 0 only"), torch.no_grad():
            model(x)

    show()
    accelerator.wait_for_everyone()
    for _ in range(2):  # each rank its own way, but all of them
        if accelerator.is_main_process:
            out = model(x)
        else:
            out = model(x + 1)
    assert out.shape == (8, 2)


def test_a_model_in_parts_is_not_called_on_one_rank_alone() -> None:
    run_ranks(alone, 2)


def unborn() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PrepareError, match="2 parameters of Linear are on the meta device"):
        Accelerator(cpu=True).prepare(model)


def test_replicas_want_models_with_memory() -> None:
    run_ranks(unborn, 2)


def weights_alone(folder: str) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, _, _ = make()
    model = accelerator.prepare(model)
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match=r"^save_model\(\) is called at .* on rank 0 only: .*whole weights"):
            accelerator.save_model(model, folder)
        with pytest.raises(UnsupportedError, match=r"^get_state_dict\(\) is called at .* on rank 0 only"):
            accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder)
    assert bool(accelerator.get_state_dict(model)) == accelerator.is_main_process


def test_whole_weights_are_not_asked_for_on_one_rank_alone(tmp_path: Path) -> None:
    run_ranks(weights_alone, 2, str(tmp_path / "weights"))
    assert (tmp_path / "weights" / "model.safetensors").exists()


def late(folder: str) -> int:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(make()[0])
    for number in range(2):
        accelerator.get_state_dict(model)  # rank 0 has received what the other one sent, which not all ranks pass
        if accelerator.is_main_process:
            time.sleep(0.5)  # such as to write it
        accelerator.save_state(Path(folder, str(number)))
    accelerator.get_state_dict(model)
    return len(read_manifest(Path(folder, "1")).state["streams"])


def test_a_rank_that_is_late_behind_whole_weights_has_not_gone_on(tmp_path: Path) -> None:
    assert run_ranks(late, 3, str(tmp_path)) == [3, 3, 3]  # of two, both pass as many messages
