"""Pipelines = the hand-written loop on one process: losses, gradient norms and weights; and what they refuse, on all ranks alike."""

import contextlib
import importlib.util
import io
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    PipelineOptions,
    TorchDynamoPlugin,
    find_executable_batch_size,
    is_out_of_memory,
    set_seed,
)
from headway.errors import HeadwayError, PrepareError, StateError, UnsupportedError
from headway.layouts.pipeline import stage_forward as known
from tests.devices import ON_CPU
from tests.distributed import layouts
from tests.distributed.layouts import GPT, Curve, Task, by_hand, difference, each, prepared, seeded, squares, text
from tests.distributed.pipelines import as_function, whole_state
from tests.distributed.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
TOLERANCE = 3e-6
"""As for other layouts: float32 sums of other orders differ by so much."""


def four_blocks() -> nn.Module:
    return GPT(num_blocks=4)


def options(schedule: str, number: int | None = None, **given: Any) -> tuple[Any, ...]:
    return (PipelineOptions(schedule=schedule, num_microbatches=number, **given),)


PLAIN: dict[str, Task] = {
    "tied gpt": Task("gpt", updates=5, steps=1, seed_by_rank=True),
    "frozen first stage": Task("gpt, frozen", updates=4, handlers=options("gpipe", 3, split="blocks.1")),
    "llama": Task("llama", updates=4),
    "gemma": Task("gemma", updates=4),
    "tied gpt2": Task("gpt2", updates=6, handlers=(*options("gpipe", 2), ActivationCheckpointing())),
}
SCHEDULES: dict[str, Task] = {
    "gpipe": Task("gpt2", window=16, updates=4, handlers=options("gpipe", 3)),
    "1f1b": Task("llama, tied", window=16, updates=6, handlers=options("1f1b", 4)),
    "1f1b, frozen": Task("gpt, frozen", window=16, updates=3, handlers=options("1f1b", 4)),
    "interleaved": Task("four", window=16, updates=4, handlers=options("interleaved", 4)),
    "zero_bubble": Task("four", window=16, updates=4, handlers=options("zero_bubble", 4)),
    "zbv": Task("four", window=16, updates=4, handlers=options("zbv", 4)),
}


def train(tasks: dict[str, Task], functions: dict[str, Task], layout: str) -> dict[str, Curve]:
    layouts.MODELS["four"] = four_blocks
    found = {}
    for name, task in tasks.items():
        found[name] = prepared(task, layout)
        found[name]["weights"] = {n: w for n, w in found[name]["weights"].items() if not w.is_meta}
    return found | {name: as_function(task, layout) for name, task in functions.items()}


def compare(by_rank: list[dict[str, Curve]], tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layouts.MODELS, "four", four_blocks)
    for name, task in tasks.items():
        expected = by_hand(task)
        for rank, curves in enumerate(by_rank):
            got = curves[name]
            here = {n: w for n, w in expected["weights"].items() if n in got["weights"]}
            assert got["weights"].keys() == here.keys()
            if not here:  # whole weights are rank 0's
                got["weights"], here = {"": torch.zeros(1)}, {"": torch.zeros(1)}
            found = difference({**expected, "weights": here}, got)
            assert max(found["losses"], found["norms"]) < TOLERANCE, (name, rank, found)
            assert found["weights"] < 2e-3, (name, rank, found)
        if name in SCHEDULES:
            assert by_rank[0][name]["weights"].keys() == expected["weights"].keys()


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize(("plain", "functions"), [(PLAIN, {}), ({}, SCHEDULES)], ids=["plain", "schedules"])
def test_two_stages_reproduce_the_hand_written_loop(plain, functions, monkeypatch):
    by_rank = run_ranks(train, 2, plain, functions, "pp", timeout=280)
    compare(by_rank, plain | functions, monkeypatch)


@pytest.mark.on_device
def test_replicas_of_a_pipeline(monkeypatch):
    plain = {"tied gpt": Task("gpt", updates=4)}
    functions = {"1f1b": Task("gpt2", window=16, updates=4, handlers=options("1f1b", 2))}
    compare(run_ranks(train, 4, plain, functions, "ddp=2+pp=2", timeout=280), plain | functions, monkeypatch)


# ---------------------------------------------------------------- what is alike on all ranks


