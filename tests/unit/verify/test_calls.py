"""Test that lines of the script that change gradients are recorded, and harmless calls are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.verify.calls import CallTrace, ModelNames
from headway.verify.draws import SharedDraws
from headway.verify.record_types import LossEntry, UpdateRecord
from tests.unit.verify.test_blame import find_code


class Names(ModelNames):
    """Names of the parameters of one model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def map_tensors(self) -> tuple[dict[int, str], dict[int, str]]:
        named = dict(self.model.named_parameters())
        return (
            {id(p): name for name, p in named.items()},
            {p.untyped_storage().data_ptr(): name for name, p in named.items()},
        )

    def map_modules(self) -> dict[int, str]:
        return {id(each): name for name, each in self.model.named_modules()}

    def map_gradients(self) -> dict[int, str]:
        named = self.model.named_parameters()
        return {p.grad.untyped_storage().data_ptr(): name for name, p in named if p.grad is not None}


def make_trace(folder: Path, model: nn.Module) -> CallTrace:
    """Return a trace that knows the parameters of a model, like that of a run."""
    return CallTrace(folder / "trace.jsonl", Names(model))


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
def test_line_that_changes_gradients_is_recorded(tmp_path: Path, change: Any, code: str) -> None:
    model = nn.Linear(3, 2)
    trace = make_trace(tmp_path, model)
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin_batch(4)
        loss = model(torch.ones(4, 3)).mean()
        trace.write_loss(loss, None, "mean")
        loss.backward()
        trace.resume_recording()
        change(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad(set_to_none=False)
    update = UpdateRecord()
    trace.move_lines(update)
    lines = update.gradient_lines
    assert trace.gradient_lines == {}
    assert list(lines.values()) == ([[1]] if code else [])
    assert all(code in find_code(line, __file__) for line in lines)


def test_parameter_replaced_in_forward_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    trace = make_trace(tmp_path, model)
    trace.update_names()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # like FSDP during forward
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin_batch(4)
        trace.write_loss(model(torch.ones(4, 3)).mean(), None, "mean")
    assert '"model_tensor": "0.weight"' in (tmp_path / "trace.jsonl").read_text()


def test_complex_scalar_and_conjugate_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    trace = make_trace(tmp_path, model)
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin_batch(4)
        trace.write_loss(torch.fft.fft(model(torch.ones(4, 3))).conj().mean().abs(), None, "mean")
    (line,) = (tmp_path / "trace.jsonl").read_text().splitlines()
    (mean,) = [call for call in LossEntry.from_dict(json.loads(line)).calls if call.func == "mean"]
    assert mean.shape == []
    assert len(mean.row_sums) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_recorded_with_its_number_of_items(tmp_path: Path, layout: torch.layout) -> None:
    model = nn.Linear(3, 2)
    trace = make_trace(tmp_path, model)
    with SharedDraws(False, False, lambda: None, trace):
        trace.begin_batch(2)
        rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
        trace.write_loss(torch.cat(model(rows).unbind()).mean(), None, "mean")
    (line,) = (tmp_path / "trace.jsonl").read_text().splitlines()
    (linear,) = [call for call in LossEntry.from_dict(json.loads(line)).calls if call.func == "linear"]
    assert linear.shape == [2]
    assert linear.row_sums == []


@pytest.mark.parametrize("distance", [1, 500, 1000])
def test_sums_change_if_two_values_are_exchanged(tmp_path: Path, distance: int) -> None:
    values = torch.rand(2000)
    exchanged = values.clone()
    exchanged[10], exchanged[10 + distance] = values[10 + distance], values[10]
    sums = []
    for number, inputs in enumerate((values, exchanged)):
        folder = tmp_path / str(number)
        folder.mkdir()
        trace = make_trace(folder, nn.Linear(1, 1))
        with SharedDraws(False, False, lambda: None, trace):
            trace.begin_batch(1)
            trace.write_loss((inputs[None] * 2.0).mean(), None, "mean")
        entry = LossEntry.from_dict(json.loads((folder / "trace.jsonl").read_text()))
        sums.append(next(call.row_sums[0] for call in entry.calls if call.func == "mul"))
    assert sums[0][:2] == pytest.approx(sums[1][:2])
    assert abs(sums[0][2] - sums[1][2]) > 1e-4
