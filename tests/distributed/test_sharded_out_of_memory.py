"""Out of memory under FSDP and HSDP: the rank that fails stands in for itself in what the others still exchange, then all replay.

Each cell is a run of eight updates in which memory runs out once, on one rank or on several, at a place of its own. It is
compared with a run that used the final pieces from that batch on, bit for bit, and with one that never ran out.
"""

import itertools
import os
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    DataLoaderConfiguration,
    ShardingOptions,
    TorchDynamoPlugin,
    Trainer,
    TrainingArguments,
)
from headway.core.strategies.fully_sharded.fsdp_collectives import FSDPUnit
from headway.errors import MemoryExhausted, UnsupportedError
from headway.extras.replay.step import PieceStep
from headway.extras.replay.transaction import BatchTransaction
from tests.distributed.layouts import (
    PADDING,
    Task,
    build,
    difference,
    each,
    optimizer_of,
    rows,
    sum_of_losses,
    whole_weights,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_trainer import Tight
from tests.unit.trainer.models import Net, Points, cross_entropy

UPDATES, BATCH = 8, 4
NONE: dict[str, Any] = {"losses": [0.0]}


@dataclass(frozen=True)
class Cell:
    """One run. `where` on each of `who` memory runs out in the batch number `batch`; "" for never."""

    where: str = ""
    who: tuple[int, ...] = ()
    batch: int = 0
    steps: int = 1
    form: str = "function"
    model: str = "gpt"
    precision: str = "no"
    pieces_from: int = 99
    handlers: tuple[Any, ...] = field(default=(), compare=False)
    label: str = ""
    backend: str = ""

    def __str__(self) -> str:
        return " ".join(
            map(
                str, (self.label or self.backend or self.model, self.where, self.who, self.batch, self.steps, self.form)
            )
        )


class Fault:
    """Raises once, where it is armed."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.where = dict(zip(cell.who, itertools.cycle(cell.where.split("/")))).get(rank, "")
        self.is_armed, self.num_raised = False, 0

    def at(self, place: str) -> None:
        if self.is_armed and place == self.where:
            self.is_armed, self.num_raised = False, self.num_raised + 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def plant(self, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        block = model.blocks[1]
        model.register_forward_pre_hook(lambda *_: self.at("before"), prepend=True)
        block.register_forward_pre_hook(lambda *_: self.at("gather"), prepend=True)  # ahead of FSDP's own
        block.up.register_forward_pre_hook(lambda *_: self.at("forward"))
        block.up.register_full_backward_pre_hook(lambda *_: self.at("backward"))
        model.blocks[0].first.register_full_backward_hook(lambda *_: self.at("late backward"))
        optimizer.optimizer.register_step_post_hook(lambda *_: self.at("first step"))
        strategy = accelerator.strategy
        clip, known = strategy.clip_gradients, transaction_of(accelerator)._get_optimizer_record(optimizer.optimizer)
        reserve = known.reserve_memory
        strategy.clip_gradients = lambda *args: (clip(*args), self.at("clip"))[0]  # type: ignore[method-assign, assignment]
        known.reserve_memory = lambda: (self.at("reserve"), reserve())[1]  # type: ignore[method-assign]


def transaction_of(accelerator: Accelerator) -> BatchTransaction:
    step = accelerator._training_step
    assert isinstance(step, PieceStep)
    return step.transaction


def start(layout: str, cell: Cell) -> Accelerator:
    return Accelerator(
        cpu=True, strategy=layout, gradient_accumulation_steps=cell.steps, microbatching="auto", mixed_precision=cell.precision,
        on_non_finite="raise", dataloader_config=DataLoaderConfiguration(even_batches=False), kwargs_handlers=list(cell.handlers),
        dynamo_plugin=TorchDynamoPlugin(backend=cell.backend, use_regional_compilation=True) if cell.backend else None,
    )  # fmt: skip


def train(layout: str, cell: Cell) -> dict[str, Any]:
    """Eight updates on ragged text, weighed by tokens, clipped; the last batches of a pass differ in rows between ranks."""
    accelerator = start(layout, cell)
    task = Task(model=cell.model, optimizer="sgd")
    model: Any = build(task)
    optimizer: Any = optimizer_of(task, model)
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fault, transaction = Fault(cell, accelerator.process_index), transaction_of(accelerator)
    fault.plant(accelerator, model, optimizer)
    losses: list[float] = []
    norms: dict[int, float] = {}
    numbers = itertools.count()

    def close() -> None:
        if accelerator.sync_gradients:
            norms[accelerator.num_updates] = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()

    while accelerator.num_updates < UPDATES:
        for ids, targets in loader:
            if accelerator.num_updates == UPDATES:
                break
            targets = targets if loader.mask is None else targets.masked_fill(~loader.mask[:, None], PADDING)
            number = next(numbers)
            if number == cell.pieces_from:
                transaction.size.shrink(BATCH // 2, BATCH)
            fault.is_armed = bool(fault.where) and (number == cell.batch or fault.is_armed)
            if cell.form == "function":
                loss = accelerator.forward_backward(
                    (ids, targets),
                    lambda piece: sum_of_losses(model, *piece),
                    lambda piece: (piece[1] != PADDING).sum(),
                    "sum",
                )
                losses.append(loss.item())
                close()
                continue
            for piece in accelerator.microbatches((ids, targets)):
                with accelerator.accumulate(model):
                    tokens = int((piece[1] != PADDING).sum())
                    total = sum_of_losses(model, *piece)
                    fault.at("loss")
                    accelerator.backward(total, weight=tokens, reduction="sum")
                    close()
    assert not fault.where or fault.num_raised == 1, f"{cell}: the fault did not happen"
    limit, weights = transaction.size.limit, whole_weights(model)
    accelerator.free_memory()
    return {"losses": losses, "norms": list(norms.values()), "weights": weights, "limit": limit}


def play(layout: str, cells: list[Cell]) -> list[tuple[str, str, dict[str, float]]]:
    """(cell, what is wrong with it, how far it is from a run that never ran out)."""
    found: list[tuple[str, str, dict[str, float]]] = []
    known: dict[Cell, dict[str, Any]] = {}

    def reference(cell: Cell, start: int) -> dict[str, Any]:
        bare = replace(cell, where="", who=(), batch=0, pieces_from=start)
        if bare not in known:
            known[bare] = train(layout, bare)
        return known[bare]

    for cell in cells:
        try:
            got, same, free = train(layout, cell), reference(cell, cell.batch), reference(cell, 99)
            # After 16 clean batches a larger size is tried.
            assert got["limit"] == same["limit"], f"pieces of {got['limit']}"
            assert got["limit"] in (2, 3, 4)
            assert free["limit"] is None
            # A loss is told before memory runs out in these.
            is_told = cell.form == "function" and cell.where not in ("clip", "first step", "reserve")
            far = {"losses": 0.0, **difference(got | NONE, same | NONE)}
            if is_told:
                far["losses"] = max(abs(a - b) for a, b in zip(got["losses"], same["losses"], strict=True))
            assert not any(far.values()), f"not what the same pieces give: {far}"
            far = difference(got | NONE, free | NONE)
            if is_told:
                far["losses"] = max(abs(a / b - 1) for a, b in zip(got["losses"], free["losses"], strict=True))
            found.append((str(cell), "", far))
        except Exception:  # ranks may have parted: nothing comes after
            return [*found, (str(cell), traceback.format_exc(), {})]
    return found


def check(layout: str, world_size: int, cells: list[Cell], far: float = 1e-6) -> None:
    for rank, results in enumerate(run_ranks(play, world_size, layout, cells, timeout=240)):
        for cell, wrong, distance in results:
            assert not wrong, f"rank {rank}, {cell}:\n{wrong}"
            assert max(distance.values()) <= far, f"{cell}: {distance}"


# Of 37 rows the batch number 4 of a pass has 4 on rank 0 and 1 on rank 1: rank 1 has more pieces than rows.
PLACES = [
    Cell("before", (1,), batch=0), Cell("first step", (1,), batch=0),
    Cell("gather", (0,), batch=3, form="loop"), Cell("loss", (1,), batch=3, form="loop"), Cell("clip", (0, 1), batch=3, form="loop"),
    Cell("reserve", (0,), batch=3, form="loop"), Cell("clip", (0,), batch=3, form="loop"),
    Cell("forward", (1,), batch=3, steps=2), Cell("backward", (0,), batch=3, steps=2), Cell("clip", (1,), batch=3, steps=2),
    Cell("forward/late backward", (0, 1), batch=3, steps=2), Cell("late backward", (0,), batch=4, form="loop"),
]  # fmt: skip
CUT = ShardingOptions(reshard_after_forward=True, forward_prefetch=1, backward_prefetch=1, find_unused_parameters=True)
VARIANTS = [
    Cell("backward", (1,), batch=3, precision="bf16", label="bf16"),
    Cell("backward", (0,), batch=3, handlers=(ActivationCheckpointing(),), label="recomputed"),
    Cell("forward", (1,), batch=3, model="gpt, frozen"),
    Cell("backward", (1,), batch=3, handlers=(ShardingOptions(reshard_after_forward=False),), label="kept"),
    Cell("backward", (1,), batch=3, handlers=(CUT,), label="cut and ahead"),
]


ALONE = [
    Cell("backward", (1,), batch=3, handlers=(ShardingOptions(cpu_offload=True),), label="offloaded"),
    Cell("before", (1,), batch=3, backend="aot_eager"), Cell("late backward", (0,), batch=3, backend="aot_eager"),
    Cell("backward", (1,), batch=3, precision="fp16", label="fp16"),
    Cell("forward", (1,), batch=3, model="gpt, dropout", steps=2),
]  # fmt: skip


def test_at_every_place():
    check("fsdp", 2, PLACES)


def test_every_kind_of_model():
    # In bf16, how the sum over rows is split shows in the third digit.
    check("fsdp", 2, VARIANTS[1:])
    check("fsdp", 2, VARIANTS[:1], far=2e-3)


def test_other_features():
    """Bit for bit what the same pieces give: with offloaded parameters, compiled blocks, scaled losses, and masks drawn again."""
    check("fsdp", 2, ALONE[:-2])
    check("fsdp", 2, ALONE[-2:-1], far=2e-3)
    check("fsdp", 2, ALONE[-1:], far=1.0)  # other pieces draw other masks


def test_replicas_of_shards():
    check("hsdp=2", 4, [
        Cell("forward", (1,), batch=3), Cell("forward/late backward/gather", (0, 1, 3), batch=3),
        Cell("gather/backward", (2, 3), batch=3), Cell("clip", (3,), batch=3),
    ])  # fmt: skip


# ---------------------------------------------------------------- what cannot go on


def again_while_standing_in() -> list[str]:
    """Memory runs out on rank 1, and again in the first thing that it stands in for: an error on all ranks, and none waits."""
    cell = Cell("forward", (1,), batch=1)
    stand_in = FSDPUnit.stand_in

    def failing(self: FSDPUnit, *args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, again.")

    told = []
    FSDPUnit.stand_in = failing  # type: ignore[method-assign]
    try:
        train("fsdp", cell)
    except MemoryExhausted as error:
        told.append(str(error))
    finally:
        FSDPUnit.stand_in = stand_in  # type: ignore[method-assign]
    return told


def test_a_second_time_is_an_error_everywhere():
    for told in run_ranks(again_while_standing_in, 3, timeout=100):
        assert len(told) == 1
        assert "memory ran out on rank 1" in told[0], told
        assert "CUDA out of memory, again" in told[0], told


def one_row_is_the_end() -> None:
    accelerator = start("fsdp", Cell())
    model: Any = build(Task())
    optimizer: Any = optimizer_of(Task(), model)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, targets = rows()

    def run() -> None:
        for piece in accelerator.microbatches((ids[:3], targets[:3])):
            with accelerator.accumulate(model):
                loss = sum_of_losses(model, *piece)
                if accelerator.process_index == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                accelerator.backward(loss, weight=1.0, reduction="sum")
                optimizer.step()

    with pytest.raises(MemoryExhausted, match="rank 1 with pieces of one row"):
        run()
    accelerator.free_memory()


def what_cannot_stand_in_is_refused() -> None:
    for layout, handlers, match in (
        ("tp", [], "does not work with tp"),
        ("fsdp+tp=2", [], "does not work with tp"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            Accelerator(cpu=True, strategy=layout, microbatching="auto", kwargs_handlers=handlers)


SCENARIOS: list[Callable[[], None]] = [what_cannot_stand_in_is_refused, one_row_is_the_end]


def test_the_end_of_the_pieces():
    for rank, wrong in enumerate(run_ranks(each, 2, SCENARIOS, timeout=100)):
        assert not wrong, f"rank {rank}: {wrong}"


def through_the_trainer(folder: str) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """The Trainer's `auto_find_batch_size`, with a model that has room for two rows on rank 1."""
    os.environ["HEADWAY_STRATEGY"] = "fsdp"
    found = []
    for kind in (Net, Tight):
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, disable_tqdm=True, learning_rate=0.01, logging_steps=1, save_strategy="no",
            log_level="error", report_to="none", max_steps=4, per_device_train_batch_size=4, auto_find_batch_size=True,
            optim="sgd",
        )  # fmt: skip
        trainer = Trainer(kind(), arguments, train_dataset=Points(32), loss_function=cross_entropy)
        trainer.train()
        found.append((whole_weights(trainer.model), [e["loss"] for e in trainer.state.log_history if "loss" in e]))
    return found


