"""Outputs of sharded models and blocks that are changed in place, compared with a hand-written loop.

An in-place operation on a view gives it a new node in the graph, without the hooks that FSDP has put on the old one. FSDP
would then neither gather the unit's parameters for backward nor reduce their gradients.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from tests.devices import ON_CPU
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

ROWS, UPDATES = 8, 3


class Holder:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "whole": (lambda x: x, lambda output: output),
    "transposed": (lambda x: x.transpose(0, 1), lambda output: output),
    "slice": (lambda x: x[:, :2], lambda output: output),
    "dict": (lambda x: {"logits": x[:, :2]}, lambda output: output["logits"]),
    "object": (lambda x: Holder(x[:, :2]), lambda output: output.values),
}
"""Functions that turn the values that a model has computed into its output, and that read them again."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The second output is a view of the input, which FSDP's hooks must not gather the block for.
        return self.down(self.up(x).tanh()).unflatten(1, (2, 2)).transpose(1, 2), x.view(x.shape)


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(4, 3)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            update, x = block(x)
            update *= 0.5
            update += 0.1
            x = x + update.flatten(1)
        return FORMS[self.form][0](self.last(x))


def compute_loss(model: nn.Module, form: str, rows: torch.Tensor, penalty: bool) -> torch.Tensor:
    if penalty:
        rows = rows.clone().requires_grad_()
    logits = FORMS[form][1](model(rows))
    logits /= 0.7  # a temperature
    logits[..., 0] = 0.3
    loss = logits.square().mean()
    if penalty:
        (slope,) = torch.autograd.grad(logits.sum(), rows, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return loss


def make_model(form: str) -> Model:
    torch.manual_seed(0)
    return Model(form).double()


def make_rows() -> torch.Tensor:
    return torch.randn(UPDATES, ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES = [(form, False) for form in FORMS] + [("slice", True)]
"""Pairs of (form of the output, whether the loss contains a gradient penalty)."""


def train_by_hand(form: str, penalty: bool, num_parts: int) -> dict[str, torch.Tensor]:
    """Train on all rows. Each part of the rows has its own call of the model, as on the ranks."""
    model = make_model(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows in make_rows():
        losses = [compute_loss(model, form, part, penalty) for part in rows.chunk(num_parts)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return gather_weights(model)


NUM_RANKS = {"ddp": 2, "fsdp": 2, "tp": 2, "hsdp=2": 4, "fsdp+tp=2": 4}
"""Number of ranks on which each layout is tested."""


def get_ranks_per_part(layout: str) -> int:
    """Return the number of ranks that train on the same rows, because they split matrices."""
    return 2 if "tp" in layout else 1


def train_on_ranks(layout: str) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Train a model of each case on this rank's part of the rows. Return the whole weights and the warnings."""
    results = []
    for form, penalty in CASES:
        if penalty and "tp" in layout:
            continue  # Headway raises an error for gradient penalties under tensor parallelism.
        with warnings.catch_warnings(record=True) as caught:
            plan = TensorParallelOptions(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
            accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=[plan] if "tp" in layout else [])
            model = make_model(form)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for rows in make_rows():
                with accelerator.accumulate(model):
                    parts = rows.chunk(NUM_RANKS[layout] // get_ranks_per_part(layout))
                    own = parts[accelerator.process_index // get_ranks_per_part(layout)].to(accelerator.device)
                    accelerator.backward(compute_loss(model, form, own, penalty))
                    optimizer.step()
                    optimizer.zero_grad()
        results.append((gather_weights(model), [str(each.message) for each in caught]))
    return results


@pytest.mark.parametrize("layout", NUM_RANKS)
def test_outputs_changed_in_place_get_the_gradients_of_the_hand_written_loop(layout: str) -> None:
    num_parts = NUM_RANKS[layout] // get_ranks_per_part(layout)
    expected = [train_by_hand(form, penalty, num_parts) for form, penalty in CASES]
    for results in run_ranks(train_on_ranks, NUM_RANKS[layout], layout):
        for case, (weights, messages), by_hand in zip(CASES, results, expected, strict="tp" not in layout):
            assert not [each for each in messages if "view tensor" in each], case
            for name, value in by_hand.items():
                torch.testing.assert_close(
                    weights[name].cpu(), value, rtol=1e-9, atol=1e-11,
                    msg=lambda text, case=case, name=name: f"{case}, {name}: {text}",
                )  # fmt: skip


def train_in_half_precision(layout: str, number_format: str) -> list[list[dict[str, torch.Tensor]]]:
    """For each form, train with changes in place and with copies. Return both whole weights, and the initial ones."""
    results = []
    for form in FORMS:
        weights = [gather_weights(make_model(form).float())]
        for in_place in (True, False):
            accelerator = Accelerator(cpu=ON_CPU, strategy=layout, mixed_precision=number_format)
            model = make_model(form).float()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for rows in make_rows().float():
                own = rows.chunk(NUM_RANKS[layout])[accelerator.process_index].to(accelerator.device)
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        logits = FORMS[form][1](model(own))
                        if in_place:
                            logits /= 0.5
                        else:
                            logits = logits / 0.5
                        loss = logits.square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            weights.append(gather_weights(model))
            accelerator.free_memory()
        results.append(weights)
    return results


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp=2"])
def test_half_precision_outputs_changed_in_place_get_the_gradients_of_copies(layout: str) -> None:
    for results in run_ranks(train_in_half_precision, NUM_RANKS[layout], layout, "bf16"):
        for form, (initial, in_place, copied) in zip(FORMS, results, strict=True):
            for name, value in copied.items():
                assert not torch.equal(value, initial[name]), (form, name)
                assert torch.equal(in_place[name], value), (form, name)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def train_a_block_that_changes_its_input() -> str:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = nn.Sequential(nn.Linear(4, 4), ChangesItsInput(), ChangesItsInput())
    model = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    with pytest.raises(RuntimeError, match="modified inplace") as raised:
        model(torch.ones(2, 4, device=accelerator.device))
    return explain_error(raised.value)


def test_a_sharded_block_that_changes_its_input_in_place_gets_advice() -> None:
    for text in run_ranks(train_a_block_that_changes_its_input, 2):
        assert "Write x = x + y" in text
        assert "pass inplace=False" in text
