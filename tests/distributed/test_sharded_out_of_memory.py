"""Out of memory under FSDP and HSDP: the failed rank completes the others' collectives, and then all ranks repeat the batch.

Each cell is a run of eight updates in which memory runs out once, at a certain place on one or several ranks. It must be
exactly equal to a run that uses the final piece size from that batch on. It must be close to a run that never runs out.
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
    build_model,
    gather_weights,
    make_optimizer,
    make_rows,
    measure_differences,
    run_each,
    sum_losses,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_trainer import LimitedNet
from tests.unit.trainer.models import Net, Points, cross_entropy

UPDATES, BATCH = 8, 4
NONE: dict[str, Any] = {"losses": [0.0]}


@dataclass(frozen=True)
class Cell:
    """One run. Memory runs out in batch number `batch`, at `where` on each rank of `who`. An empty `where` means never."""

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
    """Raises an out-of-memory error once, while it is armed."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.where = dict(zip(cell.who, itertools.cycle(cell.where.split("/")))).get(rank, "")
        self.is_armed, self.num_raised = False, 0

    def trigger(self, place: str) -> None:
        if self.is_armed and place == self.where:
            self.is_armed, self.num_raised = False, self.num_raised + 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def add_hooks(self, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        block = model.blocks[1]
        model.register_forward_pre_hook(lambda *_: self.trigger("before"), prepend=True)
        block.register_forward_pre_hook(lambda *_: self.trigger("gather"), prepend=True)  # before FSDP's own hook
        block.up.register_forward_pre_hook(lambda *_: self.trigger("forward"))
        block.up.register_full_backward_pre_hook(lambda *_: self.trigger("backward"))
        model.blocks[0].first.register_full_backward_hook(lambda *_: self.trigger("late backward"))
        optimizer.optimizer.register_step_post_hook(lambda *_: self.trigger("first step"))
        strategy = accelerator.strategy
        clip, known = strategy.clip_gradients, get_transaction(accelerator)._get_optimizer_record(optimizer.optimizer)
        reserve = known.reserve_memory
        strategy.clip_gradients = lambda *args: (clip(*args), self.trigger("clip"))[0]  # type: ignore[method-assign, assignment]
        known.reserve_memory = lambda: (self.trigger("reserve"), reserve())[1]  # type: ignore[method-assign]


def get_transaction(accelerator: Accelerator) -> BatchTransaction:
    step = accelerator._training_step
    assert isinstance(step, PieceStep)
    return step.transaction


def make_accelerator(layout: str, cell: Cell) -> Accelerator:
    return Accelerator(
        cpu=True, strategy=layout, gradient_accumulation_steps=cell.steps, microbatching="auto", mixed_precision=cell.precision,
        on_non_finite="raise", dataloader_config=DataLoaderConfiguration(even_batches=False), kwargs_handlers=list(cell.handlers),
        dynamo_plugin=TorchDynamoPlugin(backend=cell.backend, use_regional_compilation=True) if cell.backend else None,
    )  # fmt: skip


def train(layout: str, cell: Cell) -> dict[str, Any]:
    """Make eight updates on ragged text, weighted by tokens and clipped. The last batches of an epoch differ between ranks."""
    accelerator = make_accelerator(layout, cell)
    task = Task(model=cell.model, optimizer="sgd")
    model: Any = build_model(task)
    optimizer: Any = make_optimizer(task, model)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fault, transaction = Fault(cell, accelerator.process_index), get_transaction(accelerator)
    fault.add_hooks(accelerator, model, optimizer)
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
                    lambda piece: sum_losses(model, *piece),
                    lambda piece: (piece[1] != PADDING).sum(),
                    "sum",
                )
                losses.append(loss.item())
                close()
                continue
            for piece in accelerator.microbatches((ids, targets)):
                with accelerator.accumulate(model):
                    tokens = int((piece[1] != PADDING).sum())
                    total = sum_losses(model, *piece)
                    fault.trigger("loss")
                    accelerator.backward(total, weight=tokens, reduction="sum")
                    close()
    assert not fault.where or fault.num_raised == 1, f"{cell}: the fault did not happen"
    limit, weights = transaction.size.limit, gather_weights(model)
    accelerator.free_memory()
    return {"losses": losses, "norms": list(norms.values()), "weights": weights, "limit": limit}


