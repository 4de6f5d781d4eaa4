"""Test that extrapolated traces of repeated blocks equal traces of all blocks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.memory_events import MemoryEvent
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.repeated_blocks import MIN_REPETITIONS, find_blocks
from headway.forecasting.tracing.repeats import RepeatProof
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.trace_step import trace_step

CALLS: list[int] = []


class Block(nn.Module):
    def __init__(self, width: int, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        CALLS.append(self.index)
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Chain(nn.Module):
    """Blocks in a list, or each as an attribute, where no repetition is found."""

    def __init__(self, widths: list[int], is_list: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        blocks = [Block(width, index) for index, width in enumerate(widths)]
        self.is_list, self.num_blocks = is_list, len(widths)
        if is_list:
            self.blocks = nn.ModuleList(blocks)
        else:
            for index, block in enumerate(blocks):
                setattr(self, f"block{index}", block)
        self.last = nn.Linear(16, 1)

    def all(self) -> Iterator[nn.Module]:
        return iter(self.blocks) if self.is_list else (getattr(self, f"block{i}") for i in range(self.num_blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.all():
            hidden = block(hidden)
        return self.last(hidden).mean()


class IndexingChain(Chain):
    """Chain that accesses a block by its number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for index, block in enumerate(self.all()):
            hidden = block(hidden) + (0 if index != 12 else hidden)
        if self.is_list:
            assert len(self.blocks[12].norm.weight) == 16
        return self.last(hidden).mean()


def trace_model(
    make: Callable[[], nn.Module], prepare: Callable[[nn.Module], object] | None = None, **recipe: Any
) -> Trace:
    CALLS.clear()
    options = {"optimizer": partial(torch.optim.AdamW, foreach=True), **recipe}
    return trace_step(
        make, lambda: torch.zeros(4, 8), StepRecipe(**options), find_device("h100"), prepare, counts_work=True
    )


def list_events(found: Trace) -> list[MemoryEvent]:
    return [event._replace(source_line="") for event in found.events]


def trace_both(kind: type[Chain], widths: list[int], prepare: Any = None, **recipe: Any) -> tuple[Trace, Trace, int]:
    """Trace the blocks in a list and as attributes. Also return the number of block calls in the first trace."""
    found = trace_model(lambda: kind(widths), prepare, **recipe)
    num_calls = len(CALLS)
    return found, trace_model(lambda: kind(widths, is_list=False), prepare, **recipe), num_calls


@pytest.mark.parametrize(
    ("widths", "per_step"),
    [
        ([32] * MIN_REPETITIONS, 12),
        pytest.param([64, 64, *[32] * 18], 18, marks=pytest.mark.slow),
        pytest.param([32, 48] * MIN_REPETITIONS, 24, marks=pytest.mark.slow),
        pytest.param([24, *[32, 32, 48] * MIN_REPETITIONS, 32], 42, marks=pytest.mark.slow),
    ],
    ids=["alike", "first ones differ", "in turn", "with a head and a tail"],
)
def test_events_equal_those_of_tracing_all_blocks(widths: list[int], per_step: int) -> None:
    found, full, num_calls = trace_both(Chain, widths)

    assert list_events(found) == list_events(full)
    assert found.phases == full.phases
    assert found.operations == full.operations
    assert found.work.keys() == full.work.keys()
    for phase, work in full.work.items():
        assert found.work[phase].flops == work.flops
        assert found.work[phase].num_bytes == work.num_bytes
        assert found.work[phase].seconds == pytest.approx(work.seconds)
    assert num_calls == 2 * per_step < 2 * 3 * len(widths)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"accumulation": 3, "max_norm": 1.0}, marks=pytest.mark.slow),
        pytest.param({"loop": "zero_grad_before_backward", "precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"loop": "loss_function", "keeps_gradients": True}, marks=pytest.mark.slow),
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)},
    ],
    ids=str,
)
def test_every_recipe_is_extrapolated(recipe: dict[str, Any]) -> None:
    found, full, num_calls = trace_both(Chain, [32] * MIN_REPETITIONS, **recipe)

    assert list_events(found) == list_events(full)
    assert num_calls == 2 * 12 * recipe.get("accumulation", 1)


