"""Pipelines match the hand-written loop on one process, and their errors are the same on all ranks."""

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
from headway.layouts.pipeline.strategy import PipelineStrategy
from tests.devices import ON_CPU
from tests.distributed import layouts
from tests.distributed.layouts import (
    GPT,
    Curve,
    Task,
    build_seeded,
    make_tokens,
    mean_square,
    measure_differences,
    run_each,
    train_by_hand,
    train_prepared,
)
from tests.distributed.pipelines import gather_state, train_with_forward_backward
from tests.distributed.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
TOLERANCE = 3e-6
"""As for other layouts: float32 sums in another order differ by up to this value."""


def make_four_blocks() -> nn.Module:
    return GPT(num_blocks=4)


def make_options(schedule: str, number: int | None = None, **given: Any) -> tuple[Any, ...]:
    return (PipelineOptions(schedule=schedule, num_microbatches=number, **given),)


CALL_TASKS: dict[str, Task] = {
    "tied gpt": Task("gpt", updates=5, steps=1, seed_by_rank=True),
    "frozen first stage": Task("gpt, frozen", updates=4, handlers=make_options("gpipe", 3, split="blocks.1")),
    "llama": Task("llama", updates=4),
    "gemma": Task("gemma", updates=4),
    "tied gpt2": Task("gpt2", updates=6, handlers=(*make_options("gpipe", 2), ActivationCheckpointing())),
}
SCHEDULE_TASKS: dict[str, Task] = {
    "gpipe": Task("gpt2", window=16, updates=4, handlers=make_options("gpipe", 3)),
    "1f1b": Task("llama, tied", window=16, updates=6, handlers=make_options("1f1b", 4)),
    "1f1b, frozen": Task("gpt, frozen", window=16, updates=3, handlers=make_options("1f1b", 4)),
    "interleaved": Task("four", window=16, updates=4, handlers=make_options("interleaved", 4)),
    "zero_bubble": Task("four", window=16, updates=4, handlers=make_options("zero_bubble", 4)),
    "zbv": Task("four", window=16, updates=4, handlers=make_options("zbv", 4)),
}


def train(tasks: dict[str, Task], functions: dict[str, Task], layout: str) -> dict[str, Curve]:
    layouts.MODELS["four"] = make_four_blocks
    found = {}
    for name, task in tasks.items():
        found[name] = train_prepared(task, layout)
        found[name]["weights"] = {n: w for n, w in found[name]["weights"].items() if not w.is_meta}
    return found | {name: train_with_forward_backward(task, layout) for name, task in functions.items()}


def compare(by_rank: list[dict[str, Curve]], tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layouts.MODELS, "four", make_four_blocks)
    for name, task in tasks.items():
        expected = train_by_hand(task)
        for rank, curves in enumerate(by_rank):
            got = curves[name]
            here = {n: w for n, w in expected["weights"].items() if n in got["weights"]}
            assert got["weights"].keys() == here.keys()
            if not here:  # only rank 0 has whole weights
                got["weights"], here = {"": torch.zeros(1)}, {"": torch.zeros(1)}
            found = measure_differences({**expected, "weights": here}, got)
            assert max(found["losses"], found["norms"]) < TOLERANCE, (name, rank, found)
            assert found["weights"] < 2e-3, (name, rank, found)
        if name in SCHEDULE_TASKS:
            assert by_rank[0][name]["weights"].keys() == expected["weights"].keys()


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize(("plain", "functions"), [(CALL_TASKS, {}), ({}, SCHEDULE_TASKS)], ids=["plain", "schedules"])
def test_two_stages_match_the_hand_written_loop(plain, functions, monkeypatch):
    by_rank = run_ranks(train, 2, plain, functions, "pp", timeout=280)
    compare(by_rank, plain | functions, monkeypatch)


@pytest.mark.on_device
def test_replicated_pipelines_match_the_hand_written_loop(monkeypatch):
    plain = {"tied gpt": Task("gpt", updates=4)}
    functions = {"1f1b": Task("gpt2", window=16, updates=4, handlers=make_options("1f1b", 2))}
    compare(run_ranks(train, 4, plain, functions, "ddp=2+pp=2", timeout=280), plain | functions, monkeypatch)


# ---------------------------------------------------------------- scenarios, equal on all ranks