def begin(*handlers: Any, model: nn.Module | None = None, **given: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", kwargs_handlers=list(handlers), **given)
    model = seeded(0, lambda: GPT(num_blocks=2)) if model is None else model
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def refused(accelerator: Accelerator, kind: type[HeadwayError], part: str, act: Any) -> None:
    """The same error on both ranks, which can go on together."""
    with pytest.raises(kind) as caught:
        act()
    told = accelerator.collectives.gather_objects(str(caught.value))
    assert told[0] == told[1], told
    assert part in told[0], told


def evaluation() -> None:
    accelerator, model, _ = begin()
    plain = seeded(0, lambda: GPT(num_blocks=2))
    loader = accelerator.prepare(DataLoader(TensorDataset(text(rows=10)), batch_size=4))
    model.eval()
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics(model(ids)) for (ids,) in loader])
        expected = plain(text(rows=10))
    assert found.shape == expected.shape  # each sample once, on each rank
    assert torch.allclose(found, expected, atol=1e-6)
    accelerator.end_training()


def streams() -> None:
    """Dropout draws on each stage by itself, and what the script draws afterwards is alike."""
    accelerator, model, _ = begin(model=seeded(0, lambda: GPT(num_blocks=2, dropout=0.5)))
    torch.manual_seed(7)
    first, second = squares(model, text()).item(), squares(model, text()).item()
    assert first != second
    draws = accelerator.collectives.gather_objects((first, second, float(torch.rand(()))))
    assert draws[0] == draws[1]
    torch.manual_seed(7)
    assert squares(model, text()).item() == first
    accelerator.end_training()


class Drawing(nn.Module):
    """Draws on the host, as LayerDrop and masks of a model's own do."""

    def __init__(self, block: nn.Module, times: int) -> None:
        super().__init__()
        self.block, self.times = block, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * sum(random.random() + float(numpy.random.rand()) for _ in range(self.times))


def host_streams() -> None:
    """One stage draws more often than the other; what the script draws afterwards is alike, from every stream."""
    model = seeded(0, lambda: GPT(num_blocks=2))
    model.blocks[0], model.blocks[1] = Drawing(model.blocks[0], 1), Drawing(model.blocks[1], 3)
    accelerator, model, _ = begin(model=model)
    set_seed(7)
    before = torch.get_rng_state()
    losses = [squares(model, text()).item()]
    losses.append(accelerator.forward_backward(text(), lambda piece: squares(model, piece)).item())
    losses += [squares(model, text()).item()]
    assert len(set(losses)) == 3
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn from it
    draws = accelerator.collectives.gather_objects((losses, random.random(), float(numpy.random.rand())))
    assert draws[0] == draws[1], draws
    accelerator.end_training()


def one_backward() -> None:
    accelerator, model, _ = begin()
    out = model(text())
    accelerator.backward(out.square().mean())
    refused(accelerator, StateError, "twice", lambda: accelerator.backward(out.abs().mean()))
    accelerator.end_training()


def backwards_by_hand() -> None:
    """Two backwards before a step: what two stages share is summed once each."""
    accelerator, model, _ = begin()
    plain = seeded(0, lambda: GPT(num_blocks=2))
    for seed in (1, 2):
        accelerator.backward(squares(model, text(seed)))
        squares(plain, text(seed)).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert abs(float(norm) - float(expected)) < 1e-5 * float(expected)
    accelerator.end_training()


def schedules_need_functions() -> None:
    accelerator, model, _ = begin(*options("1f1b"))
    refused(accelerator, UnsupportedError, "forward_backward", lambda: model(text()))
    with torch.no_grad():
        assert model(text()).shape[0] == 2  # evaluation may be called
    accelerator.end_training()


def losses_that_need_more() -> None:
    accelerator, model, _ = begin()
    call = lambda piece: squares(model, piece) + squares(model, piece)  # noqa: E731
    refused(accelerator, UnsupportedError, "called twice", lambda: accelerator.forward_backward(text(rows=4), call))
    wrong = lambda piece: 1 / 0  # noqa: E731
    refused(
        accelerator, Exception, "division", lambda: _named(lambda: accelerator.forward_backward(text(rows=4), wrong))
    )
    loss = accelerator.forward_backward(text(rows=4), lambda piece: squares(model, piece))  # and it goes on
    assert torch.isfinite(loss)
    accelerator.end_training()


def _named(act: Any) -> None:
    try:
        act()
    except Exception as error:  # the rank on which it happened raises it as it is
        raise HeadwayError("division" if "division" in str(error) else repr(error)) from error


