"""How often an update makes the host wait for the device: each feature, beside the loop by hand that does the same."""

from typing import Any, NamedTuple

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.plan import MODELS, lacking
from benchmarks.gpu.training import SMALL, SMALLEST, Loop, accelerator_of, by_hand, gpt2, loss_of, parts, through
from benchmarks.gpu.waits import Places, waits
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE
from headway import track

BATCH, NUM_UPDATES, STEPS = 4, 6, 2


def run(bench: Bench) -> None:
    """Count; each of Headway's rows stands beside the loop by hand with the same precision and accumulation."""
    hand = {
        "bf16": counted(bench, "by hand, bf16", by_hand(bench, made(bench))),
        "window": counted(
            bench, f"by hand, bf16, {STEPS} micro-batches", by_hand(bench, made(bench, STEPS), steps=STEPS)
        ),
    }
    if bench.is_cpu:
        bench.row(Row("fp16", note="left out: torch's CPU kernels lack parts of float16"))
    else:
        hand["fp16"] = counted(bench, "by hand, fp16", by_hand(bench, made(bench), "fp16"))
    if lacking(MODELS):
        bench.row(Row("transformers' GPT-2", note="left out: transformers is not installed"))
    else:
        theirs = gpt2(bench, bench.choose(SMALL, SMALL, SMALLEST))
        counted(bench, "by hand, bf16, transformers' GPT-2", by_hand(bench, made(bench, model=theirs)))
    for name, floor, more, build in features(bench):
        if floor in hand:
            with bench.attempt(f"headway, {name}"):
                counted(bench, f"headway, {name}", build(), hand[floor], more)
    if not HAS_ACCELERATE:
        bench.row(Row("accelerate", note=ACCELERATE_MISSING))
        return
    for precision in hand.keys() & {"bf16", "fp16"}:
        with bench.attempt(f"accelerate, {precision}"):
            counted(
                bench,
                f"accelerate, {precision}",
                through("accelerate", bench, made(bench), precision),
                hand[precision],
            )


def features(bench: Bench) -> list[tuple[str, str, int, Any]]:
    """(name, which loop by hand it is compared with, waits beyond that by docs/synchronizations.md, what builds the loop)."""

    def simple(precision: str = "bf16", num_steps: int = 1, **options: Any) -> Any:
        return lambda: through(
            "headway", bench, made(bench, num_steps), precision, gradient_accumulation_steps=num_steps, **options
        )

    return [
        ("bf16", "bf16", 0, simple()),
        (f"bf16, {STEPS} micro-batches", "window", 0, simple(num_steps=STEPS)),
        ("fp16", "fp16", 1, simple("fp16")),
        ("on_non_finite='skip'", "bf16", 1, simple(on_non_finite="skip")),
        ("weights that are tensors", "window", STEPS, lambda: weighted(bench)),
        ("microbatching='auto'", "bf16", 0, lambda: in_pieces(bench)),
        ("throughput meter", "bf16", 0, lambda: metered(bench)),
        ("a bar that shows the loss", "bf16", 0, lambda: shown(bench)),
    ]


class Output(NamedTuple):
    """What transformers' models return, as far as a loop needs it."""

    loss: torch.Tensor


class Plain(torch.nn.Module):
    """One block of attention between an embedding and a head; its forward does not wait for the device.

    Args:
        vocabulary: number of tokens.
        width: of the block.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)
        self.block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """The loss of guessing the next token."""
        logits = self.head(self.block(self.embedding(input_ids)))
        return Output(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))


def made(bench: Bench, num_steps: int = 1, model: torch.nn.Module | None = None) -> tuple[Any, ...]:
    """A small model and what trains it."""
    sizes = bench.choose(SMALL, SMALL, SMALLEST)
    torch.manual_seed(0)
    model = model or Plain(sizes["vocab_size"], sizes["n_embd"]).to(bench.device)
    return parts(bench, model, sizes, BATCH, NUM_UPDATES * num_steps)


def counted(bench: Bench, what: str, loop: Loop, hand: int | None = None, more: int | None = None) -> int:
    """Run the loop twice, count in the second pass, and tell; returns the waits that come with every update.

    What happens once a pass (a loader draws its seed), or in the first one only, is in the note alone.
    """
    first = waits(bench, loop).total()
    bench.synchronize()
    found: Places = waits(bench, loop)
    value = sum(count // NUM_UPDATES for count in found.values())
    places = f"in {NUM_UPDATES} updates: " + (
        ", ".join(f"{place} x{count}" for place, count in found.most_common(5)) or "none"
    )
    is_ours = hand is not None and more is not None
    wanted = f"at most {more} more than by hand" if is_ours else ""
    holds = value <= hand + more if hand is not None and more is not None else None
    bench.row(
        Row(what, value, "waits an update", hand, "by hand", wanted, holds, f"{places}; in the first pass {first}")
    )
    return value


def weighted(bench: Bench) -> Loop:
    """Each micro-batch counts by its tokens, a number that lies on the device."""
    accelerator = accelerator_of("headway", bench, mixed_precision="bf16", gradient_accumulation_steps=STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(*made(bench, STEPS))

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch), weight=(batch[0] >= 0).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def in_pieces(bench: Bench) -> Loop:
    """The batch as a function, ready to be run again in pieces."""
    accelerator = accelerator_of("headway", bench, mixed_precision="bf16", microbatching="auto")
    model, optimizer, loader, scheduler = accelerator.prepare(*made(bench))

    def run() -> None:
        for batch in loader:
            accelerator.forward_backward(batch, lambda piece: loss_of(model, piece))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def metered(bench: Bench) -> Loop:
    """Tokens a second are counted."""
    accelerator = accelerator_of("headway", bench, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(*made(bench))
    accelerator.throughput.count_flops()

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def shown(bench: Bench) -> Loop:
    """A progress bar is given each loss as it is: a tensor."""
    accelerator = accelerator_of("headway", bench, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(*made(bench))

    def run() -> None:
        bar = track(loader)
        for batch in bar:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.show(loss=loss.detach())

    return run