@pytest.mark.slow
def test_changes_made_by_prepare_to_some_blocks_count() -> None:
    def recompute_first_half(model: nn.Module) -> None:
        assert isinstance(model, Chain)
        for block in list(model.all())[: MIN_REPETITIONS // 2]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    found, full, _ = trace_both(Chain, [32] * MIN_REPETITIONS, recompute_first_half)

    assert list_events(found) == list_events(full)
    assert list_events(found) != list_events(trace_model(lambda: Chain([32] * MIN_REPETITIONS)))


@pytest.mark.slow
def test_model_that_cannot_be_shortened_is_traced_whole() -> None:
    found, full, _ = trace_both(IndexingChain, [32] * MIN_REPETITIONS)

    assert list_events(found) == list_events(full)
    assert [*range(MIN_REPETITIONS)] * 2 == CALLS


@pytest.mark.slow
def test_given_loop_runs_once() -> None:
    runs: list[int] = []

    def loop(model: nn.Module, batches: Any, optimizer: Any) -> None:
        runs.append(len(model.blocks))  # type: ignore[arg-type]
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

    trace_model(lambda: Chain([32] * MIN_REPETITIONS), loop=loop)

    assert runs == [MIN_REPETITIONS]


def test_repeated_blocks_are_found() -> None:
    found = find_blocks(Chain([64, *[32, 48] * 16]))

    assert found is not None
    assert (found.path, found.length, found.period, found.start, found.count) == ("blocks", 33, 2, 1, 16)
    model = Chain([64, *[32, 48] * 16])
    found.shorten(model, 3)
    assert [block.up.out_features for block in model.blocks] == [64, *[32, 48] * 3]


def test_too_few_blocks_are_not_extrapolated() -> None:
    assert find_blocks(Chain([32] * (MIN_REPETITIONS - 1))) is None
    assert find_blocks(Chain([*range(8, 48)])) is None


def test_numbers_of_blocks_are_ignored_and_other_settings_compared() -> None:
    model = Chain([32] * 20)
    assert find_blocks(model) is not None
    for index, block in enumerate(model.blocks):
        block.p = 0.1 * (index % 7 == 3 or index > 15)

    assert find_blocks(model) is None


@pytest.mark.slow
def test_another_batch_takes_one_trace_with_four_repetitions() -> None:
    proofs: list[RepeatProof] = []
    recipe = StepRecipe(optimizer=partial(torch.optim.AdamW, foreach=True), precision="bf16")

    def trace_batch(size: int, is_list: bool, proofs: list[RepeatProof] | None = None) -> Trace:
        CALLS.clear()
        make = partial(Chain, [32] * MIN_REPETITIONS, is_list)
        return trace_step(make, lambda: torch.zeros(size, 8), recipe, find_device("h100"), proofs=proofs)

    # With 4 rows, two tensors of different kinds have the same size by chance, so the proof holds for no other batch.
    for size, repetitions in ((4, 12), (9, 12), (10, 4), (3000, 4)):
        found = trace_batch(size, True, proofs)
        assert len(CALLS) == 2 * repetitions
        full = trace_batch(size, False)
        assert list_events(found) == list_events(full)
        assert (found.phases, found.operations) == (full.phases, full.operations)
    assert len(proofs) == 2


@pytest.mark.slow
def test_batch_on_another_path_is_proved_again() -> None:
    class ForkedChain(Chain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            for block in self.all():
                hidden = block(hidden) if len(inputs) < 8 else block(block(hidden))
            return self.last(hidden).mean()

    proofs: list[RepeatProof] = []
    recipe = StepRecipe(optimizer=None)
    for size, num_proofs in ((4, 1), (8, 2), (9, 2), (5, 2)):
        found, full = (
            trace_step(
                partial(ForkedChain, [32] * MIN_REPETITIONS, is_list),
                lambda: torch.zeros(size, 8),
                recipe,
                find_device("h100"),
                proofs=known,
            )
            for is_list, known in ((True, proofs), (False, None))
        )
        assert list_events(found) == list_events(full)
        assert len(proofs) == num_proofs
