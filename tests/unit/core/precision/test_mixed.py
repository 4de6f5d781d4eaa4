"""Test mixed precision on one CPU process: the scope of autocast, and fp16 scaling with several optimizers."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.core.config.engines import EngineOptions
from headway.core.config.torch_kwargs import AutocastKwargs, GradScalerKwargs
from headway.core.precision.build import build_precision
from headway.core.runtime.device import CPU
from headway.errors import ConfigError, UnsupportedError


def build_fp16_accelerator(**options: Any) -> Accelerator:
    options.setdefault("kwargs_handlers", [GradScalerKwargs(init_scale=1024.0)])
    return Accelerator(cpu=True, mixed_precision="fp16", **options)


def prepare_two_models(accelerator: Accelerator, rate: float = 0.25) -> tuple[list[Any], list[Any]]:
    """Return two prepared models with weight 1, and their optimizers."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return list(prepared[:2]), list(prepared[2:])


def test_precisions_are_selected_by_name() -> None:
    assert [build_precision(name, CPU, EngineOptions()).name for name in ("no", "fp16")] == ["no", "fp16"]
    with pytest.raises(ConfigError, match="mixed_precision='fp4' is unknown; allowed: 'no', 'bf16', 'fp16', 'fp8'"):
        Accelerator(cpu=True, mixed_precision="fp4")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)])
def test_forward_runs_under_autocast_and_weights_stay_float32(name: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    model = accelerator.prepare(nn.Linear(2, 2))
    outputs = model(torch.ones(1, 2))
    assert outputs.dtype == dtype
    accelerator.backward(outputs.float().mean())
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_autocast_can_be_disabled_by_its_options() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    assert accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2)).dtype == torch.float32


def test_autocast_uses_the_options_of_its_call() -> None:
    """Also without options of the run, and where the run's options disable autocast."""
    enabled = Accelerator(cpu=True, mixed_precision="bf16")
    with enabled.autocast():
        assert torch.is_autocast_cache_enabled()
    with enabled.autocast(AutocastKwargs(cache_enabled=False)):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
    disabled = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with disabled.autocast(AutocastKwargs()):
        assert torch.is_autocast_enabled("cpu")
    with Accelerator(cpu=True).autocast(AutocastKwargs()):
        assert not torch.is_autocast_enabled("cpu")


def test_half_precision_loss_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        accelerator.backward(model(torch.ones(1, 2)).mean())
    assert "computed in torch.bfloat16" in caplog.text


def test_overflow_of_the_first_optimizer_keeps_the_second_step_correct() -> None:
    accelerator = build_fp16_accelerator()
    (one, two), (first, second) = prepare_two_models(accelerator)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (first, second)]
    schedules = list(accelerator.prepare(*schedules))
    x = torch.ones(1, 1)
    with accelerator.accumulate(one, two):
        accelerator.backward(one(x).float().mean() * float("inf") + two(x).float().mean())
        first.step()
        second.step()
        for schedule in schedules:
            schedule.step()
        first.zero_grad()
        second.zero_grad()
    assert one.weight.item() == 1.0
    assert two.weight.item() == 0.75  # exactly one step of 0.25; a scale halved between the steps would double it
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert (first.num_updates, second.num_updates, accelerator.num_updates) == (0, 1, 1)
    assert [schedule.get_last_lr() for schedule in schedules] == [[0.25], [0.125]]
    assert accelerator.optimizer_step_was_skipped
    with accelerator.accumulate(one, two):
        accelerator.backward(one(x).float().mean() + two(x).float().mean())
        assert accelerator.precision.get_gradient_scale() == 512.0  # the scale was halved once, between the windows
        first.step()
    assert one.weight.item() == 0.75


