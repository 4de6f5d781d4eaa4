"""DeepSpeed at the edges of accumulation windows: several losses, failures, NaN, unused parameters, and rejected uses."""

import copy
import traceback
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, DeepSpeedPlugin
from headway.common.optional import is_available
from headway.core.training.checks.finite import FiniteGuard
from headway.errors import ConfigError, HeadwayError, PrepareError, StateError, UnsupportedError
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed"
)

STAGES = (1, 2, 3)


class Net(nn.Module):
    """Model with two bodies. A forward pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 1)

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        bodies = [self.first(x)] if which == 1 else [self.second(x)] if which == 2 else [self.first(x), self.second(x)]
        return self.head(torch.tanh(sum(bodies)))


def prepare_training(
    stage: int, steps: int = 1, **more: Any
) -> tuple[Accelerator, Any, Any, nn.Module, torch.optim.Optimizer]:
    """Return the accelerator, model and optimizer under ZeRO, and a copy of the model with its own optimizer."""
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=steps, **more
    )
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)


def make_rows(accelerator: Accelerator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows and the rows of all ranks."""
    every = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    half = 4 // accelerator.num_processes
    return every[accelerator.process_index * half :][:half], every


def check_weights(accelerator: Accelerator, model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    found = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return  # only rank 0 has whole weights
    largest = max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())
    assert largest < tolerance, largest


