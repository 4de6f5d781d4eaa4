"""Number of times per update that the host waits for the device: each feature, compared with the same hand-written loop.

`python -m benchmarks.gpu synchronizations` runs only this step; with `--device cpu`, at a small size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.plan import MODELS, find_missing
from benchmarks.gpu.training import (
    SMALL,
    SMALLEST,
    Loop,
    build_gpt2,
    build_training,
    compute_loss,
    make_accelerator,
    make_library_loop,
    make_plain_loop,
)
from benchmarks.gpu.waits import WaitCounts, count_waits
from benchmarks.step_cost.measure import Training
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE
from headway import track

BATCH, NUM_UPDATES, STEPS = 4, 6, 2


def run(bench: Bench) -> None:
    """Add a row for each loop. Headway's are compared with the hand-written loop of the same precision and accumulation."""
    plain_waits = {
        "bf16": add_count(bench, "by hand, bf16", make_plain_loop(bench, build(bench))),
        "window": add_count(
            bench, f"by hand, bf16, {STEPS} micro-batches", make_plain_loop(bench, build(bench, STEPS), steps=STEPS)
        ),
    }
    if bench.is_cpu:
        bench.add_row(Row("fp16", note="left out: some of torch's CPU kernels do not support float16"))
    else:
        plain_waits["fp16"] = add_count(bench, "by hand, fp16", make_plain_loop(bench, build(bench), "fp16"))
    if find_missing(MODELS):
        bench.add_row(Row("transformers' GPT-2", note="left out: transformers is not installed"))
    else:
        gpt2 = build_gpt2(bench, bench.choose(SMALL, SMALL, SMALLEST))
        add_count(bench, "by hand, bf16, transformers' GPT-2", make_plain_loop(bench, build(bench, model=gpt2)))
    for feature in list_features(bench):
        if feature.floor in plain_waits:
            name = f"headway, {feature.name}"
            with bench.attempt(name):
                add_count(bench, name, feature.make_loop(), plain_waits[feature.floor], feature.num_extra_waits)
    if not HAS_ACCELERATE:
        bench.add_row(Row("accelerate", note=ACCELERATE_MISSING))
        return
    for precision in plain_waits.keys() & {"bf16", "fp16"}:
        with bench.attempt(f"accelerate, {precision}"):
            loop = make_library_loop("accelerate", bench, build(bench), precision)
            add_count(bench, f"accelerate, {precision}", loop, plain_waits[precision])


@dataclass(frozen=True)
class Feature:
    """A feature of Headway.

    Attributes:
        name: Name of the row.
        floor: Hand-written loop to compare with: "bf16", "fp16", or "window" for accumulated micro-batches.
        num_extra_waits: Waits per update beyond the floor's, as docs/synchronizations.md states them.
        make_loop: Function that returns a loop with the feature.
    """

    name: str
    floor: str
    num_extra_waits: int
    make_loop: Callable[[], Loop]


def list_features(bench: Bench) -> list[Feature]:
    """Return the features to count."""

    def make_simple(precision: str = "bf16", num_steps: int = 1, **options: Any) -> Callable[[], Loop]:
        return lambda: make_library_loop(
            "headway", bench, build(bench, num_steps), precision, gradient_accumulation_steps=num_steps, **options
        )

    return [
        Feature("bf16", "bf16", 0, make_simple()),
        Feature(f"bf16, {STEPS} micro-batches", "window", 0, make_simple(num_steps=STEPS)),
        Feature("fp16", "fp16", 1, make_simple("fp16")),
        Feature("on_non_finite='skip'", "bf16", 1, make_simple(on_non_finite="skip")),
        Feature("backward(weight=tensor)", "window", STEPS, lambda: make_weighted_loop(bench)),
        Feature("microbatching='auto'", "bf16", 0, lambda: make_automatic_loop(bench)),
        Feature("throughput meter", "bf16", 0, lambda: make_metered_loop(bench)),
        Feature("progress bar with the loss", "bf16", 0, lambda: make_progress_bar_loop(bench)),
    ]


