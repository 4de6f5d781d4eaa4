"""Stages that are sharded or cut themselves = the hand-written loop on one process; and what such layouts must not lose."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    DataLoaderConfiguration,
    PipelineOptions,
    ShardingOptions,
    TensorParallelOptions,
    TorchContextParallelConfig,
    init_empty_weights,
)
from headway.errors import HeadwayError, UnsupportedError
from tests.devices import ON_CPU
from tests.distributed import cut_models, layouts, test_context_parallel, test_pipeline
from tests.distributed.layouts import (
    GPT,
    PADDING,
    Curve,
    Task,
    difference,
    each,
    llama,
    optimizer_of,
    rows,
    seeded,
    squares,
    text,
)
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
IN_PIECES: dict[str, Task] = {
    "tied gpt, recomputed": Task("gpt", handlers=(ActivationCheckpointing(),), **WINDOW),
    "llama": Task("llama", **WINDOW),
    "gpt2, joined after its blocks": Task("gpt2", **WINDOW),
    "by heads": Task("gpt", handlers=(TorchContextParallelConfig(cp_style="ulysses"),), **WINDOW),
}
"""Of sequences."""


def scheduled(*names: str, model: str = "four", handlers: tuple[Any, ...] = ()) -> dict[str, Task]:
    return {
        name: replace(SCHEDULES[name], model=model, handlers=(*SCHEDULES[name].handlers, *handlers)) for name in names
    }


RUNS: dict[str, tuple[int, dict[str, Task], dict[str, Task]]] = {
    "pp=2+fsdp": (4, SHARDED, scheduled("1f1b", "interleaved", "zero_bubble", "zbv")),
    "pp=2+tp": (4, IN_PARTS, scheduled("1f1b", "zbv", model="four, cut", handlers=CUT)),
    "pp=2+fsdp=2+tp=2": (8, IN_PARTS, scheduled("zbv", model="four, cut", handlers=CUT)),
    "ddp=2+pp=2+fsdp=2": (8, {"tied gpt": SHARDED["tied gpt"]}, scheduled("1f1b")),
    "pp=2+cp": (
        4,
        IN_PIECES,
        scheduled("1f1b", "zero_bubble", "zbv")
        | {"recomputed": scheduled("1f1b", handlers=(ActivationCheckpointing(),))["1f1b"]},
    ),
    "fsdp+cp=2+pp=2": (8, {"tied gpt": SHARDED["tied gpt"]}, scheduled("interleaved")),
    "pp=2+cp=2+tp": (
        8,
        {"llama, cut": Task("llama, cut", **WINDOW)},
        scheduled("1f1b", model="four, cut", handlers=CUT),
    ),
}


def train(layout: str) -> dict[str, Curve]:
    layouts.MODELS |= MODELS
    _, plain, functions = RUNS[layout]
    return test_pipeline.train(plain, functions, layout)


@pytest.mark.parametrize(
    "layout", [*list(RUNS)[:5], *(pytest.param(layout, marks=pytest.mark.matrix) for layout in list(RUNS)[5:])]
)
def test_spread_stages_reproduce_the_hand_written_loop(layout, monkeypatch):
    num_ranks, plain, functions = RUNS[layout]
    by_rank = run_ranks(train, num_ranks, layout, timeout=280)
    for name, make in MODELS.items():
        monkeypatch.setitem(layouts.MODELS, name, make)
    compare(by_rank, plain | functions, monkeypatch)


# ---------------------------------------------------------------- losses that the model computes, of sequences in parts


def judged_in_stages(layout: str) -> Curve:
    """What `judged_by_hand` does, by a schedule: means over labels, of micro-batches with unlike numbers of them."""
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[PipelineOptions(schedule="1f1b", num_microbatches=2)],
    )  # fmt: skip
    model = seeded(0, llama)
    optimizer = optimizer_of(Task(), model)
    ids, targets = rows()
    data = TensorDataset(ids, ids.masked_fill(targets == PADDING, PADDING))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    losses, norms = [], []
    for batch, _ in zip(loader, range(4)):
        loss = accelerator.forward_backward(
            batch,
            lambda piece: model(input_ids=piece[0], labels=piece[1]).loss,
            weight=lambda piece: (piece[1][:, 1:] != PADDING).sum(),
        )
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    curve = {"losses": losses, "norms": norms, "weights": whole_state(accelerator, model)}
    accelerator.end_training()
    return curve


def _of_some(model: Any, piece: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    if piece[0, 0] == first:
        return model(input_ids=piece, labels=piece).loss
    return model(input_ids=piece).logits.square().mean()


def whole_outputs() -> None:
    """Without gradients every rank gets them; a length that no number of ranks divides; micro-batches with labels and without."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp=2+cp")
    model, plain, ids = accelerator.prepare(seeded(0, llama)).eval(), seeded(0, llama).eval(), text(4, 4)[:, :-1]
    with torch.no_grad():
        found, wanted = model(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    assert torch.allclose(found.logits, wanted.logits, atol=1e-6)
    assert abs(found.loss - wanted.loss) < 1e-6
    mixed = functools.partial(_of_some, first=ids[0, 0])
    found = accelerator.forward_backward(ids, lambda piece: mixed(model, piece))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    wanted = torch.stack([mixed(plain, piece) for piece in ids.chunk(4)]).mean()
    wanted.backward()
    assert abs(found.item() - wanted.item()) < 1e-6 * wanted.item()
    assert abs(norm - nn.utils.clip_grad_norm_(plain.parameters(), 1e9)) < 1e-6 * norm
    accelerator.end_training()


def judged() -> tuple[Curve, Curve]:
    whole_outputs()
    return test_context_parallel.judged("pp=2+cp"), judged_in_stages("pp=2+cp")


def test_losses_of_parts_are_put_together_behind_the_last_stage():
    expected = test_context_parallel.judged_by_hand()
    for rank, curves in enumerate(run_ranks(judged, 4, timeout=280)):
        for curve in curves:
            here = {name: each for name, each in curve["weights"].items() if not each.is_meta}
            assert here or rank  # of whole weights the other ranks have none
            curve["weights"] = here or {"": torch.zeros(1)}
            wanted = {name: expected["weights"][name] for name in here} or {"": torch.zeros(1)}
            off = difference({**expected, "weights": wanted}, curve)
            assert all(off[kind] < least for kind, least in test_context_parallel.CLOSE.items()), off


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
    for number, is_used in ((4, False), (2 + 2 * index, True), (4, False)):
        accelerator.backward(squares(model, text(1, number)), weight=number)
        part = accelerator.strategy.find_current(model.spare.weight)
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

    refuse(UnsupportedError, "drop sequence_parallel, or cp", "pp=2+cp", TensorParallelOptions(sequence_parallel=True))
    refuse(UnsupportedError, "leaves logits split", "pp=2+tp", TensorParallelOptions(loss_parallel=True))
    refuse(
        UnsupportedError,
        "gathers parameters for each micro-batch",
        "pp=2+fsdp",
        ShardingOptions(reshard_after_forward=True),
    )


def on_four() -> list[str]:
    return each([forwards_before_the_step, parts_that_some_use, shards_without_weight, models_without_values, refusals])


def test_what_spread_stages_keep():
    for failed in run_ranks(on_four, 4, timeout=280):
        assert not failed, "\n".join(failed)