@pytest.mark.parametrize("is_clipped", [True, False])
def test_skipped_update_changes_nothing(is_clipped: bool) -> None:
    accelerator = build_fp16_accelerator(gradient_accumulation_steps=2)
    (model, _), (optimizer, _) = prepare_two_models(accelerator)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    weights, updates, skips = [], [], []
    for number in range(6):
        with accelerator.accumulate(model):
            factor = float("inf") if number == 2 else 1.0
            accelerator.backward(model(torch.ones(1, 1)).float().mean() * factor, weight=1)
            if accelerator.sync_gradients and is_clipped:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            weights.append(model.weight.item())
            updates.append(accelerator.num_updates)
            skips.append(accelerator.optimizer_step_was_skipped)
    assert weights == [0.75, 0.75, 0.625]
    assert updates == [1, 1, 2]
    assert skips == [False, True, False]
    assert schedule.last_epoch == 2


def test_scale_grows_once_for_all_optimizers() -> None:
    accelerator = build_fp16_accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=2)])
    models, optimizers = prepare_two_models(accelerator)
    scales = []
    for _ in range(5):
        with accelerator.accumulate(*models):
            accelerator.backward(sum(model(torch.ones(1, 1)).float().mean() for model in models))
            scales.append(accelerator.precision.get_gradient_scale())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0]


def test_clip_returns_the_norm_of_unscaled_gradients() -> None:
    accelerator = build_fp16_accelerator(gradient_accumulation_steps=2)
    (model, _), (optimizer, _) = prepare_two_models(accelerator)
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(3 * model(torch.ones(1, 1)).float().mean(), weight=1)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.item() == pytest.approx(1.5 * (number + 1))
            assert accelerator.clip_grad_norm_(model.parameters(), 9.0).item() == pytest.approx(
                [1.5, 1.0][number], 1e-4
            )
            optimizer.step()
    assert model.weight.item() == pytest.approx(0.75, 1e-4)


def test_gradients_unscaled_by_hand_are_unscaled_once() -> None:
    accelerator = build_fp16_accelerator()
    models, optimizers = prepare_two_models(accelerator)
    with accelerator.accumulate(*models):
        accelerator.backward(sum(model(torch.ones(1, 1)).float().mean() for model in models))
        assert models[0].weight.grad.item() == 1024.0
        accelerator.unscale_gradients()
        accelerator.unscale_gradients(optimizers)
        assert [model.weight.grad.item() for model in models] == [1.0, 1.0]
        accelerator.clip_grad_value_(models[0].parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    assert [model.weight.item() for model in models] == [0.875, 0.75]


def test_update_discarded_after_clipping_keeps_the_next_one_correct() -> None:
    """The discarded gradients were unscaled, but the next ones are still scaled."""
    accelerator = build_fp16_accelerator()
    (model, _), (optimizer, _) = prepare_two_models(accelerator)
    for number in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).float().mean() * (float("inf") if number == 1 else 1))
            norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
            if number == 0 or not norm.isfinite():
                optimizer.zero_grad()
                continue
            assert norm.item() == 1.0
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == 0.75
    assert accelerator.precision.get_gradient_scale() == 512.0  # the discarded overflow still halved the scale


def test_two_windows_before_two_steps() -> None:
    """The scale must not change while a clipped optimizer still waits for its step."""
    accelerator = build_fp16_accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=1)])
    models, optimizers = prepare_two_models(accelerator)
    for _ in range(2):
        for model in models:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).float().mean())
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [model.weight.item() for model in models] == [0.5, 0.5]


def test_update_discarded_while_another_optimizer_waits() -> None:
    accelerator = build_fp16_accelerator()
    (one, two), (first, second) = prepare_two_models(accelerator)
    for number, model in enumerate((two, one, one)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).float().mean())
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            if number == 1:
                first.zero_grad()
    first.step()
    second.step()
    assert [one.weight.item(), two.weight.item()] == [0.75, 0.75]