class Output(NamedTuple):
    """The part of a transformers output that a loop needs."""

    loss: torch.Tensor


class PlainModel(torch.nn.Module):
    """One transformer block between an embedding and a head; its forward does not wait for the device.

    Args:
        vocabulary: Number of different tokens.
        width: Width of the block.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)
        self.block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """Return the loss of the next token."""
        logits = self.head(self.block(self.embedding(input_ids)))
        return Output(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))


def build(bench: Bench, num_steps: int = 1, model: torch.nn.Module | None = None) -> Training:
    """Build a training of NUM_UPDATES updates of `num_steps` micro-batches, by default of a small plain model."""
    sizes = bench.choose(SMALL, SMALL, SMALLEST)
    torch.manual_seed(0)
    model = model or PlainModel(sizes["vocab_size"], sizes["n_embd"]).to(bench.device)
    return build_training(bench, model, sizes, BATCH, NUM_UPDATES * num_steps)


def add_count(
    bench: Bench, name: str, loop: Loop, plain_waits: int | None = None, num_extra_waits: int | None = None
) -> int:
    """Run the loop twice, add a row with the waits of the second pass, and return the waits per update.

    Waits that occur once per pass (a loader draws its seed), or in the first pass only, appear only in the note. On a
    CPU, the row has no target: reading a value waits for nothing there, so Headway reads each loss to check it.

    Args:
        bench: Run of the step.
        name: Name of the row.
        loop: Loop of NUM_UPDATES updates.
        plain_waits: Waits per update of the hand-written loop.
        num_extra_waits: Waits per update that are allowed beyond those.
    """
    first_pass = count_waits(bench, loop).total()
    bench.synchronize()
    waits: WaitCounts = count_waits(bench, loop)
    value = sum(count // NUM_UPDATES for count in waits.values())
    lines = ", ".join(f"{line} x{count}" for line, count in waits.most_common(5)) or "none"
    target, is_met = "", None
    if plain_waits is not None and num_extra_waits is not None and not bench.is_cpu:
        target, is_met = f"at most {num_extra_waits} more than by hand", value <= plain_waits + num_extra_waits
    note = f"in {NUM_UPDATES} updates: {lines}; in the first pass: {first_pass}"
    bench.add_row(Row(name, value, "waits per update", plain_waits, "by hand", target, is_met, note))
    return value


def make_weighted_loop(bench: Bench) -> Loop:
    """Return a loop that weights each micro-batch by its number of tokens, which is a tensor on the device."""
    accelerator = make_accelerator("headway", bench, mixed_precision="bf16", gradient_accumulation_steps=STEPS)
    model, optimizer, loader, scheduler = build(bench, STEPS).prepare(accelerator)

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, batch), weight=(batch[0] >= 0).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def make_automatic_loop(bench: Bench) -> Loop:
    """Return a loop with `forward_backward`, which can replay a batch in micro-batches."""
    accelerator = make_accelerator("headway", bench, mixed_precision="bf16", microbatching="auto")
    model, optimizer, loader, scheduler = build(bench).prepare(accelerator)

    def run() -> None:
        for batch in loader:
            accelerator.forward_backward(batch, lambda microbatch: compute_loss(model, microbatch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def make_metered_loop(bench: Bench) -> Loop:
    """Return a loop with the throughput meter."""
    accelerator = make_accelerator("headway", bench, mixed_precision="bf16")
    model, optimizer, loader, scheduler = build(bench).prepare(accelerator)
    accelerator.throughput.count_flops()

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def make_progress_bar_loop(bench: Bench) -> Loop:
    """Return a loop that passes each loss to a progress bar as a tensor."""
    accelerator = make_accelerator("headway", bench, mixed_precision="bf16")
    model, optimizer, loader, scheduler = build(bench).prepare(accelerator)

    def run() -> None:
        bar = track(loader)
        for batch in bar:
            loss = compute_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.show(loss=loss.detach())

    return run