def weightless() -> None:
    """A micro-batch whose mean is one over nothing leaves no trace."""
    for schedule in ("gpipe", "zero_bubble"):
        accelerator, model, _ = begin(*options(schedule, 4), model=seeded(0, lambda: GPT(num_blocks=4)))
        plain, ids = seeded(0, lambda: GPT(num_blocks=4)), text(rows=8)
        targets = ids.clone()
        targets[2:4] = -100

        def mean(of: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(of(ids).flatten(0, 1), targets.flatten())

        loss = accelerator.forward_backward(
            (ids, targets), lambda piece: mean(model, *piece), weight=lambda piece: (piece[1] >= 0).sum()
        )
        expected = mean(plain, ids, targets)
        expected.backward()
        assert abs(loss.item() - expected.item()) < 2e-6
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        expected_norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        assert abs(norm - expected_norm) < 2e-6
        accelerator.end_training()


def evaluation_under_every_schedule() -> None:
    for schedule in ("interleaved", "zero_bubble", "zbv"):
        accelerator, model, _ = begin(*options(schedule, 4), model=seeded(0, lambda: GPT(num_blocks=4)))
        with torch.no_grad():
            expected = seeded(0, lambda: GPT(num_blocks=4))(text(rows=9))
            assert torch.allclose(model(text(rows=9)), expected, atol=1e-6)
        accelerator.end_training()


class Odd(GPT):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), lambda: 1


def odd_outputs() -> None:
    accelerator, model, _ = begin(model=seeded(0, lambda: Odd(num_blocks=2)))
    refused(accelerator, UnsupportedError, "cannot be sent", lambda: model(text()))
    accelerator.end_training()


class Skipping(GPT):
    """Its head sees the embedding, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))  # type: ignore[no-any-return]


def skipping() -> None:
    accelerator, model, _ = begin(model=seeded(0, lambda: Skipping(num_blocks=2, tied=False)))
    refused(accelerator, UnsupportedError, "tokens", lambda: model(text()))
    accelerator.end_training()
    model = seeded(0, lambda: Skipping(num_blocks=2, tied=False))
    plain = seeded(0, lambda: Skipping(num_blocks=2, tied=False))
    accelerator, model, _ = begin(PipelineOptions(first=("tokens",), last=("tokens",)), model=model)
    accelerator.backward(squares(model, text(rows=4)))
    squares(plain, text(rows=4)).backward()
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 1e9))
    assert abs(norm - expected) < 1e-5 * expected
    accelerator.end_training()


class Recomputing(GPT):
    """Checkpoints its blocks by itself."""

    reentrant = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def own_checkpoints() -> None:
    """A reentrant one would be left before it has a graph, and nothing before the head would learn."""
    accelerator, model, _ = begin(model=seeded(0, lambda: Recomputing(num_blocks=2)))
    refused(accelerator, UnsupportedError, "use_reentrant=False", lambda: model(text(rows=4)))
    as_function = lambda: accelerator.forward_backward(text(rows=4), lambda piece: squares(model, piece))  # noqa: E731
    refused(accelerator, UnsupportedError, "use_reentrant=False", as_function)
    with torch.no_grad():
        assert torch.isfinite(squares(model, text(rows=4)))
    model.reentrant, plain = False, seeded(0, lambda: Recomputing(num_blocks=2))
    plain.reentrant = False
    as_function()
    squares(plain, text(rows=4)).backward()
    same_norm(accelerator, model, plain)
    accelerator.end_training()


def freezing() -> None:
    """Between batches, in both directions: whether gradients travel back changes with it."""
    for schedule in ("gpipe", "1f1b"):
        accelerator, model, _ = begin(
            *options(schedule), model=seeded(0, lambda: Recomputing(num_blocks=2, tied=False))
        )
        plain = seeded(0, lambda: Recomputing(num_blocks=2, tied=False))
        for is_learning in (True, False, True):
            for one in (model, plain):
                one.tokens.requires_grad_(is_learning)
                one.blocks.requires_grad_(is_learning)
                one.reentrant = not is_learning  # no block learns: nothing is lost
                one.zero_grad()
            if schedule == "gpipe":
                accelerator.backward(squares(model, text(rows=4)))
            else:
                accelerator.forward_backward(text(rows=4), lambda piece: squares(model, piece))
            squares(plain, text(rows=4)).backward()
            same_norm(accelerator, model, plain)
            assert is_learning or all(p.grad is None for p in model.blocks.parameters())
        accelerator.end_training()


class Hungry(nn.Linear):
    """Runs out of memory with more than two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(x)