@pytest.mark.parametrize("weights", [[1.0] * 4, [4096.0, 4095.0, 4097.0, 4000.0], [0.0, 0.0, 5e4, 6e4]])
def test_weights_cause_no_overflow(weights: list[float]) -> None:
    """Gradients in float16 keep the size of a mean for any weights, even if the first micro-batch has weight 0."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=4,
                              kwargs_handlers=[GradScalerKwargs(init_scale=8192.0)])  # fmt: skip
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.item()
    for weight in weights:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).float().mean(), weight=weight)
            optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert before - model.weight.item() == pytest.approx(1.0, rel=1e-3)


def test_closure_is_refused_under_fp16() -> None:
    accelerator = build_fp16_accelerator()
    (model, _), (optimizer, _) = prepare_two_models(accelerator)
    accelerator.backward(model(torch.ones(1, 1)).float().mean())
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: None)


def test_scaler_state_is_saved_and_loaded() -> None:
    accelerator = build_fp16_accelerator()
    (model, _), (optimizer, _) = prepare_two_models(accelerator)
    accelerator.backward(model(torch.ones(1, 1)).float().mean() * float("inf"))
    optimizer.step()
    state = accelerator.precision.state_dict()
    assert state["scale"] == 512.0
    other = build_precision("fp16", CPU, EngineOptions())
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict()["scale"] == 512.0


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_mixed_training_follows_float32(precision: str, tolerance: float) -> None:
    curves = []
    for name in ("no", precision):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, mixed_precision=name, gradient_accumulation_steps=2,
                                  kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])  # fmt: skip
        x = torch.randn(33, 4)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for _ in range(6):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs).float() - targets).square().mean()
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        curves.append(torch.tensor(losses))
    torch.testing.assert_close(curves[1], curves[0], rtol=tolerance, atol=tolerance)
    assert curves[0][-1] < curves[0][0] / 2


@pytest.mark.parametrize(("major", "is_told"), [(7, True), (8, False)])
def test_emulated_bfloat16_causes_a_warning(major: int, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Use a stub of torch's module for a GPU such as V100 or T4, because no such device is available."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or major >= 8

    module = SimpleNamespace(is_bf16_supported=is_bf16_supported, get_device_name=lambda: "Tesla T4")
    hardware = SimpleNamespace(
        kind="cuda", module=module, supports_bf16=is_bf16_supported, supports_autocast=lambda _: True
    )
    with caplog.at_level(logging.WARNING, logger="headway"):
        assert build_precision("bf16", hardware, EngineOptions()).name == "bf16"  # type: ignore[arg-type]
    assert ("Tesla T4 only emulates bfloat16" in caplog.text) is is_told
    assert ("Use mixed_precision='fp16'" in caplog.text) is is_told


class _PreNorm(torch.nn.Module):
    """Embedding, two pre-norm residual blocks, and a head, which record the dtype of the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.seen: list[torch.dtype] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for norm, block in zip(self.norms, self.blocks):
            self.seen.append(x.dtype)
            x = x + block(norm(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("precision", "half", "dtype"),
    [("bf16", True, torch.bfloat16), ("bf16", False, torch.float32), ("no", True, torch.float32)],
)
def test_residual_stream_stays_in_half_precision_on_request(precision, half, dtype):
    options = AutocastKwargs(half_residual=half)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[options])
    torch.manual_seed(0)
    model = accelerator.prepare(_PreNorm())
    ids = torch.arange(12).view(3, 4)
    found = model(ids).float()
    assert model.seen == [dtype, dtype]
    plain = _PreNorm()
    plain.load_state_dict(model.state_dict())
    assert (found - plain(ids)).abs().max() < 0.05
    accelerator.backward(found.square().mean())
    assert model.tokens.weight.grad.dtype == torch.float32


def test_model_without_embeddings_causes_a_warning_for_half_residual(caplog):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(half_residual=True)])
    accelerator.prepare(torch.nn.Linear(2, 2))
    assert "half_residual=True has no effect on Linear, which has no embeddings" in caplog.text