def test_through_the_trainer(tmp_path):
    for (weights, losses), (tight, tight_losses) in run_ranks(through_the_trainer, 2, str(tmp_path), timeout=100):
        torch.testing.assert_close(tight, weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tight_losses, losses, rtol=1e-5, atol=1e-6)
        assert len(losses) == 4


# ---------------------------------------------------------------- the real thing

ROWS, WIDTH = 32768, 32


def limited(num_mib: int | None) -> dict[str, Any]:
    """Two updates, activations of about 90 MiB; the last rank may grow by `num_mib` of address space."""
    accelerator = start("fsdp", Cell())
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]
    model: Any = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(accelerator.process_index))
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for number in range(2):
        if number == 0 and num_mib is not None and accelerator.process_index == accelerator.num_processes - 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + (num_mib << 20)
            resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
        loss = accelerator.forward_backward(inputs, lambda x: model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": whole_weights(model), "losses": losses, "limit": transaction_of(accelerator).size.limit}


def test_a_real_limit_of_memory():
    free, tight = run_ranks(limited, 2, None), run_ranks(limited, 2, 60)
    assert [each["limit"] for each in free] == [None, None]
    assert len({each["limit"] for each in tight}) == 1
    assert tight[0]["limit"] in [ROWS // count for count in (2, 4, 8, 16)]
    for one, other in zip(tight, free):
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-4, atol=1e-6)


def train_with_failure(fails_in: str) -> list[float]:
    """Train three updates under fsdp. Rank 1 runs out of memory in the first loss function, before or after the model's forward."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, strategy="fsdp", mixed_precision="no", microbatching="auto")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    left = [accelerator.process_index == 1]

    def fail(place: str) -> None:
        if place == fails_in and left.pop() if left else False:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        fail("before")
        output = model(batch)
        fail("after")
        return output.square().mean()

    losses = []
    for batch in loader:
        losses.append(float(accelerator.reduce(accelerator.forward_backward(batch, compute_loss), "mean")))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_memory_may_run_out_before_the_first_forward() -> None:
    """The other ranks ask at the first forward whether all ranks make it. A rank that replays collectives answers yes."""
    whole, _ = run_ranks(train_with_failure, 2, "never", timeout=120)
    for place in ("before", "after"):
        for losses in run_ranks(train_with_failure, 2, place, timeout=120):
            assert losses == pytest.approx(whole, rel=1e-5)
