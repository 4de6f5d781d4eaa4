"""Experts within pipeline stages (`ep` with `pp`) train as a hand-written loop on one process does."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from headway import Accelerator, ActivationCheckpointing, PipelineOptions, ShardingOptions
from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import parse_layout
from headway.errors import UnsupportedError
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.planning.dry_run.rank_update import dry_run_rank, dry_run_stages, run_update
from headway.planning.dry_run.step_drivers import PipelineDriver
from headway.planning.outcome import build_plan
from tests.devices import ON_CPU
from tests.distributed import layouts
from tests.distributed.layouts import VOCABULARY, Curve, Task, measure_differences, train_by_hand
from tests.distributed.ranks import run_ranks
from tests.distributed.test_expert_parallel import mixtral
from tests.distributed.test_pipeline import train
from tests.distributed.test_plan import TokenBatch, sgd

CLOSE = 1e-6
FOR_PLAN = EngineOptions(pipeline=PipelineOptions("1f1b", num_microbatches=3))
layouts.MODELS["four mixtral blocks"] = lambda: mixtral(num_hidden_layers=4)
GIVEN: dict[str, Any] = {"optimizer": "sgd", "window": 16, "updates": 5}
"""With four data shards, the third window has rows for two of them only. The other ranks have micro-batches of weight 0."""


def schedule(name: str, model: str = "four mixtral blocks", **given: Any) -> Task:
    """Return a task whose batches run through the pipeline in the order of a schedule."""
    return Task(model, **{**GIVEN, "handlers": (PipelineOptions(schedule=name),), **given})


CALLS = {
    "mixtral": Task("mixtral", **GIVEN),
    "deepseek": Task("deepseek", **GIVEN),
    "experts without tokens": Task("lonely", **GIVEN),
    "recomputed": Task("olmoe", **{**GIVEN, "handlers": (ActivationCheckpointing(),)}),
}
"""Tasks whose loop calls the model itself."""
SCHEDULES = {name: schedule(name) for name in ("gpipe", "1f1b", "interleaved")}
SCHEDULES["1f1b, recomputed"] = schedule("1f1b", handlers=(PipelineOptions(schedule="1f1b"), ActivationCheckpointing()))
SCHEDULES["1f1b, AdamW"] = schedule("1f1b", optimizer="fused", updates=3)
LAYOUTS: dict[str, tuple[int, dict[str, Task], dict[str, Task]]] = {
    "pp=2+ep=2": (4, CALLS, SCHEDULES),
    "pp=2+ep=4": (8, {"mixtral": CALLS["mixtral"]}, {"1f1b": SCHEDULES["1f1b"], "gpipe": SCHEDULES["gpipe"]}),
    "pp=2+fsdp=2+ep=2": (8, {"deepseek": CALLS["deepseek"]}, {"1f1b": SCHEDULES["1f1b"]}),
    "ddp=2+pp=2+ep=2": (8, {"mixtral": CALLS["mixtral"]}, {"1f1b": SCHEDULES["1f1b"]}),
    "pp=2+ep=2+tp=2": (8, {"mixtral": CALLS["mixtral"]}, {"1f1b": SCHEDULES["1f1b"]}),
    "pp=2+cp=2+ep=2": (8, {"mixtral": CALLS["mixtral"]}, {}),
}
"""For each layout: number of ranks, tasks that call the model, and tasks that run a schedule."""


def train_tasks(calls: dict[str, Task], schedules: dict[str, Task], layout: str) -> dict[str, Curve]:
    """Train all tasks. A rank imports this module for it, and with it the models that the module registers."""
    return train(calls, schedules, layout)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.slow if n == 4 else pytest.mark.matrix)
        for layout, (n, *_) in LAYOUTS.items()
    ],
)
def test_training_matches_the_hand_written_loop(layout):
    num_ranks, calls, schedules = LAYOUTS[layout]
    by_rank: list[dict[str, Curve]] = run_ranks(train_tasks, num_ranks, calls, schedules, layout, timeout=400)
    for name, task in (calls | schedules).items():
        expected = train_by_hand(task)
        for rank, curves in enumerate(by_rank):
            found = curves[name]
            weights = {key: value for key, value in expected["weights"].items() if key in found["weights"]}
            assert weights or (
                name in schedules and rank
            )  # only rank 0 has the whole weights of a task with a schedule
            if not weights:
                found["weights"] = weights = {"": torch.zeros(1)}
            differences = measure_differences({**expected, "weights": weights}, found)
            assert max(differences.values()) < (1e-3 if task.optimizer == "fused" else CLOSE), (name, rank, differences)


def train_on_rows(layout: str, num_items: list[int], lengths: list[int], as_batch: bool) -> dict[str, torch.Tensor]:
    """Train one update on four rows per data shard, and return the whole weights on rank 0.

    Args:
        layout: Strategy of the run.
        num_items: For each data shard, the number of tokens per row that count in the loss.
        lengths: For each data shard, the number of tokens per row.
        as_batch: Whether to call `forward_backward` instead of the model.
    """
    handlers = [PipelineOptions(schedule="1f1b" if as_batch else "gpipe")] if "pp" in layout else []
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = mixtral(num_hidden_layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shard = accelerator.strategy.data_shard.index
    ids, mask = make_rows(shard, num_items[shard], lengths[shard])

    def compute_loss(piece: Any) -> torch.Tensor:
        return compute_masked_mean(model, *piece)

    if as_batch:
        accelerator.forward_backward((ids, mask), compute_loss, weight=lambda piece: piece[1].sum())
    else:
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss((ids, mask)), weight=int(mask.sum()))
    optimizer.step()
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def make_rows(shard: int, num_items: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four rows of tokens, and a mask of the predictions that count. Both have the shape (4, length)."""
    ids = torch.randint(1, VOCABULARY, (4, length), generator=torch.Generator().manual_seed(shard))
    return ids, (torch.arange(length) < num_items).float().expand(4, length)


