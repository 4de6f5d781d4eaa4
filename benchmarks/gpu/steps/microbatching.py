"""Batch sizes under a memory limit: by automatic micro-batching, compared with the best fixed size, and by batch size searches.

`python -m benchmarks.gpu microbatching` runs only this step; with `--device cpu`, at a small size.
"""

from dataclasses import dataclass
from typing import Any

import torch

import headway.accelerator  # noqa: F401  # imported before the limit is set, because its libraries take address space
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.cap import limit_memory
from benchmarks.gpu.training import FULL, SMALL, build_gpt2, compute_loss, make_accelerator, make_tokens
from headway import find_executable_batch_size, is_out_of_memory, release_memory
from headway.errors import BatchSizeError

# The logits take 1 MiB per row, so the number of rows determines the memory.
SIZES = {**SMALL, "n_embd": 64, "n_layer": 2, "vocab_size": 4096}


def run(bench: Bench) -> None:
    """Find the largest batch by bisection, then train on batches of twice this size with automatic micro-batching."""
    sizes = bench.choose(FULL, SIZES, SIZES)
    num_bytes = bench.choose(16 << 30, 128 << 20, 128 << 20)
    num_batches = bench.choose(72, 20, 3)
    tokens = make_tokens(sizes, bench.choose(512, 512, 256)).to(bench.device)
    run_updates(bench, sizes, tokens[:2], 1, 1)  # threads and kernels take their memory before the limit is set
    with limit_memory(bench, num_bytes):
        largest = find_largest_batch(bench, sizes, tokens)
        if largest is None:
            return
        bench.release()
        batch = tokens[: 2 * largest]
        fastest = find_fastest_size(bench, sizes, batch, largest, min(num_batches, 20))
        bench.release()
        times, rows = train_automatically(bench, sizes, batch, num_batches, largest)
        bench.release()
        search_batch_sizes(bench, sizes, tokens)
    bench.release()
    last_seconds = sorted(times[-8:])[len(times[-8:]) // 2]
    bench.add_row(
        Row(
            "speed with 'auto', last batches, and by hand at the same size", batch.numel() / last_seconds, "tokens/s",
            measure_plain_speed(bench, sizes, batch, min(num_batches, 20), rows), f"by hand, micro-batches of {rows}",
        )
    )  # fmt: skip
    if fastest is None:
        return
    for what, seconds, share in (
        ("last batches", last_seconds, 0.97),
        ("all batches", sum(times) / len(times), 0.92),
    ):
        speed = batch.numel() / seconds
        is_judged = not bench.is_cpu and not bench.is_simulated
        bench.add_row(
            Row(
                f"speed with 'auto', {what}", speed, "tokens/s", fastest.speed, f"best fixed size that fits, {fastest.rows} rows",
                f"at least {share} of it" if is_judged else "", speed >= share * fastest.speed if is_judged else None,
            )
        )  # fmt: skip


def build(bench: Bench, sizes: dict[str, int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build the model and its optimizer."""
    model = build_gpt2(bench, sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def run_updates(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_updates: int, rows: int) -> None:
    """Train in a plain loop: each update sees all tokens, `rows` sequences at a time; in bf16, on a CPU in fp32."""
    model, optimizer = build(bench, sizes)
    for _ in range(num_updates):
        for microbatch in tokens.split(rows):
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.is_cpu):
                loss = compute_loss(model, (microbatch,))
            (loss * (len(microbatch) / len(tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()


def measure_plain_speed(
    bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_updates: int, rows: int
) -> float:
    """Return the tokens per second of the plain loop, without the time to build the model."""
    with_model = bench.measure_seconds(lambda: run_updates(bench, sizes, tokens, num_updates, rows))
    bench.release()
    return tokens.numel() * num_updates / max(1e-9, with_model - bench.measure_seconds(lambda: build(bench, sizes)))


@dataclass(frozen=True)
class FixedSize:
    """A micro-batch size, and the speed of a plain loop with it.

    Attributes:
        rows: Rows of a micro-batch.
        speed: Tokens per second.
    """

    rows: int
    speed: float


def find_fastest_size(
    bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, largest: int, num_updates: int
) -> FixedSize | None:
    """Return the faster of the two largest micro-batch sizes that fit in a plain loop, or None if no size fits.

    The second micro-batch of an update needs more memory than the first, because gradients exist. So a size that fits as a
    whole batch may not fit as a micro-batch.
    """
    fitting: list[FixedSize] = []
    for rows in range(largest, 0, -1):
        try:
            fitting.append(FixedSize(rows, measure_plain_speed(bench, sizes, tokens, num_updates, rows)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            bench.add_row(Row(f"by hand, micro-batches of {rows}", note="out of memory"))
            release_memory(error)
        bench.release()
        if len(fitting) == 2:
            break
    return max(fitting, key=lambda size: size.speed, default=None)


def search_batch_sizes(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor) -> None:
    """Report the batch size that each search finds from a start that is far too large."""
    for search in ("first", "predicted"):
        sizes_tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=min(100, len(tokens)), search=search)
        def fit(rows: int, sizes_tried: list[int] = sizes_tried) -> None:
            sizes_tried.append(rows)
            run_updates(bench, sizes, tokens[:rows], 4, rows)

        with bench.attempt(f"batch size, search={search!r}"):
            seconds = bench.measure_seconds(fit)
            bench.add_row(
                Row(
                    f"batch size, search={search!r}",
                    fit.batch_size,
                    "rows",
                    note=f"sizes tried: {sizes_tried}; {seconds:.1f} s",
                )
            )
        bench.release()


def find_largest_batch(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor) -> int | None:
    """Return the largest batch of a plain loop that fits, or None if not even one row fits."""

    @find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=len(tokens))
    def fit(rows: int) -> None:
        run_updates(bench, sizes, tokens[:rows], 2, rows)
        bench.synchronize()

    try:
        seconds = bench.measure_seconds(fit)
    except BatchSizeError as error:
        bench.add_row(Row("largest batch, by bisection", note=str(error)))
        return None
    bench.add_row(
        Row(
            "largest batch, by bisection",
            fit.batch_size,
            "rows",
            note=f"of {len(tokens)} rows; the search took {seconds:.1f} s",
        )
    )
    return int(fit.batch_size)


def train_automatically(
    bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_batches: int, largest: int
) -> tuple[list[float], int]:
    """Train with microbatching="auto", which is given no size. Return the seconds of each batch, and the last micro-batch size."""
    accelerator = make_accelerator(
        "headway", bench, mixed_precision="no" if bench.is_cpu else "bf16", microbatching="auto"
    )
    model, optimizer = accelerator.prepare(*build(bench, sizes))
    microbatch_sizes: list[list[int]] = []

    def loss(microbatch: Any) -> torch.Tensor:
        microbatch_sizes[-1].append(len(microbatch))
        return compute_loss(model, (microbatch,))

    def train_on_batch() -> None:
        microbatch_sizes.append([])
        accelerator.forward_backward(tokens, loss)
        optimizer.step()
        optimizer.zero_grad()

    times = [bench.measure_seconds(train_on_batch) for _ in range(num_batches)]
    replayed = sum(sum(rows) > len(tokens) for rows in microbatch_sizes)
    bench.add_row(
        Row(
            "micro-batch size that 'auto' ends with", max(microbatch_sizes[-1]), "rows", largest, "largest batch, by bisection",
            note=f"batches of {len(tokens)} rows, {replayed} of {num_batches} were run again; micro-batches of the first batch: "
            f"{microbatch_sizes[0]}, of the last: {microbatch_sizes[-1]}",
        )
    )  # fmt: skip
    accelerator.free_memory()
    return times, max(microbatch_sizes[-1])