def run_cells(layout: str, cells: list[Cell]) -> list[tuple[str, str, dict[str, float]]]:
    """Return for each cell its name, the traceback of a failure, and its difference from a run that never ran out of memory."""
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
            # After 16 batches without a failure, a larger piece size is tried.
            assert got["limit"] == same["limit"], f"pieces of {got['limit']}"
            assert got["limit"] in (2, 3, 4)
            assert free["limit"] is None
            # At these places, a loss has been returned before memory runs out.
            has_exact_losses = cell.form == "function" and cell.where not in ("clip", "first step", "reserve")
            differences = {"losses": 0.0, **measure_differences(got | NONE, same | NONE)}
            if has_exact_losses:
                differences["losses"] = max(abs(a - b) for a, b in zip(got["losses"], same["losses"], strict=True))
            assert not any(differences.values()), f"differs from a run with the same pieces: {differences}"
            differences = measure_differences(got | NONE, free | NONE)
            if has_exact_losses:
                differences["losses"] = max(abs(a / b - 1) for a, b in zip(got["losses"], free["losses"], strict=True))
            found.append((str(cell), "", differences))
        except Exception:  # ranks may be out of step now, so nothing else can run
            return [*found, (str(cell), traceback.format_exc(), {})]
    return found


def check_cells(layout: str, world_size: int, cells: list[Cell], tolerance: float = 1e-6) -> None:
    for rank, results in enumerate(run_ranks(run_cells, world_size, layout, cells, timeout=240)):
        for cell, failures, distance in results:
            assert not failures, f"rank {rank}, {cell}:\n{failures}"
            assert max(distance.values()) <= tolerance, f"{cell}: {distance}"


# Of an epoch's 37 rows, batch number 4 has 4 on rank 0 and 1 on rank 1, so rank 1 has more pieces than rows.
PLACES = [
    Cell("before", (1,), batch=0), Cell("first step", (1,), batch=0),
    Cell("gather", (0,), batch=3, form="loop"), Cell("loss", (1,), batch=3, form="loop"), Cell("clip", (0, 1), batch=3, form="loop"),
    Cell("reserve", (0,), batch=3, form="loop"), Cell("clip", (0,), batch=3, form="loop"),
    Cell("forward", (1,), batch=3, steps=2), Cell("backward", (0,), batch=3, steps=2), Cell("clip", (1,), batch=3, steps=2),
    Cell("forward/late backward", (0, 1), batch=3, steps=2), Cell("late backward", (0,), batch=4, form="loop"),
]  # fmt: skip
PREFETCHED = ShardingOptions(
    reshard_after_forward=True, forward_prefetch=1, backward_prefetch=1, find_unused_parameters=True
)
VARIANTS = [
    Cell("backward", (1,), batch=3, precision="bf16", label="bf16"),
    Cell("backward", (0,), batch=3, handlers=(ActivationCheckpointing(),), label="recomputed"),
    Cell("forward", (1,), batch=3, model="gpt, frozen"),
    Cell("backward", (1,), batch=3, handlers=(ShardingOptions(reshard_after_forward=False),), label="kept"),
    Cell("backward", (1,), batch=3, handlers=(PREFETCHED,), label="cut and ahead"),
]


OTHER_FEATURES = [
    Cell("backward", (1,), batch=3, handlers=(ShardingOptions(cpu_offload=True),), label="offloaded"),
    Cell("before", (1,), batch=3, backend="aot_eager"), Cell("late backward", (0,), batch=3, backend="aot_eager"),
    Cell("backward", (1,), batch=3, precision="fp16", label="fp16"),
    Cell("forward", (1,), batch=3, model="gpt, dropout", steps=2),
]  # fmt: skip


def test_failure_at_every_place_gives_the_weights_of_smaller_pieces():
    check_cells("fsdp", 2, PLACES)


def test_failure_with_every_kind_of_model_gives_the_weights_of_smaller_pieces():
    # In bf16, splitting the sum over rows changes the third digit.
    check_cells("fsdp", 2, VARIANTS[1:])
    check_cells("fsdp", 2, VARIANTS[:1], tolerance=2e-3)
    # Its gradient norms are larger.
    check_cells("fsdp", 2, [Cell("late backward", (1,), batch=3, steps=2, model="gpt, scaled")], tolerance=3e-6)


def test_failure_with_other_features_gives_the_weights_of_smaller_pieces():
    """Offloaded parameters, compiled blocks, scaled losses and redrawn dropout masks give the same results as the same pieces."""
    check_cells("fsdp", 2, OTHER_FEATURES[:-2])
    check_cells("fsdp", 2, OTHER_FEATURES[-2:-1], tolerance=2e-3)
    check_cells("fsdp", 2, OTHER_FEATURES[-1:], tolerance=1.0)  # other pieces draw other masks


def test_failure_with_replicated_shards_gives_the_weights_of_smaller_pieces():
    check_cells("hsdp=2", 4, [
        Cell("forward", (1,), batch=3), Cell("forward/late backward/gather", (0, 1, 3), batch=3),
        Cell("gather/backward", (2, 3), batch=3), Cell("clip", (3,), batch=3),
    ])  # fmt: skip


# ---------------------------------------------------------------- failures that cannot be repeated


