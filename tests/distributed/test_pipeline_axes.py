"""Pipelines whose stages are sharded or split match the hand-written loop on one process. Also special cases of such layouts."""

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
    build_seeded,
    llama,
    make_optimizer,
    make_rows,
    make_tokens,
    mean_square,
    measure_differences,
    run_each,
)
from tests.distributed.pipelines import gather_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pipeline import SCHEDULE_TASKS, compare

GPT_PLAN_OPTIONS = (TensorParallelOptions(plan=cut_models.GPT_PLAN),)
SEQUENCE_OPTIONS = (TensorParallelOptions(sequence_parallel=True),)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "four, cut": lambda: cut_models.GPT(layouts.VOCABULARY, num_blocks=4),
    "llama, cut": lambda: cut_models.llama(vocab_size=layouts.VOCABULARY, use_cache=False, num_key_value_heads=4),
}
WINDOW = {"window": 16, "updates": 5}
SHARDED_TASKS: dict[str, Task] = {
    "tied gpt": Task("gpt", seed_by_rank=True, **WINDOW),
    "part frozen": Task("gpt, frozen", **WINDOW),
    "gemma": Task("gemma", **WINDOW),
}
TENSOR_TASKS: dict[str, Task] = {
    "tied gpt, cut": Task("four, cut", handlers=GPT_PLAN_OPTIONS, **WINDOW),
    "llama in sequence": Task("llama, cut", handlers=SEQUENCE_OPTIONS, **WINDOW),
}
CONTEXT_TASKS: dict[str, Task] = {
    "tied gpt, recomputed": Task("gpt", handlers=(ActivationCheckpointing(),), **WINDOW),
    "llama": Task("llama", **WINDOW),
    "gpt2, joined after its blocks": Task("gpt2", **WINDOW),
    "by heads": Task("gpt", handlers=(TorchContextParallelConfig(cp_style="ulysses"),), **WINDOW),
}
"""Tasks with context parallelism."""


def make_schedule_tasks(*names: str, model: str = "four", handlers: tuple[Any, ...] = ()) -> dict[str, Task]:
    return {
        name: replace(SCHEDULE_TASKS[name], model=model, handlers=(*SCHEDULE_TASKS[name].handlers, *handlers))
        for name in names
    }


RUNS: dict[str, tuple[int, dict[str, Task], dict[str, Task]]] = {
    "pp=2+fsdp": (4, SHARDED_TASKS, make_schedule_tasks("1f1b", "interleaved", "zero_bubble", "zbv")),
    "pp=2+tp": (4, TENSOR_TASKS, make_schedule_tasks("1f1b", "zbv", model="four, cut", handlers=GPT_PLAN_OPTIONS)),
    "pp=2+fsdp=2+tp=2": (8, TENSOR_TASKS, make_schedule_tasks("zbv", model="four, cut", handlers=GPT_PLAN_OPTIONS)),
    "ddp=2+pp=2+fsdp=2": (8, {"tied gpt": SHARDED_TASKS["tied gpt"]}, make_schedule_tasks("1f1b")),
    "pp=2+cp": (
        4,
        CONTEXT_TASKS,
        make_schedule_tasks("1f1b", "zero_bubble", "zbv")
        | {"recomputed": make_schedule_tasks("1f1b", handlers=(ActivationCheckpointing(),))["1f1b"]},
    ),
    "fsdp+cp=2+pp=2": (8, {"tied gpt": SHARDED_TASKS["tied gpt"]}, make_schedule_tasks("interleaved")),
    "pp=2+cp=2+tp": (
        8,
        {"llama, cut": Task("llama, cut", **WINDOW)},
        make_schedule_tasks("1f1b", model="four, cut", handlers=GPT_PLAN_OPTIONS),
    ),
}


def train_layout(layout: str) -> dict[str, Curve]:
    layouts.MODELS |= MODELS
    _, plain, functions = RUNS[layout]
    return test_pipeline.train(plain, functions, layout)


