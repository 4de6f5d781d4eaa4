"""`ParameterNorms`: which updates are measured, what is logged, and errors. `tests/distributed` compares values under each layout."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ParameterNorms, ProjectConfiguration
from headway.core.tracking.runlog_reader import read_run
from headway.errors import ConfigError


def build(**options: Any) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = prepare(accelerator)
    return accelerator, model, optimizer


def prepare(accelerator: Accelerator) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))  # type: ignore[no-any-return]


def update(accelerator: Accelerator, model: Any, optimizer: Any, scale: float = 1.0) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 3)).square().mean() * scale)
        optimizer.step()
        optimizer.zero_grad()


def test_values_are_logged_with_the_number_of_the_update(tmp_path: Any) -> None:
    accelerator, model, optimizer = build(project_config=ProjectConfiguration(str(tmp_path)))
    accelerator.init_trackers("run")
    norms = ParameterNorms(accelerator, model, every=2)
    for _ in range(5):
        update(accelerator, model, optimizer)
    accelerator.end_trackers()
    values = read_run(tmp_path / "run").values
    assert sorted(values) == [
        f"{kind}/{part}" for kind in ("grad_norm", "update_ratio", "weight_norm") for part in "01"
    ]
    assert [step for step, *_ in values["grad_norm/0"]] == [2, 4]
    assert values["update_ratio/1"][-1][2] == pytest.approx(norms.latest["1"].update_ratio)
    # SGD without momentum: the change is the gradient times the learning rate.
    assert norms.latest["0"].update_norm == pytest.approx(0.5 * norms.latest["0"].grad_norm, rel=1e-5)


def test_the_gradient_of_a_whole_window_is_measured() -> None:
    accelerator, model, optimizer = build(gradient_accumulation_steps=2)
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    update(accelerator, model, optimizer, 1.0)
    assert norms.latest == {}
    update(accelerator, model, optimizer, 3.0)
    torch.manual_seed(0)
    by_hand = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    (by_hand(torch.ones(2, 3)).square().mean() * 2.0).backward()
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in by_hand[0].parameters()))  # type: ignore[union-attr]
    assert norms.latest["0"].grad_norm == pytest.approx(expected, rel=1e-5)


def test_batches_in_pieces_have_the_norms_of_whole_batches() -> None:
    found = []
    for options in ({}, {"microbatching": "auto"}):
        accelerator, model, optimizer = build(**options)
        norms = ParameterNorms(accelerator, model, every=1, log=False)
        for piece in accelerator.microbatches(torch.arange(12.0).reshape(4, 3)):
            with accelerator.accumulate(model):
                accelerator.backward(model(piece).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        found.append(norms.latest["0"])
        accelerator.free_memory()
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"microbatching": "auto"}])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_further_losses_of_the_last_micro_batch_are_measured(options: dict[str, Any], num_steps: int) -> None:
    accelerator, model, optimizer = build(gradient_accumulation_steps=num_steps, **options)
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    for _ in range(num_steps):
        for piece in accelerator.microbatches(torch.ones(2, 3)):
            with accelerator.accumulate(model):
                accelerator.backward(model(piece).square().mean())
                accelerator.backward(model(piece).square().mean() * 20.0)
                accelerator.backward(model(piece).mean() * 3.0)
                optimizer.step()
                optimizer.zero_grad()
    torch.manual_seed(0)
    by_hand = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    result = by_hand(torch.ones(2, 3))
    (result.square().mean() * 21.0 + result.mean() * 3.0).backward()
    for name, layer in by_hand.named_children():
        expected = math.sqrt(sum(float(p.grad.square().sum()) for p in layer.parameters()))  # type: ignore[union-attr]
        assert norms.latest[name].grad_norm == pytest.approx(expected, rel=1e-5)
        assert norms.latest[name].update_norm == pytest.approx(0.5 * expected, rel=1e-5)


def test_a_loss_after_the_step_of_one_optimizer_is_measured_for_the_others() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = nn.ModuleDict({"first": nn.Linear(3, 1, bias=False), "second": nn.Linear(3, 1, bias=False)})
    optimizers: Any = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in net.values()]
    model, *optimizers = accelerator.prepare(net, *optimizers)
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    with accelerator.accumulate(model):
        # The gradient of each weight is 1 times the factor of its loss.
        accelerator.backward(sum(layer(torch.ones(1, 3)).sum() for layer in model.values()))
        optimizers[0].step()
        optimizers[0].zero_grad()
        accelerator.backward(model["second"](torch.ones(1, 3)).sum() * 4.0)
        optimizers[1].step()
    assert norms.latest["first"].grad_norm == pytest.approx(math.sqrt(3))
    assert norms.latest["first"].update_norm == pytest.approx(0.5 * math.sqrt(3))
    assert norms.latest["second"].grad_norm == pytest.approx(5.0 * math.sqrt(3))
    assert norms.latest["second"].update_norm == pytest.approx(2.5 * math.sqrt(3))


def test_skipped_updates_are_not_measured() -> None:
    accelerator, model, optimizer = build(on_non_finite="skip")
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    update(accelerator, model, optimizer, math.nan)
    assert norms.latest == {}
    update(accelerator, model, optimizer)
    assert math.isfinite(norms.latest["0"].grad_norm)


def test_fp16_gradients_are_measured_without_the_loss_scale() -> None:
    accelerator, model, optimizer = build(mixed_precision="fp16")
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    for _ in range(20):  # the first ones overflow, and the scaler skips them
        update(accelerator, model, optimizer)
        if norms.latest:
            break
    assert norms.latest["1"].update_norm == pytest.approx(0.5 * norms.latest["1"].grad_norm, rel=1e-3)


def test_parts_with_frozen_parameters_and_zero_weights() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.ModuleDict({"frozen": nn.Linear(3, 3), "zero": nn.Linear(3, 1, bias=False)})
    net["frozen"].requires_grad_(False)
    nn.init.zeros_(net["zero"].weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net["zero"].parameters(), lr=1.0))
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    with accelerator.accumulate(model):
        accelerator.backward(model["zero"](torch.ones(2, 3)).mean())
        optimizer.step()
    assert list(norms.latest) == ["zero"]
    assert norms.latest["zero"].update_norm == pytest.approx(math.sqrt(3))
    assert norms.latest["zero"].update_ratio is None


def test_two_models_are_measured_separately() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = prepare(accelerator), prepare(accelerator)
    norms = [
        ParameterNorms(accelerator, model, every=2, log=is_logged)
        for (model, _), is_logged in zip((first, second), (True, False))
    ]
    with pytest.raises(
        ConfigError, match="a Sequential and of a Sequential would be logged under the same names; pass log=False"
    ):
        ParameterNorms(accelerator, second[0])
    ParameterNorms(accelerator, first[0], per="parameter")
    update(accelerator, *first)
    update(accelerator, *second)
    update(accelerator, *second)
    assert norms[0].latest == {}
    assert norms[1].latest["0"].update_norm == pytest.approx(0.5 * norms[1].latest["0"].grad_norm, rel=1e-5)
    update(accelerator, *first)
    assert norms[0].latest["0"].update_norm == pytest.approx(0.5 * norms[0].latest["0"].grad_norm, rel=1e-5)


def test_an_optimizer_that_does_not_step_ends_the_measurement_at_the_next_batch() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizers: Any = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in net]
    model, *optimizers = accelerator.prepare(net, *optimizers)
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 3)).square().mean())
            optimizers[0].step()
    assert norms.latest["0"].update_norm > 0
    assert norms.latest["1"].update_norm == 0


def test_an_optimizer_that_is_not_prepared_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    for _ in range(2):
        update(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert norms.latest == {}
    assert caplog.text.count("no prepared optimizer trains the Linear") == 1


def test_a_model_that_was_compiled_after_prepare_is_measured() -> None:
    accelerator, model, optimizer = build()
    compiled: Any = torch.compile(model, backend="eager")
    norms = ParameterNorms(accelerator, compiled, every=1, log=False)
    update(accelerator, compiled, optimizer)
    assert list(norms.latest) == ["0", "1"]


def test_memory_of_the_model_is_released() -> None:
    import weakref

    accelerator, model, optimizer = build()
    norms = ParameterNorms(accelerator, model, every=1, log=False)
    update(accelerator, model, optimizer)
    weight = weakref.ref(model[0].weight)
    del model, optimizer
    accelerator.free_memory()
    assert weight() is None
    assert norms.latest


def test_wrong_arguments() -> None:
    accelerator, model, _ = build()
    with pytest.raises(ConfigError, match="every=0; give a number of updates"):
        ParameterNorms(accelerator, model, every=0)
    with pytest.raises(ConfigError, match="per='layer'; allowed: 'block', 'module', 'parameter'"):
        ParameterNorms(accelerator, model, per="layer")
    with pytest.raises(ConfigError, match="a Linear that this Accelerator has not prepared"):
        ParameterNorms(accelerator, nn.Linear(2, 2))
