"""Stages that are sharded or cut themselves = the hand-written loop on one process; and what such layouts must not lose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ShardingOptions, TensorParallelOptions, init_empty_weights
from headway.errors import HeadwayError, UnsupportedError
from tests.devices import ON_CPU
from tests.distributed import cut_models, layouts, test_pipeline
from tests.distributed.layouts import GPT, Curve, Task, each, seeded, squares, text
from tests.distributed.pipelines import whole_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pipeline import SCHEDULES, compare

CUT = (TensorParallelOptions(plan=cut_models.GPT_PLAN),)
IN_SEQUENCE = (TensorParallelOptions(sequence_parallel=True),)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "four, cut": lambda: cut_models.GPT(layouts.VOCABULARY, num_blocks=4),
    "llama, cut": lambda: cut_models.llama(vocab_size=layouts.VOCABULARY, use_cache=False, num_key_value_heads=4),
}
WINDOW = {"window": 16, "updates": 5}
SHARDED: dict[str, Task] = {
    "tied gpt": Task("gpt", seed_by_rank=True, **WINDOW),
    "part frozen": Task("gpt, frozen", **WINDOW),
    "gemma": Task("gemma", **WINDOW),
}
IN_PARTS: dict[str, Task] = {
    "tied gpt, cut": Task("four, cut", handlers=CUT, **WINDOW),
    "llama in sequence": Task("llama, cut", handlers=IN_SEQUENCE, **WINDOW),
}


def scheduled(*names: str, model: str = "four", handlers: tuple[Any, ...] = ()) -> dict[str, Task]:
    return {
        name: replace(SCHEDULES[name], model=model, handlers=(*SCHEDULES[name].handlers, *handlers)) for name in names
    }


RUNS: dict[str, tuple[int, dict[str, Task], dict[str, Task]]] = {
    "pp=2+fsdp": (4, SHARDED, scheduled("1f1b", "interleaved", "zero_bubble", "zbv")),
    "pp=2+tp": (4, IN_PARTS, scheduled("1f1b", "zbv", model="four, cut", handlers=CUT)),
    "pp=2+fsdp=2+tp=2": (8, IN_PARTS, scheduled("zbv", model="four, cut", handlers=CUT)),
    "ddp=2+pp=2+fsdp=2": (8, {"tied gpt": SHARDED["tied gpt"]}, scheduled("1f1b")),
}


def train(layout: str) -> dict[str, Curve]:
    layouts.MODELS |= MODELS
    _, plain, functions = RUNS[layout]
    return test_pipeline.train(plain, functions, layout)


@pytest.mark.parametrize("layout", RUNS)
def test_spread_stages_reproduce_the_hand_written_loop(layout, monkeypatch):
    num_ranks, plain, functions = RUNS[layout]
    by_rank = run_ranks(train, num_ranks, layout, timeout=280)
    for name, make in MODELS.items():
        monkeypatch.setitem(layouts.MODELS, name, make)
    compare(by_rank, plain | functions, monkeypatch)


# ---------------------------------------------------------------- what must not be lost


def begin(model: nn.Module, layout: str = "pp=2+fsdp", *handlers: Any, **given: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=list(handlers), **given)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def own_rows(accelerator: Accelerator, ids: torch.Tensor) -> torch.Tensor:
    return ids.chunk(accelerator.strategy.data_shard.count)[accelerator.strategy.data_shard.index]


def forwards_before_the_step() -> None:
    """What a forward gathers between backward and step is older than the update, and must not be used after it."""
    for layout in ("fsdp", "pp=2+fsdp"):
        accelerator, model, optimizer = begin(seeded(0, GPT), layout)
        plain = seeded(0, GPT)
        by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
        for ids in (text(1, 8), text(2, 8)):
            accelerator.backward(squares(model, own_rows(accelerator, ids)))
            squares(plain, ids).backward()
            with torch.no_grad():
                model(own_rows(accelerator, ids))
            for one in (optimizer, by_hand):
                one.step()
                one.zero_grad()
            with torch.no_grad():
                mine, wanted = model(ids), plain(ids)
            assert torch.allclose(mine, wanted, atol=1e-5), layout
        accelerator.end_training()


class Spare(GPT):
    """A part of it is used by batches of two rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(layouts.VOCABULARY, layouts.VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        return found + self.spare(found) if len(ids) == 2 else found


def parts_that_some_use() -> None:
    """A parameter that no rank has used has no gradient; one that some have gets their sum."""
    accelerator, model, optimizer = begin(seeded(0, Spare))
    index = accelerator.strategy.data_shard.index
    for rows, is_used in ((4, False), (2 + 2 * index, True), (4, False)):
        accelerator.backward(squares(model, text(1, rows)), weight=rows)
        part = accelerator.strategy.current(model.spare.weight)
        assert part.is_meta or (part.grad is not None) == is_used
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def shards_without_weight() -> None:
    """One rank's loss is over nothing: the others' counts, and nobody waits."""
    accelerator, model, _ = begin(seeded(0, GPT))
    plain, ids = seeded(0, GPT), text(1, 8)
    targets = ids.clone()
    targets[4:] = -100

    def mean(of: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(of(ids).flatten(0, 1), targets.flatten())

    rows = own_rows(accelerator, ids), own_rows(accelerator, targets)
    accelerator.forward_backward(rows, lambda piece: mean(model, *piece), weight=lambda piece: (piece[1] >= 0).sum())
    mean(plain, ids, targets).backward()
    found = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert abs(float(found - wanted)) < 1e-5 * float(wanted)
    accelerator.end_training()


def models_without_values() -> None:
    """Built on the meta device; they begin with rank 0's values, each unit drawn on all ranks, and learn."""
    whole = []
    for layout in ("pp=4", "pp=2+fsdp"):
        with init_empty_weights():
            model = GPT(num_blocks=4)
        accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
        torch.manual_seed(3 + accelerator.process_index)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        whole.append(whole_state(accelerator, model))
        before = squares(model, own_rows(accelerator, text(1, 8)))
        accelerator.backward(before)
        optimizer.step()
        with torch.no_grad():
            assert float(squares(model, own_rows(accelerator, text(1, 8)))) < float(before.detach())
        accelerator.end_training()
    if accelerator.process_index == 0:
        values = whole[0]
        assert all(torch.equal(one, whole[1][name]) for name, one in values.items())
        assert torch.equal(values["head.weight"], values["tokens.weight"])
        assert not torch.equal(*(values[f"blocks.{number}.up.weight"] for number in (0, 3)))


def refusals() -> None:
    """Before anything is changed, on all ranks."""

    def refuse(kind: type[HeadwayError], part: str, layout: str, *handlers: Any) -> None:
        with pytest.raises(kind, match=part):
            begin(seeded(0, GPT), layout, *handlers)

    refuse(UnsupportedError, "leave cp out, as in", "pp=2+cp")
    refuse(UnsupportedError, "leaves logits split", "pp=2+tp", TensorParallelOptions(loss_parallel=True))
    refuse(
        UnsupportedError, "would gather for each micro-batch", "pp=2+fsdp", ShardingOptions(reshard_after_forward=True)
    )


def on_four() -> list[str]:
    return each([forwards_before_the_step, parts_that_some_use, shards_without_weight, models_without_values, refusals])


def test_what_spread_stages_keep():
    for failed in run_ranks(on_four, 4, timeout=280):
        assert not failed, "\n".join(failed)