@pytest.mark.parametrize(
    "layout", [*list(RUNS)[:5], *(pytest.param(layout, marks=pytest.mark.matrix) for layout in list(RUNS)[5:])]
)
def test_combined_pipelines_match_the_hand_written_loop(layout, monkeypatch):
    num_ranks, plain, functions = RUNS[layout]
    by_rank = run_ranks(train_layout, num_ranks, layout, timeout=280)
    for name, make in MODELS.items():
        monkeypatch.setitem(layouts.MODELS, name, make)
    compare(by_rank, plain | functions, monkeypatch)


# ---------------------------------------------------------------- losses that the model computes from split sequences


def train_llama_in_stages(layout: str) -> Curve:
    """Do the training of `train_llama_by_hand` with a schedule: mean losses of micro-batches with different numbers of labels."""
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, dataloader_config=DataLoaderConfiguration(even_batches=False),
        kwargs_handlers=[PipelineOptions(schedule="1f1b", num_microbatches=2)],
    )  # fmt: skip
    model = build_seeded(0, llama)
    optimizer = make_optimizer(Task(), model)
    ids, targets = make_rows()
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
    curve = {"losses": losses, "norms": norms, "weights": gather_state(accelerator, model)}
    accelerator.end_training()
    return curve


def _compute_loss(model: Any, piece: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    if piece[0, 0] == first:
        return model(input_ids=piece, labels=piece).loss
    return model(input_ids=piece).logits.square().mean()


def check_whole_outputs() -> None:
    """Check that all ranks get whole outputs without gradients, and losses of micro-batches with and without labels.

    The sequence length is not divisible by the number of ranks.
    """
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp=2+cp")
    model, plain, ids = (
        accelerator.prepare(build_seeded(0, llama)).eval(),
        build_seeded(0, llama).eval(),
        make_tokens(4, 4)[:, :-1],
    )
    with torch.no_grad():
        found, expected = model(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    assert abs(found.loss - expected.loss) < 1e-6
    mixed = functools.partial(_compute_loss, first=ids[0, 0])
    found = accelerator.forward_backward(ids, lambda piece: mixed(model, piece))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.stack([mixed(plain, piece) for piece in ids.chunk(4)]).mean()
    expected.backward()
    assert abs(found.item() - expected.item()) < 1e-6 * expected.item()
    assert abs(norm - nn.utils.clip_grad_norm_(plain.parameters(), 1e9)) < 1e-6 * norm
    accelerator.end_training()


def train_both_ways() -> tuple[Curve, Curve]:
    check_whole_outputs()
    return test_context_parallel.train_llama("pp=2+cp"), train_llama_in_stages("pp=2+cp")


def test_losses_of_split_sequences_match_one_process():
    expected = test_context_parallel.train_llama_by_hand()
    for rank, curves in enumerate(run_ranks(train_both_ways, 4, timeout=280)):
        for curve in curves:
            here = {name: each for name, each in curve["weights"].items() if not each.is_meta}
            assert here or rank  # only rank 0 has whole weights
            curve["weights"] = here or {"": torch.zeros(1)}
            expected_weights = {name: expected["weights"][name] for name in here} or {"": torch.zeros(1)}
            off = measure_differences({**expected, "weights": expected_weights}, curve)
            assert all(off[kind] < least for kind, least in test_context_parallel.CLOSE.items()), off


# ---------------------------------------------------------------- special cases


def prepare_training(
    model: nn.Module, layout: str = "pp=2+fsdp", *handlers: Any, **given: Any
) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=list(handlers), **given)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def get_own_rows(accelerator: Accelerator, ids: torch.Tensor) -> torch.Tensor:
    return ids.chunk(accelerator.strategy.data_shard.count)[accelerator.strategy.data_shard.index]


def forward_before_the_step() -> None:
    """Weights gathered by a forward pass between backward and step are outdated after the update, and must not be used."""
    for layout in ("fsdp", "pp=2+fsdp"):
        accelerator, model, optimizer = prepare_training(build_seeded(0, GPT), layout)
        plain = build_seeded(0, GPT)
        by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
        for ids in (make_tokens(1, 8), make_tokens(2, 8)):
            accelerator.backward(mean_square(model, get_own_rows(accelerator, ids)))
            mean_square(plain, ids).backward()
            with torch.no_grad():
                model(get_own_rows(accelerator, ids))
            for one in (optimizer, by_hand):
                one.step()
                one.zero_grad()
            with torch.no_grad():
                mine, expected = model(ids), plain(ids)
            assert torch.allclose(mine, expected, atol=1e-5), layout
        accelerator.end_training()


class OptionalLayerGPT(GPT):
    """GPT with a layer that only batches of two rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(layouts.VOCABULARY, layouts.VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        return found + self.spare(found) if len(ids) == 2 else found


def layer_used_on_some_ranks() -> None:
    """A parameter unused on all ranks has no gradient. One used on some ranks gets the sum of their gradients."""
    accelerator, model, optimizer = prepare_training(build_seeded(0, OptionalLayerGPT))
    index = accelerator.strategy.data_shard.index
    for number, is_used in ((4, False), (2 + 2 * index, True), (4, False)):
        accelerator.backward(mean_square(model, make_tokens(1, number)), weight=number)
        part = accelerator.strategy.find_current(model.spare.weight)
        assert part.is_meta or (part.grad is not None) == is_used
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def shards_without_weight() -> None:
    """One rank's loss has no weight, so the other ranks' losses count, and no rank waits."""
    accelerator, model, _ = prepare_training(build_seeded(0, GPT))
    plain, ids = build_seeded(0, GPT), make_tokens(1, 8)
    targets = ids.clone()
    targets[4:] = -100

    def mean(of: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(of(ids).flatten(0, 1), targets.flatten())

    rows = get_own_rows(accelerator, ids), get_own_rows(accelerator, targets)
    accelerator.forward_backward(rows, lambda piece: mean(model, *piece), weight=lambda piece: (piece[1] >= 0).sum())
    mean(plain, ids, targets).backward()
    found = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert abs(float(found - expected)) < 1e-5 * float(expected)
    accelerator.end_training()


def models_on_meta_device() -> None:
    """Models on the meta device start with the values of rank 0, for each FSDP unit, and learn."""
    whole = []
    for layout in ("pp=4", "pp=2+fsdp"):
        with init_empty_weights():
            model = GPT(num_blocks=4)
        accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
        torch.manual_seed(3 + accelerator.process_index)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        whole.append(gather_state(accelerator, model))
        before = mean_square(model, get_own_rows(accelerator, make_tokens(1, 8)))
        accelerator.backward(before)
        optimizer.step()
        with torch.no_grad():
            assert float(mean_square(model, get_own_rows(accelerator, make_tokens(1, 8)))) < float(before.detach())
        accelerator.end_training()
    if accelerator.process_index == 0:
        values = whole[0]
        assert all(torch.equal(one, whole[1][name]) for name, one in values.items())
        assert torch.equal(values["head.weight"], values["tokens.weight"])
        assert not torch.equal(*(values[f"blocks.{number}.up.weight"] for number in (0, 3)))


def unsupported_options() -> None:
    """Unsupported options raise errors on all ranks before anything changes."""

    def refuse(kind: type[HeadwayError], part: str, layout: str, *handlers: Any) -> None:
        with pytest.raises(kind, match=part):
            prepare_training(build_seeded(0, GPT), layout, *handlers)

    refuse(UnsupportedError, "drop sequence_parallel, or cp", "pp=2+cp", TensorParallelOptions(sequence_parallel=True))
    refuse(UnsupportedError, "leaves logits sharded", "pp=2+tp", TensorParallelOptions(loss_parallel=True))
    refuse(
        UnsupportedError,
        "gathers parameters for each micro-batch",
        "pp=2+fsdp",
        ShardingOptions(reshard_after_forward=True),
    )


def run_scenarios() -> list[str]:
    return run_each(
        [
            forward_before_the_step,
            layer_used_on_some_ranks,
            shards_without_weight,
            models_on_meta_device,
            unsupported_options,
        ]
    )


def test_scenarios_on_four_ranks():
    for failed in run_ranks(run_scenarios, 4, timeout=280):
        assert not failed, "\n".join(failed)