def prepare_training(*handlers: Any, model: nn.Module | None = None, **given: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", kwargs_handlers=list(handlers), **given)
    model = build_seeded(0, lambda: GPT(num_blocks=2)) if model is None else model
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def assert_same_error(accelerator: Accelerator, kind: type[HeadwayError], part: str, act: Any) -> None:
    """Assert that `act` raises the same error on both ranks, and that training can continue."""
    with pytest.raises(kind) as exc_info:
        act()
    output = accelerator.collectives.gather_objects(str(exc_info.value))
    assert output[0] == output[1], output
    assert part in output[0], output


def evaluation() -> None:
    accelerator, model, _ = prepare_training()
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    loader = accelerator.prepare(DataLoader(TensorDataset(make_tokens(rows=10)), batch_size=4))
    model.eval()
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics(model(ids)) for (ids,) in loader])
        expected = plain(make_tokens(rows=10))
    assert found.shape == expected.shape  # each sample once, on each rank
    assert torch.allclose(found, expected, atol=1e-6)
    accelerator.end_training()


def random_states() -> None:
    """Each stage draws its own dropout masks, but the script's later random numbers are equal on all ranks."""
    accelerator, model, _ = prepare_training(model=build_seeded(0, lambda: GPT(num_blocks=2, dropout=0.5)))
    torch.manual_seed(7)
    first, second = mean_square(model, make_tokens()).item(), mean_square(model, make_tokens()).item()
    assert first != second
    draws = accelerator.collectives.gather_objects((first, second, float(torch.rand(()))))
    assert draws[0] == draws[1]
    torch.manual_seed(7)
    assert mean_square(model, make_tokens()).item() == first
    accelerator.end_training()


class HostRandomBlock(nn.Module):
    """Block that draws random numbers on the host, as LayerDrop does."""

    def __init__(self, block: nn.Module, times: int) -> None:
        super().__init__()
        self.block, self.times = block, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * sum(random.random() + float(numpy.random.rand()) for _ in range(self.times))


def host_random_states() -> None:
    """One stage draws more host random numbers than the other, but the script's later ones are equal on all ranks."""
    model = build_seeded(0, lambda: GPT(num_blocks=2))
    model.blocks[0], model.blocks[1] = HostRandomBlock(model.blocks[0], 1), HostRandomBlock(model.blocks[1], 3)
    accelerator, model, _ = prepare_training(model=model)
    set_seed(7)
    before = torch.get_rng_state()
    losses = [mean_square(model, make_tokens()).item()]
    losses.append(accelerator.forward_backward(make_tokens(), lambda piece: mean_square(model, piece)).item())
    losses += [mean_square(model, make_tokens()).item()]
    assert len(set(losses)) == 3
    assert torch.equal(torch.get_rng_state(), before)  # no number was drawn from this state
    draws = accelerator.collectives.gather_objects((losses, random.random(), float(numpy.random.rand())))
    assert draws[0] == draws[1], draws
    accelerator.end_training()


def second_backward_of_one_forward() -> None:
    accelerator, model, _ = prepare_training()
    out = model(make_tokens())
    accelerator.backward(out.square().mean())
    assert_same_error(accelerator, StateError, "twice", lambda: accelerator.backward(out.abs().mean()))
    accelerator.end_training()


def two_backward_passes_per_step() -> None:
    """After two backward passes before a step, the gradients of tied weights are summed once for each pass."""
    accelerator, model, _ = prepare_training()
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    for seed in (1, 2):
        accelerator.backward(mean_square(model, make_tokens(seed)))
        mean_square(plain, make_tokens(seed)).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert abs(float(norm) - float(expected)) < 1e-5 * float(expected)
    accelerator.end_training()


def schedules_need_functions() -> None:
    accelerator, model, _ = prepare_training(*make_options("1f1b"))
    assert_same_error(accelerator, UnsupportedError, "forward_backward", lambda: model(make_tokens()))
    with torch.no_grad():
        assert model(make_tokens()).shape[0] == 2  # evaluation can call the model directly
    accelerator.end_training()