def compute_masked_mean(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the mask, which is NaN (0/0), as is its gradient, if the mask is empty."""
    logits = model(input_ids=ids).logits
    losses = cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def train_rows_by_hand(num_items: list[int], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Return the weights after the same update in plain PyTorch on one process."""
    torch.manual_seed(0)
    model = mixtral(num_hidden_layers=2)
    total = 0.0
    for shard, (count, length) in enumerate(zip(num_items, lengths)):
        if count:
            ids, mask = make_rows(shard, count, length)
            total = total + compute_masked_mean(model, ids, mask) * mask.sum()
    (total / (4 * sum(num_items))).backward()  # type: ignore[attr-defined]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("layout", "num_ranks", "as_batch"), [("ep", 2, False), ("pp=2+ep=2", 4, False), ("pp=2+ep=2", 4, True)]
)
@pytest.mark.parametrize(
    ("num_items", "lengths"), [([5, 0], [6, 6]), ([5, 3], [6, 9])], ids=["one rank without items", "other lengths"]
)
def test_ranks_with_different_rows_exchange_tokens(layout, num_ranks, as_batch, num_items, lengths):
    found = run_ranks(train_on_rows, num_ranks, layout, num_items, lengths, as_batch)[0]
    expected = train_rows_by_hand(num_items, lengths)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def change_lengths(layout: str) -> list[float]:
    """Return the losses of updates in which each rank's rows get a new length at another time."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    torch.manual_seed(0)
    model = mixtral(num_hidden_layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shard, found = accelerator.strategy.data_shard.index, []
    for update in range(4):
        ids, mask = make_rows(shard, 5, 6 + (update + shard) // 2)
        with accelerator.accumulate(model):
            loss = compute_masked_mean(model, ids, mask)
            accelerator.backward(loss, weight=int(mask.sum()))
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(accelerator.reduce(loss.detach(), "mean")))
    return found


def test_new_shapes_on_one_rank_only_match_plain_replicas():
    """A new shape runs through the stages before the schedule, on all ranks that exchange tokens."""
    expected = run_ranks(change_lengths, 2, "ddp")[0]
    for losses in run_ranks(change_lengths, 4, "pp=2+ep=2"):
        assert losses == pytest.approx(expected, abs=CLOSE)


def refuse() -> None:
    for name in ("zero_bubble", "zbv"):
        with pytest.raises(UnsupportedError, match=r"splits backward in two.*use 'gpipe', '1f1b' or 'interleaved'"):
            Accelerator(cpu=ON_CPU, strategy="pp=2+ep=2", kwargs_handlers=[PipelineOptions(schedule=name)])
    with pytest.raises(UnsupportedError, match="gathers parameters for each micro-batch"):
        Accelerator(
            cpu=ON_CPU, strategy="pp=2+ep=2", kwargs_handlers=[ShardingOptions(reshard_after_forward=True)]
        )  # fmt: skip


def test_split_backward_is_refused():
    run_ranks(refuse, 4)


def make_for_plan() -> torch.nn.Module:
    """Return a Mixtral of four blocks without a causal mask, whose memory depends on values."""
    return skip_causal_mask(mixtral(num_hidden_layers=4, vocab_size=31))


def measure_update() -> tuple[Any, int]:
    """Run one update by 1F1B. Return the record of its exchanges, and the bytes of this rank's weights."""
    accelerator = Accelerator(cpu=True, strategy="pp=2+ep=2", kwargs_handlers=[FOR_PLAN.pipeline])
    model = accelerator.prepare(make_for_plan())
    drive = PipelineDriver(accelerator.strategy, "1f1b", TokenBatch(6))
    trial = run_update(model, parse_layout("pp=2+ep=2").resolve(4), TokenBatch(6), sgd, driver=drive)
    return trial, sum(p.to_local().nbytes for p in model.parameters() if not p.is_meta)  # type: ignore[attr-defined]


def test_plan_matches_real_ranks():
    """Only agreements of a few numbers are not in a plan, and it assumes that tokens are spread evenly over experts."""
    layout = parse_layout("pp=2+ep=2").resolve(4)
    dry_run = partial(dry_run_rank, make_for_plan, layout, step=TokenBatch(6), make_optimizer=sgd, options=FOR_PLAN)
    trials = dry_run_stages(layout, lambda rank, answers: dry_run(rank, peer_objects=answers))
    planned = build_plan("pp=2+ep=2", layout, trials, 0)
    for rank, (trial, weights) in enumerate(run_ranks(measure_update, 4)):
        share, stage = planned.shares.get_share(rank), planned.stages[layout.find_coordinates(rank)["pp"]]
        assert share.weights - share.padding - trial.buffers == weights
        for kind in ("send", "all_reduce", "broadcast", "reduce_scatter"):
            real, expected = (
                {each: volume for each, volume in volumes.items() if each.kind == kind}
                for volumes in (trial.volumes, stage.exchanges)
            )
            assert real == expected
        (tokens,) = [volume for each, volume in stage.exchanges.items() if each.kind == "all_to_all"]
        (sent,) = [volume for each, volume in trial.volumes.items() if each.kind == "all_to_all"]
        assert sent.calls == tokens.calls * 5 // 4  # in each layer: two exchanges, two in backward, one of counts
