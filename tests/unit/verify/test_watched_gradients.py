"""The script's lines that change, discard or cut off gradients are recorded, and calls that do nothing wrong are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.verify.calls import CallTrace, TensorPlaces
from headway.verify.discards import DiscardWatch
from headway.verify.draws import SharedDraws
from tests.unit.verify.test_blame import find_code


class Places(TensorPlaces):
    """Places of the tensors of one model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def list_modules(self) -> dict[int, str]:
        return {id(each): name for name, each in self.model.named_modules()}

    def list_gradients(self) -> dict[int, str]:
        named = self.model.named_parameters()
        return {p.grad.untyped_storage().data_ptr(): name for name, p in named if p.grad is not None}


def make_trace(folder: Path, model: nn.Module) -> CallTrace:
    """A trace that knows the parameters of a model, as that of a run does."""

    def list_names() -> tuple[dict[int, str], dict[int, str]]:
        named = dict(model.named_parameters())
        return (
            {id(p): name for name, p in named.items()},
            {p.untyped_storage().data_ptr(): name for name, p in named.items()},
        )

    return CallTrace(folder / "trace.jsonl", list_names, Places(model))


def scale_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def scale_by_assignment(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5  # type: ignore[operator]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def measure_norm(model: nn.Module) -> None:
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("change", "code"),
    [(scale_in_place, "grad.mul_"), (scale_by_assignment, "grad * 0.5"), (clip, "clip_grad_norm_"), (measure_norm, "")],
)
def test_a_line_that_changes_gradients_is_recorded(tmp_path: Path, change: Any, code: str) -> None:
    model = nn.Linear(3, 2)
    trace = make_trace(tmp_path, model)
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin(4)
        loss = model(torch.ones(4, 3)).mean()
        trace.close(loss, None, "mean")
        loss.backward()
        trace.resume()
        change(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad(set_to_none=False)
    lines = trace.take_written()["gradient_lines"]
    assert list(lines.values()) == ([[1]] if code else [])
    assert all(code in find_code(line, __file__) for line in lines)


def test_a_parameter_that_a_layout_replaces_in_forward_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    trace = make_trace(tmp_path, model)
    trace.learn_names()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # as FSDP does while the forward runs
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin(4)
        trace.close(model(torch.ones(4, 3)).mean(), None, "mean")
    assert '"own": "0.weight"' in (tmp_path / "trace.jsonl").read_text()


def make_watched() -> tuple[DiscardWatch, Any, nn.Module]:
    """A watch, the optimizer that it watches, and the model of the optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = SimpleNamespace(zero_grad=optimizer.zero_grad, param_groups=optimizer.param_groups)
    watch = DiscardWatch()
    watch.watch([prepared])
    return watch, prepared, model


@pytest.mark.parametrize(
    ("batches", "loss", "steps", "is_found"),
    [
        ((1, 2), 1.0, False, True),
        ((1, 1), 1.0, False, False),  # a second gradient of the same batch
        ((1, 2), float("nan"), False, False),  # a batch that is left out on purpose
        ((1, 2), 1.0, True, False),
    ],
)
def test_gradients_that_no_step_uses_are_found(
    batches: tuple[int, int], loss: float, steps: bool, is_found: bool
) -> None:
    watch, optimizer, model = make_watched()
    model(torch.ones(4, 3)).mean().backward()
    assert watch.note_backward(batches[0], loss) == []
    if steps:
        watch.forget()
    optimizer.zero_grad()
    found = watch.note_backward(batches[1], 1.0)
    assert bool(found) == is_found
    assert all("optimizer.zero_grad()" in find_code(line, __file__) for line in found)


def test_several_optimizers_are_not_watched() -> None:
    _, one, model = make_watched()
    watch = DiscardWatch()
    watch.watch([one, one])
    model(torch.ones(4, 3)).mean().backward()
    watch.note_backward(1, 1.0)
    one.zero_grad()
    assert watch.note_backward(2, 1.0) == []