def unsupported_losses() -> None:
    accelerator, model, _ = prepare_training()
    call = lambda piece: mean_square(model, piece) + mean_square(model, piece)  # noqa: E731
    assert_same_error(
        accelerator, UnsupportedError, "called twice", lambda: accelerator.forward_backward(make_tokens(rows=4), call)
    )
    wrong = lambda piece: 1 / 0  # noqa: E731
    assert_same_error(
        accelerator,
        Exception,
        "division",
        lambda: _raise_named_error(lambda: accelerator.forward_backward(make_tokens(rows=4), wrong)),
    )
    loss = accelerator.forward_backward(
        make_tokens(rows=4), lambda piece: mean_square(model, piece)
    )  # training can continue
    assert torch.isfinite(loss)
    accelerator.end_training()


def _raise_named_error(act: Any) -> None:
    try:
        act()
    except Exception as error:  # on the rank where it happened, the error is the original one
        raise HeadwayError("division" if "division" in str(error) else repr(error)) from error


def micro_batch_without_weight() -> None:
    """A micro-batch whose mean loss divides by zero has no effect."""
    for schedule in ("gpipe", "zero_bubble"):
        accelerator, model, _ = prepare_training(
            *make_options(schedule, 4), model=build_seeded(0, lambda: GPT(num_blocks=4))
        )
        plain, ids = build_seeded(0, lambda: GPT(num_blocks=4)), make_tokens(rows=8)
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
        accelerator, model, _ = prepare_training(
            *make_options(schedule, 4), model=build_seeded(0, lambda: GPT(num_blocks=4))
        )
        with torch.no_grad():
            expected = build_seeded(0, lambda: GPT(num_blocks=4))(make_tokens(rows=9))
            assert torch.allclose(model(make_tokens(rows=9)), expected, atol=1e-6)
        accelerator.end_training()


class OddOutputGPT(GPT):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), lambda: 1


def odd_outputs() -> None:
    accelerator, model, _ = prepare_training(model=build_seeded(0, lambda: OddOutputGPT(num_blocks=2)))
    assert_same_error(accelerator, UnsupportedError, "cannot be sent", lambda: model(make_tokens()))
    accelerator.end_training()


class SkipConnectionGPT(GPT):
    """GPT whose head also uses the embedding."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))  # type: ignore[no-any-return]


def skip_connections() -> None:
    accelerator, model, _ = prepare_training(model=build_seeded(0, lambda: SkipConnectionGPT(num_blocks=2, tied=False)))
    assert_same_error(accelerator, UnsupportedError, "tokens", lambda: model(make_tokens()))
    accelerator.end_training()
    model = build_seeded(0, lambda: SkipConnectionGPT(num_blocks=2, tied=False))
    plain = build_seeded(0, lambda: SkipConnectionGPT(num_blocks=2, tied=False))
    accelerator, model, _ = prepare_training(PipelineOptions(first=("tokens",), last=("tokens",)), model=model)
    accelerator.backward(mean_square(model, make_tokens(rows=4)))
    mean_square(plain, make_tokens(rows=4)).backward()
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 1e9))
    assert abs(norm - expected) < 1e-5 * expected
    accelerator.end_training()


class CheckpointedGPT(GPT):
    """GPT that checkpoints its blocks itself."""

    reentrant = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def own_checkpoints() -> None:
    """Reentrant checkpoints would leave everything before the head without gradients, so they are an error."""
    accelerator, model, _ = prepare_training(model=build_seeded(0, lambda: CheckpointedGPT(num_blocks=2)))
    assert_same_error(accelerator, UnsupportedError, "use_reentrant=False", lambda: model(make_tokens(rows=4)))
    as_function = lambda: accelerator.forward_backward(make_tokens(rows=4), lambda piece: mean_square(model, piece))  # noqa: E731
    assert_same_error(accelerator, UnsupportedError, "use_reentrant=False", as_function)
    with torch.no_grad():
        assert torch.isfinite(mean_square(model, make_tokens(rows=4)))
    model.reentrant, plain = False, build_seeded(0, lambda: CheckpointedGPT(num_blocks=2))
    plain.reentrant = False
    as_function()
    mean_square(plain, make_tokens(rows=4)).backward()
    compare_norms(accelerator, model, plain)
    accelerator.end_training()


def freezing_between_batches() -> None:
    """Freezing and unfreezing between batches changes whether gradients are sent back to the first stage."""
    for schedule in ("gpipe", "1f1b"):
        accelerator, model, _ = prepare_training(
            *make_options(schedule), model=build_seeded(0, lambda: CheckpointedGPT(num_blocks=2, tied=False))
        )
        plain = build_seeded(0, lambda: CheckpointedGPT(num_blocks=2, tied=False))
        for is_learning in (True, False, True):
            for one in (model, plain):
                one.tokens.requires_grad_(is_learning)
                one.blocks.requires_grad_(is_learning)
                one.reentrant = not is_learning  # with no trainable block, reentrant checkpoints lose nothing
                one.zero_grad()
            if schedule == "gpipe":
                accelerator.backward(mean_square(model, make_tokens(rows=4)))
            else:
                accelerator.forward_backward(make_tokens(rows=4), lambda piece: mean_square(model, piece))
            mean_square(plain, make_tokens(rows=4)).backward()
            compare_norms(accelerator, model, plain)
            assert is_learning or all(p.grad is None for p in model.blocks.parameters())
        accelerator.end_training()


class FailingLinear(nn.Linear):
    """Linear layer that runs out of memory with more than two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(x)