def fail_again_in_stand_in() -> list[str]:
    """Run out of memory on rank 1, and again in the first collective that it completes. All ranks get an error, and none waits."""
    cell = Cell("forward", (1,), batch=1)
    join_with_neutral_values = FSDPUnit.join_with_neutral_values

    def failing(self: FSDPUnit, *args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, again.")

    messages = []
    FSDPUnit.join_with_neutral_values = failing  # type: ignore[method-assign]
    try:
        train("fsdp", cell)
    except MemoryExhausted as error:
        messages.append(str(error))
    finally:
        FSDPUnit.join_with_neutral_values = join_with_neutral_values  # type: ignore[method-assign]
    return messages


def test_second_failure_is_an_error_on_all_ranks():
    for messages in run_ranks(fail_again_in_stand_in, 3, timeout=100):
        assert len(messages) == 1
        assert "memory ran out on rank 1" in messages[0], messages
        assert "CUDA out of memory, again" in messages[0], messages


def failure_with_one_row_is_an_error() -> None:
    accelerator = make_accelerator("fsdp", Cell())
    model: Any = build_model(Task())
    optimizer: Any = make_optimizer(Task(), model)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, targets = make_rows()

    def run() -> None:
        for piece in accelerator.microbatches((ids[:3], targets[:3])):
            with accelerator.accumulate(model):
                loss = sum_losses(model, *piece)
                if accelerator.process_index == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                accelerator.backward(loss, weight=1.0, reduction="sum")
                optimizer.step()

    with pytest.raises(MemoryExhausted, match="rank 1 with micro-batches of one row"):
        run()
    accelerator.free_memory()


def tensor_parallelism_is_rejected() -> None:
    for layout, handlers, match in (
        ("tp", [], "does not work with tp"),
        ("fsdp+tp=2", [], "does not work with tp"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            Accelerator(cpu=True, strategy=layout, microbatching="auto", kwargs_handlers=handlers)


SCENARIOS: list[Callable[[], None]] = [tensor_parallelism_is_rejected, failure_with_one_row_is_an_error]


def test_unsupported_layouts_and_pieces_of_one_row_raise_errors():
    for rank, failures in enumerate(run_ranks(run_each, 2, SCENARIOS, timeout=100)):
        assert not failures, f"rank {rank}: {failures}"


def train_with_trainer(folder: str) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """Train with the Trainer's `auto_find_batch_size`, with a model that fits only two rows on rank 1."""
    os.environ["HEADWAY_STRATEGY"] = "fsdp"
    found = []
    for kind in (Net, LimitedNet):
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, disable_tqdm=True, learning_rate=0.01, logging_steps=1, save_strategy="no",
            log_level="error", report_to="none", max_steps=4, per_device_train_batch_size=4, auto_find_batch_size=True,
            optim="sgd",
        )  # fmt: skip
        trainer = Trainer(kind(), arguments, train_dataset=Points(32), loss_function=cross_entropy)
        trainer.train()
        found.append((gather_weights(trainer.model), [e["loss"] for e in trainer.state.log_history if "loss" in e]))
    return found


def test_trainer_finds_a_batch_size_with_sharded_models(tmp_path):
    for (weights, losses), (tight, tight_losses) in run_ranks(train_with_trainer, 2, str(tmp_path), timeout=100):
        torch.testing.assert_close(tight, weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tight_losses, losses, rtol=1e-5, atol=1e-6)
        assert len(losses) == 4


# ---------------------------------------------------------------- real memory limits

ROWS, WIDTH = 32768, 32


def train_with_memory_limit(num_mib: int | None) -> dict[str, Any]:
    """Make two updates whose activations take about 90 MiB. The last rank's address space may grow by `num_mib` MiB."""
    accelerator = make_accelerator("fsdp", Cell())
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
    return {"weights": gather_weights(model), "losses": losses, "limit": get_transaction(accelerator).size.limit}


def test_ranks_with_too_little_memory_reach_the_same_weights():
    free, tight = run_ranks(train_with_memory_limit, 2, None), run_ranks(train_with_memory_limit, 2, 60)
    assert [each["limit"] for each in free] == [None, None]
    assert len({each["limit"] for each in tight}) == 1
    assert tight[0]["limit"] in [ROWS // count for count in (2, 4, 8, 16)]
    for one, other in zip(tight, free):
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-4, atol=1e-6)


def train_with_failure(fails_in: str) -> list[float]:
    """Train three updates under fsdp. Rank 1 runs out of memory in the first loss function, before or after the forward pass."""
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


def test_memory_can_run_out_before_the_first_forward() -> None:
    """At the first forward, the other ranks check that all ranks take part. A rank that repeats collectives confirms it."""
    whole, _ = run_ranks(train_with_failure, 2, "never", timeout=120)
    for place in ("before", "after"):
        for losses in run_ranks(train_with_failure, 2, place, timeout=120):
            assert losses == pytest.approx(whole, rel=1e-5)