def update_plain(plain: nn.Module, optimizer: torch.optim.Optimizer, *losses: torch.Tensor) -> float:
    (sum(losses) / len(losses)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


# ---------------------------------------------------------------- scenarios that each rank runs for each stage


def two_losses_in_the_last_micro_batch(stage: int) -> None:
    """Gradients of two losses add up, although the first loss has closed the window."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    for number in range(3):
        own = []
        for part in range(2):
            x, every = make_rows(accelerator, 10 * number + part)
            with accelerator.accumulate(model):
                out = model(x)
                accelerator.backward(out.square().mean(), retain_graph=True)
                if stage == 3:
                    with pytest.raises(UnsupportedError, match="Add the losses and"):
                        accelerator.backward(out.mean())
                    accelerator.backward(model(x).mean())
                else:
                    accelerator.backward(out.mean())
                own.append(plain(every).square().mean() + plain(every).mean())
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
        assert abs(update_plain(plain, sgd, *own) - float(norm)) < 1e-6
        check_weights(accelerator, model, plain)
    accelerator.free_memory()


def backward_outside_accumulate(stage: int) -> None:
    """Call backward outside `accumulate()`, and `optimizer.step()` after every second micro-batch."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    for number in range(2):
        own = []
        for part in range(2):
            x, every = make_rows(accelerator, 10 * number + part)
            accelerator.backward(model(x).square().mean())
            own.append(plain(every).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        update_plain(plain, sgd, *own)
        check_weights(accelerator, model, plain)
    accelerator.free_memory()


def failed_window(stage: int) -> None:
    """An error within a window leaves no gradient behind."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    x, _ = make_rows(accelerator, 99)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean() * 7)
    try:
        with accelerator.accumulate(model):
            model(x)
            raise KeyError("the user's own")
    except KeyError:
        pass
    own = []
    for part in range(2):
        x, every = make_rows(accelerator, part)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            own.append(plain(every).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
    assert abs(update_plain(plain, sgd, *own) - float(norm)) < 1e-6
    check_weights(accelerator, model, plain)
    accelerator.free_memory()


def one_body_in_each_micro_batch(stage: int) -> None:
    """Use one of two bodies in each micro-batch. The other body must not add a gradient of the previous window."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    for number, uses in enumerate([(1, 2), (2, 1), (1, 1), (2, 2)]):
        own = []
        for part, which in enumerate(uses):
            x, every = make_rows(accelerator, 10 * number + part)
            with accelerator.accumulate(model):
                accelerator.backward(model(x, which).square().mean())
                own.append(plain(every, which).square().mean())
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
        sgd.zero_grad(set_to_none=False)  # ZeRO's gradients of unused parameters are zeros
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert abs(update_plain(plain, sgd, *own) - float(norm)) < 1e-6, uses
        check_weights(accelerator, model, plain)
    accelerator.free_memory()


def nan_without_weight(stage: int) -> None:
    """A NaN loss with weight 0 has no effect, and a window without weight makes no update."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    for part in range(2):
        x, _ = make_rows(accelerator, part)
        with accelerator.accumulate(model):
            loss = model(x).square()
            is_bad = part == 0 and accelerator.process_index == 1
            accelerator.backward(loss.mean() * (float("nan") if is_bad else 1.0), weight=0 if is_bad else len(x))
            optimizer.step()
            optimizer.zero_grad()
    every_1, half = make_rows(accelerator, 1)[1], make_rows(accelerator, 0)[1][:2]
    update_plain(plain, sgd, plain(torch.cat([half, every_1])).square().mean())
    check_weights(accelerator, model, plain)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean(), weight=0)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.step_was_skipped
    check_weights(accelerator, model, plain)
    accelerator.free_memory()


def overflow_is_skipped(stage: int) -> None:
    """DeepSpeed skips the update if a gradient is not finite, and Headway reports it."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage)
    x, every = make_rows(accelerator, 0)
    for factor in (1.0, float("inf"), 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean() * (factor if accelerator.process_index else 1.0))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step_was_skipped == (factor > 1)
        assert torch.isfinite(norm) == (factor == 1)
        if factor == 1:
            update_plain(plain, sgd, plain(every).square().mean())
    assert accelerator.num_updates == 2
    check_weights(accelerator, model, plain)
    accelerator.free_memory()


def overflow_under_the_guard(stage: int) -> None:
    """The first loss scale of fp16 is usually too large. The guard lets DeepSpeed skip the update and lower the scale."""
    from deepspeed import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed rejects float16 on CPUs
    accelerator, model, optimizer, *_ = prepare_training(stage, on_non_finite="raise", mixed_precision="fp16")
    x, _ = make_rows(accelerator, 0)
    skipped = []
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean() * (1e5 if number < 2 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped[0]
    assert accelerator.num_updates == 4 - sum(skipped) > 0
    accelerator.free_memory()


def copied_model(stage: int) -> None:
    """Under stage 3 a model cannot be copied, because a rank holds only a part of it."""
    accelerator, model, *_ = prepare_training(stage)
    if stage == 3:
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            copy.deepcopy(model)
    accelerator.free_memory()


def evaluation(stage: int) -> None:
    """A forward pass without gradients within a window changes nothing."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, steps=2)
    own = []
    for part in range(2):
        x, every = make_rows(accelerator, part)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            own.append(plain(every).square().mean())
            model.eval()
            with torch.no_grad():
                assert torch.allclose(model(x), plain(x), atol=1e-6)
            model.train()
            optimizer.step()
            optimizer.zero_grad()
    update_plain(plain, sgd, *own)
    check_weights(accelerator, model, plain)
    accelerator.free_memory()


def non_finite_guard(stage: int) -> None:
    """If a loss or gradient is not finite on one rank, the guard skips the update on all ranks and reports why."""
    accelerator, model, optimizer, plain, sgd = prepare_training(stage, on_non_finite="skip")
    x, every = make_rows(accelerator, 0)
    for factor in (1.0, float("nan"), 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean() * (factor if accelerator.process_index else 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step_was_skipped == (factor != 1)
        if factor == 1:
            update_plain(plain, sgd, plain(every).square().mean())
    assert "loss of micro-batch 1 was nan on rank 1" in accelerator.non_finite.report
    hook = model.first.weight.register_hook(lambda grad: grad * float("inf"))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    assert "(first.weight)" in accelerator.non_finite.report
    assert accelerator.num_updates == 2
    check_weights(accelerator, model, plain)
    accelerator.free_memory()


def wrong_use(stage: int) -> None:
    """Each wrong use raises an error that says what to do."""

    def fails(kind: type[HeadwayError], word: str, action: Callable[[], Any]) -> None:
        with pytest.raises(kind, match=word):
            action()

    accelerator, model, optimizer, _, _ = prepare_training(stage)
    x, _ = make_rows(accelerator, 0)
    fails(UnsupportedError, "one optimizer", lambda: accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)))
    accelerator._preparation.optimizers.pop()
    fails(UnsupportedError, "save_state", optimizer.state_dict)
    fails(UnsupportedError, "load_state", lambda: optimizer.load_state_dict({}))
    fails(UnsupportedError, "prepare one model", lambda: accelerator.prepare(Net()))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean())
        fails(UnsupportedError, "model.parameters", lambda: accelerator.clip_grad_norm_(model.head.parameters(), 1.0))
        fails(UnsupportedError, "2-norm", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, float("inf")))
        fails(UnsupportedError, "clip_grad_norm_", lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        fails(StateError, "were clipped or read", lambda: accelerator.backward(model(x).mean()))
        fails(UnsupportedError, "closure", lambda: optimizer.step(lambda: 0.0))
        optimizer.step()
    accelerator.free_memory()
    other = Accelerator(cpu=True, strategy=f"zero{stage}")
    alone = other.prepare(Net())
    fails(PrepareError, "optimizer", lambda: alone(x))
    fails(UnsupportedError, "orthogonalizes", lambda: other.prepare(torch.optim.Muon([alone.head.weight], lr=0.1)))
    other.free_memory()
    scaled = Net()
    scaled.scale = torch.nn.Parameter(torch.tensor(1.0))
    fourth = Accelerator(cpu=True, strategy=f"zero{stage}")
    fails(
        UnsupportedError, r"scale of Net .* of shape \(1,\)",
        lambda: fourth.prepare(scaled, torch.optim.SGD(scaled.parameters(), lr=0.1)),
    )  # fmt: skip
    fourth.free_memory()
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.25, "train_batch_size": 7}
    third = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = Net()
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
    fails(
        ConfigError, "train_batch_size=7 in the JSON, but 4",
        lambda: third.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader),
    )  # fmt: skip
    third.free_memory()


SCENARIOS = [
    two_losses_in_the_last_micro_batch, backward_outside_accumulate, failed_window, one_body_in_each_micro_batch,
    nan_without_weight, overflow_is_skipped, overflow_under_the_guard, copied_model, evaluation, wrong_use,
]  # fmt: skip
if "strategy" in signature(FiniteGuard).parameters:  # the guard reads sharded gradients through the strategy
    SCENARIOS.append(non_finite_guard)


def run_scenarios(names: list[str]) -> dict[str, str]:
    found = {}
    for scenario in SCENARIOS:
        for stage in STAGES:
            if scenario.__name__ not in names:
                continue
            try:
                scenario(stage)
                found[f"{scenario.__name__} {stage}"] = ""
            except Exception:
                found[f"{scenario.__name__} {stage}"] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """Run all scenarios in one pair of processes, because DeepSpeed starts slowly."""
    return run_ranks(run_scenarios, 2, [each.__name__ for each in SCENARIOS], timeout=500)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_scenario_holds_at_each_zero_stage(
    scenario: Callable[[int], None], stage: int, results: list[dict[str, str]]
) -> None:
    for found in results:
        assert not found[f"{scenario.__name__} {stage}"], found[f"{scenario.__name__} {stage}"]