def out_of_memory() -> None:
    """Memory runs out on one rank, in the first micro-batch. The other rank recognizes that, even if it hears of it late."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", kwargs_handlers=list(make_options("gpipe", 1)))
    for place in (2, 3):  # the last rank's block, and the layer after the blocks
        tried, seen = [], []

        @find_executable_batch_size(starting_batch_size=4)
        def inner(batch_size: int) -> None:
            tried.append(batch_size)
            accelerator.free_memory()
            parts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
            model = build_seeded(0, lambda: nn.Sequential(nn.Linear(3, 3), *parts, nn.Linear(3, 1)))
            of, index = (model, 3) if place == 3 else (model[2], 0)
            of[index] = FailingLinear(3, of[index].out_features)
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


def compare_norms(accelerator: Accelerator, model: nn.Module, plain: nn.Module) -> None:
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 1e9))
    assert abs(norm - expected) < 1e-5 * expected, (norm, expected)


def changing_batches() -> None:
    """A run uses more kinds of batches than the cache holds, and even more kinds of micro-batches within one batch."""
    known.CAPACITY = 2
    accelerator, model, _ = prepare_training(*make_options("gpipe", 4))
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    for step in range(4):
        batch = {"x": make_tokens(rows=4), "step": step, "names": ["a", "b", "c", f"d{step}"]}
        loss = accelerator.forward_backward(batch, lambda piece: mean_square(model, piece["x"]))
        assert abs(loss.item() - mean_square(plain, make_tokens(rows=4)).item()) < 2e-6
    assert isinstance(accelerator.strategy, PipelineStrategy)
    assert len(accelerator.strategy._runner._activations) == 2
    known.CAPACITY = 256
    accelerator.end_training()


def batches_split_by_a_function() -> None:
    """`split` slices a batch whose rows have different numbers of offsets, which are all in one tensor."""
    accelerator, model, _ = prepare_training(*make_options("gpipe", 4))
    plain, ids = build_seeded(0, lambda: GPT(num_blocks=2)), make_tokens(rows=4)
    counts, offsets = torch.tensor([1, 3, 0, 2]), torch.arange(6.0)

    def split(batch: Any, start: int, stop: int) -> Any:
        ends = [0, *batch["counts"].cumsum(0).tolist()]
        return {
            "ids": batch["ids"][start:stop],
            "counts": batch["counts"][start:stop],
            "offsets": batch["offsets"][ends[start] : ends[stop]],
        }

    def compute_loss(of: nn.Module, piece: Any) -> torch.Tensor:
        owners = torch.repeat_interleave(piece["counts"])
        shift = torch.zeros(len(piece["ids"])).index_add(0, owners, piece["offsets"])
        return (of(piece["ids"]) - shift[:, None, None]).square().mean()

    batch = {"ids": ids, "counts": counts, "offsets": offsets}
    loss = accelerator.forward_backward(batch, lambda piece: compute_loss(model, piece), split=split)
    expected = compute_loss(plain, batch)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 2e-5
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected_norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert abs(norm - expected_norm) < 1e-5 * expected_norm
    with pytest.raises(UnsupportedError, match=r"Use accelerator.forward_backward\(batch, fn, split=split\)"):
        next(iter(accelerator.microbatches(batch, split=split)))
    accelerator.end_training()


def not_finite() -> None:
    accelerator, model, optimizer = prepare_training(on_non_finite="skip")
    before = gather_state(accelerator, model)
    with torch.no_grad():
        bad = 0.0 if accelerator.process_index == 0 else float("inf")
        model.norm.bias.data = model.norm.bias.data + bad if not model.norm.bias.is_meta else model.norm.bias.data
    with accelerator.accumulate(model):
        accelerator.backward(mean_square(model, make_tokens()))
        optimizer.step()
    assert optimizer.step_was_skipped
    after = gather_state(accelerator, model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "norm.bias")
    accelerator.end_training()


def other_objects() -> None:
    accelerator, model, _ = prepare_training()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        accelerator.prepare(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="several models"):
        accelerator.prepare(GPT())
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert 0 < held < sum(p.numel() for p in model.parameters())
    before = mean_square(model, make_tokens()).item()
    accelerator.free_memory()
    with pytest.raises(UnsupportedError, match="was released"):
        model(make_tokens())
    assert mean_square(accelerator.prepare(model), make_tokens()).item() == before
    accelerator.end_training()
    with pytest.raises(PrepareError, match="a run that has ended"):
        prepare_training(model=model)
    accelerator.end_training()


def half_precision() -> None:
    accelerator, model, optimizer = prepare_training(mixed_precision="bf16")
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = mean_square(plain, make_tokens(rows=8))
    loss = mean_square(model, make_tokens(rows=8))
    assert abs(loss.item() - expected.item()) < 5e-3
    accelerator.backward(loss)
    optimizer.step()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    accelerator.end_training()


def compiled_blocks() -> None:
    compiling = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator, model, _ = prepare_training(dynamo_plugin=compiling)
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    accelerator.backward(mean_square(model, make_tokens(rows=8)))
    mean_square(plain, make_tokens(rows=8)).backward()
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert abs(norm - expected) < 1e-5 * expected
    accelerator.end_training()
    accelerator = Accelerator(
        cpu=ON_CPU, strategy="pp", kwargs_handlers=list(make_options("zbv")), dynamo_plugin=compiling
    )
    with pytest.raises(UnsupportedError, match="splits backward in two"):
        accelerator.prepare(GPT(num_blocks=4))
    accelerator.end_training()


def pipeline_example() -> None:
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for schedule in ("1f1b", "zbv"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            example.main(["--schedule", schedule, "--epochs", "2"])
        losses = [float(each) for each in re.findall(r"loss ([\d.]+)", output.getvalue())]
        assert len(losses) == (2 if os.environ["RANK"] == "0" else 0)
        assert losses[1:] <= losses[:1]


def change_length_outside_of_the_batch(schedule: str) -> str:
    """Train on ever other lengths, which the batch does not contain, and return this rank's error."""
    accelerator, model, _ = prepare_training(*make_options(schedule, 2))
    plain = build_seeded(0, lambda: GPT(num_blocks=2))
    for length in (4, 6):  # in the batch, the length is part of its kind
        loss = accelerator.forward_backward(
            (make_tokens(rows=4), length), lambda piece: mean_square(model, piece[0][:, : piece[1]])
        )
        assert abs(loss.item() - mean_square(plain, make_tokens(rows=4)[:, :length]).item()) < 2e-6
    try:
        for length in (6, 4):
            accelerator.forward_backward(
                make_tokens(rows=4), lambda piece, length=length: mean_square(model, piece[:, :length])
            )
    except (UnsupportedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_output_of_another_shape_than_expected_is_an_error(schedule):
    first, _ = run_ranks(change_length_outside_of_the_batch, 2, schedule)  # the second one loses its connection
    assert "stage 0 of the pipeline returned tensors of shapes" in first
    assert "put it into the batch" in first


def run_scenarios() -> list[str]:
    return run_each(
        [
            evaluation, random_states, host_random_states, second_backward_of_one_forward,
            two_backward_passes_per_step, schedules_need_functions, unsupported_losses, skip_connections,
            own_checkpoints, freezing_between_batches, out_of_memory, changing_batches,
            batches_split_by_a_function, not_finite, other_objects, half_precision, compiled_blocks, pipeline_example,
            micro_batch_without_weight, evaluation_under_every_schedule, odd_outputs,
        ]
    )  # fmt: skip


@pytest.mark.slow
def test_scenarios_on_two_stages():
    for failed in run_ranks(run_scenarios, 2, timeout=300):
        assert not failed, "\n".join(failed)
