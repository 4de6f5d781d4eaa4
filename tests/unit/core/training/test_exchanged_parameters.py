"""Test a strategy that replaces the model's parameters: optimizers, clipping and precision use the new ones."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.config import mesh
from headway.core.config.engines import EngineOptions
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Capabilities, Engine, SingleStrategy, Transform
from headway.errors import PrepareError, UnsupportedError
from tests.distributed.mirror import write_package


class Halves(SingleStrategy):
    """Strategy that keeps only the first half of each parameter's rows, as a new parameter."""

    name = "halves"
    capabilities = Capabilities(whole_gradients=False, copies=False)

    def __init__(self, collectives: Collectives, text: str, options: EngineOptions) -> None:
        super().__init__(collectives)
        self.exchanged: dict[int, nn.Parameter] = {}
        self.calls: list[str] = []  # in the order in which Headway calls this strategy
        self.num_norms = 0

    def materialize_model(self, model: nn.Module) -> None:
        self.calls.append("materialize")
        model.to_empty(device="cpu")

    def move_model(self, model: nn.Module, device: torch.device) -> None:
        self.calls.append("place")

    def setup_model(self, model: nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        self.calls.append("setup")
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                half = nn.Parameter(parameter.detach()[: len(parameter) // 2].clone())
                self.exchanged[id(parameter)] = half
                self.kept = [*getattr(self, "kept", []), parameter]
                setattr(module, name, half)
        return super().setup_model(model, transforms)

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.exchanged.get(id(parameter), parameter)

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape == parameter.shape else tensor[: len(parameter)].clone()

    def compute_total_norm(self, parameters: Any, norm_type: float) -> torch.Tensor:
        self.num_norms += 1
        return super().compute_total_norm(parameters, norm_type)

    @contextmanager
    def _record_forward(self) -> Any:
        self.calls.append("forward")
        yield

    def forward_context(self, precision: Precision) -> Callable[[], AbstractContextManager[Any]] | None:
        return self._record_forward

    def free_gathered(self, model: nn.Module) -> None:
        self.calls.append("free gathered")


@pytest.fixture
def accelerator(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Accelerator with the strategy "halves", which an installed package registers."""
    write_package(tmp_path, "halves", {mesh.ENTRY_POINT_GROUP: {"halves": f"{__name__}:Halves"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    return Accelerator(cpu=True, strategy="halves", on_non_finite="skip")


def get_weight(model: nn.Module) -> nn.Parameter:
    return model.weight  # type: ignore[return-value]


def test_strategy_is_called_in_order_and_averaged_models_are_refused(accelerator: Accelerator) -> None:
    strategy: Any = accelerator.strategy
    with torch.device("meta"):
        model = nn.Linear(2, 4, bias=False)
    model = accelerator.prepare(model)
    assert strategy.calls == ["materialize", "place", "setup"]
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert strategy.calls[3:] == ["forward"]
    assert [name for name, _ in accelerator._preparation._prepared.iterate_named("named_parameters")] == ["weight"]
    assert strategy.calls[4:] == ["free gathered"]
    with pytest.raises(UnsupportedError, match="under the halves strategy each process holds a part of it"):
        torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_optimizer_gets_the_new_parameters_in_its_lists_and_state(
    accelerator: Accelerator, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 4, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    before = get_weight(model)
    before.grad = torch.ones_like(before)
    optimizer.step(*([lambda: 1.0] if kind is torch.optim.LBFGS else []))
    held = getattr(optimizer, "_params", None)
    with caplog.at_level(logging.INFO, "headway"):
        model, _ = accelerator.prepare(model, optimizer)
        accelerator.prepare(optimizer)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [get_weight(model)]
    assert get_weight(model) is not before
    if held is not None:
        assert held is optimizer.param_groups[0]["params"]
    else:
        state = optimizer.state[get_weight(model)]
        assert state["exp_avg"].shape == (2, 2)
        assert state["step"].ndim == 0
        assert list(optimizer.state) == [get_weight(model)]
    messages = [line for line in caplog.messages if "were replaced" in line]
    assert len(messages) == 1
    assert messages[0].startswith(f"{kind.__name__} was created before prepare(): 1 of its parameters")


def test_group_added_later_gets_the_new_parameters(accelerator: Accelerator) -> None:
    model, other = nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False)
    late = get_weight(other)
    model, other, prepared = accelerator.prepare(model, other, torch.optim.AdamW(model.parameters(), lr=0.1))
    prepared.add_param_group({"params": [late]})
    assert prepared.param_groups[1]["params"] == [get_weight(other)]


@pytest.mark.parametrize(
    ("factor", "is_clipped", "is_skipped"),
    [(1.0, True, False), (1.0, False, False), (float("inf"), True, True), (float("inf"), False, True), (1e30, True, False)],
    ids=["clipped", "not clipped", "infinite", "infinite, not clipped", "only the norm overflows"],
)  # fmt: skip
def test_list_from_before_prepare_is_clipped_with_one_norm(
    accelerator: Accelerator, factor: float, is_clipped: bool, is_skipped: bool
) -> None:
    strategy: Any = accelerator.strategy
    model = nn.Linear(2, 4, bias=False)
    given = list(model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), weight=1)
        gradient = get_weight(model).grad
        assert gradient is not None
        gradient.mul_(factor)
        if is_clipped:
            norm = accelerator.clip_grad_norm_(given, 0.5)
            assert norm == (2.0 if factor == 1.0 else float("inf"))
            if factor == 1.0:
                torch.testing.assert_close(gradient.norm(), torch.tensor(0.5))
        optimizer.step()
    assert strategy.num_norms == is_clipped  # the guard checks the parts without a norm
    assert optimizer.step_was_skipped == is_skipped


def test_gradients_changed_after_clipping_are_checked_again(accelerator: Accelerator) -> None:
    strategy: Any = accelerator.strategy
    model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(nn.Linear(2, 4)))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum(), weight=1)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        get_weight(model).grad.mul_(float("nan"))  # type: ignore[union-attr]
        strategy.num_norms = 0
        optimizer.step()
    assert strategy.num_norms == 0
    assert optimizer.step_was_skipped


def test_values_are_clipped_in_the_new_parameters(accelerator: Accelerator) -> None:
    model = nn.Linear(2, 4, bias=False)
    given = list(model.parameters())
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum() * 3, weight=1)
        accelerator.clip_grad_value_(given, 0.25)
    assert get_weight(model).grad.abs().max() == 0.25  # type: ignore[union-attr]


def test_optimizer_of_another_model_is_refused(accelerator: Accelerator) -> None:
    model = nn.Linear(2, 4)
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(PrepareError, match="2 parameters that belong to no prepared model"):
        accelerator.prepare(model, stranger)