def out_of_memory() -> None:
    """In the micro-batch that goes ahead, on one rank: the others take it for what it is, however late that one says so."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", kwargs_handlers=list(options("gpipe", 1)))
    for place in (2, 3):  # the last rank's block, and what comes after the blocks
        tried, seen = [], []

        @find_executable_batch_size(starting_batch_size=4)
        def inner(batch_size: int) -> None:
            tried.append(batch_size)
            accelerator.free_memory()
            parts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
            model = seeded(0, lambda: nn.Sequential(nn.Linear(3, 3), *parts, nn.Linear(3, 1)))
            of, index = (model, 3) if place == 3 else (model[2], 0)
            of[index] = Hungry(3, of[index].out_features)
            model = accelerator.prepare(model)
            try:
                accelerator.backward(model(torch.ones(batch_size, 3)).sum())
            except Exception as error:
                seen.append((type(error).__name__, is_out_of_memory(error)))
                if is_out_of_memory(error):
                    time.sleep(0.3)
                raise

        inner()
        assert tried == [4, 2], (place, tried)
        mine = ("RuntimeError", True) if accelerator.process_index == 1 else ("PeerOutOfMemory", False)
        assert seen == [mine], (place, seen)
    accelerator.end_training()


def same_norm(accelerator: Accelerator, model: nn.Module, plain: nn.Module) -> None:
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 1e9))
    assert abs(norm - expected) < 1e-5 * expected, (norm, expected)


def changing_numbers() -> None:
    """More kinds of batches than are remembered, and in one batch more kinds of micro-batches."""
    known.CAPACITY = 2
    accelerator, model, _ = begin(*options("gpipe", 4))
    plain = seeded(0, lambda: GPT(num_blocks=2))
    for step in range(4):
        batch = {"x": text(rows=4), "step": step, "names": ["a", "b", "c", f"d{step}"]}
        loss = accelerator.forward_backward(batch, lambda piece: squares(model, piece["x"]))
        assert abs(loss.item() - squares(plain, text(rows=4)).item()) < 2e-6
    found = accelerator.strategy._pipe._known
    assert len(found) == 2
    known.CAPACITY = 256
    accelerator.end_training()


def not_finite() -> None:
    accelerator, model, optimizer = begin(on_non_finite="skip")
    before = whole_state(accelerator, model)
    with torch.no_grad():
        bad = 0.0 if accelerator.process_index == 0 else float("inf")
        model.norm.bias.data = model.norm.bias.data + bad if not model.norm.bias.is_meta else model.norm.bias.data
    with accelerator.accumulate(model):
        accelerator.backward(squares(model, text()))
        optimizer.step()
    assert optimizer.step_was_skipped
    after = whole_state(accelerator, model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "norm.bias")
    accelerator.end_training()


def other_objects() -> None:
    accelerator, model, _ = begin()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        accelerator.prepare(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="several models"):
        accelerator.prepare(GPT())
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert 0 < held < sum(p.numel() for p in model.parameters())
    before = squares(model, text()).item()
    accelerator.free_memory()
    with pytest.raises(UnsupportedError, match="was released"):
        model(text())
    assert squares(accelerator.prepare(model), text()).item() == before
    accelerator.end_training()
    with pytest.raises(PrepareError, match="a run that has ended"):
        begin(model=model)
    accelerator.end_training()


def half_precision() -> None:
    accelerator, model, optimizer = begin(mixed_precision="bf16")
    plain = seeded(0, lambda: GPT(num_blocks=2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = squares(plain, text(rows=8))
    loss = squares(model, text(rows=8))
    assert abs(loss.item() - expected.item()) < 5e-3
    accelerator.backward(loss)
    optimizer.step()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    accelerator.end_training()


def compiled_blocks() -> None:
    compiling = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator, model, _ = begin(dynamo_plugin=compiling)
    plain = seeded(0, lambda: GPT(num_blocks=2))
    accelerator.backward(squares(model, text(rows=8)))
    squares(plain, text(rows=8)).backward()
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert abs(norm - expected) < 1e-5 * expected
    accelerator.end_training()
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", kwargs_handlers=list(options("zbv")), dynamo_plugin=compiling)
    with pytest.raises(UnsupportedError, match="splits backward in two"):
        accelerator.prepare(GPT(num_blocks=4))
    accelerator.end_training()


def the_example() -> None:
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for schedule in ("1f1b", "zbv"):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            example.main(["--schedule", schedule, "--epochs", "2"])
        losses = [float(each) for each in re.findall(r"loss ([\d.]+)", told.getvalue())]
        assert len(losses) == (2 if os.environ["RANK"] == "0" else 0)
        assert losses[1:] <= losses[:1]


def checks() -> list[str]:
    return each(
        [
            evaluation, streams, host_streams, one_backward,
            backwards_by_hand, schedules_need_functions, losses_that_need_more, skipping,
            own_checkpoints, freezing, out_of_memory, changing_numbers,
            not_finite, other_objects, half_precision, compiled_blocks, the_example,
            weightless, evaluation_under_every_schedule, odd_outputs,
        ]
    )  # fmt: skip


@pytest.mark.slow
def test_what_all_ranks_see():
    for failed in run_ranks(checks, 2, timeout=300):
        assert not failed, "\n".join(failed)
