"""Sizes found under a memory limit: by automatic micro-batching, beside the best fixed pieces, and by batch-size searches."""

from typing import Any

import torch

import headway.accelerator  # noqa: F401  # before the limit is drawn: its libraries take address space
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.cap import capped
from benchmarks.gpu.training import FULL, SMALL, accelerator_of, gpt2, loss_of, tokens_of
from headway import find_executable_batch_size, is_out_of_memory, release_memory
from headway.errors import BatchSizeError

SIZES = {**SMALL, "n_embd": 64, "n_layer": 2, "vocab_size": 4096}  # logits of a MiB a row: memory goes by rows


def run(bench: Bench) -> None:
    """Bisect, then train on batches of twice what was found."""
    sizes = bench.choose(FULL, SIZES, SIZES)
    room = bench.choose(16 << 30, 128 << 20, 128 << 20)
    num_batches = bench.choose(72, 20, 3)
    tokens = tokens_of(sizes, bench.choose(512, 512, 256)).to(bench.device)
    updates(bench, sizes, tokens[:2], 1, 1)  # threads and kernels take their memory before the limit is drawn
    with capped(bench, room):
        largest = bisect(bench, sizes, tokens)
        if largest is None:
            return
        bench.release()
        batch = tokens[: 2 * largest]
        best = fastest(bench, sizes, batch, largest, min(num_batches, 20))
        bench.release()
        times, rows = automatic(bench, sizes, batch, num_batches, largest)
        bench.release()
        predict(bench, sizes, tokens)
    bench.release()
    at_last = sorted(times[-8:])[len(times[-8:]) // 2]
    bench.row(
        Row(
            "its pace, the last batches", batch.numel() / at_last, "tokens/s",
            by_hand(bench, sizes, batch, min(num_batches, 20), rows), f"by hand in pieces of {rows}",
        )
    )  # fmt: skip
    if best is None:
        return
    for what, seconds, share in (
        ("the last batches", at_last, 0.97),
        ("all batches", sum(times) / len(times), 0.92),
    ):
        pace = batch.numel() / seconds
        is_judged = not bench.is_cpu and not bench.is_simulated
        bench.row(
            Row(
                f"its pace, {what}", pace, "tokens/s", best[1], f"the best fixed size that fits, {best[0]} rows",
                f"at least {share} of it" if is_judged else "", pace >= share * best[1] if is_judged else None,
            )
        )  # fmt: skip


def made(bench: Bench, sizes: dict[str, int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and optimizer."""
    model = gpt2(bench, sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def updates(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_updates: int, rows: int) -> None:
    """A plain loop in bf16 (a CPU without instructions for it: in fp32): each update sees all tokens, `rows` sequences at a time."""
    model, optimizer = made(bench, sizes)
    for _ in range(num_updates):
        for piece in tokens.split(rows):
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.is_cpu):
                loss = loss_of(model, (piece,))
            (loss * (len(piece) / len(tokens))).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_updates: int, rows: int) -> float:
    """Tokens a second of the plain loop, building the model left out."""
    with_model = bench.seconds(lambda: updates(bench, sizes, tokens, num_updates, rows))
    bench.release()
    return tokens.numel() * num_updates / max(1e-9, with_model - bench.seconds(lambda: made(bench, sizes)))


def fastest(
    bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, largest: int, num_updates: int
) -> tuple[int, float] | None:
    """The fixed size of pieces with the best pace of those that fit in a plain loop, and that pace.

    A second piece needs more than the first, because gradients exist. So a piece may not fit whose rows fit as a batch.
    """
    found: list[tuple[float, int]] = []
    for rows in range(largest, 0, -1):
        try:
            found.append((by_hand(bench, sizes, tokens, num_updates, rows), rows))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            bench.row(Row(f"by hand in pieces of {rows}", note="out of memory"))
            release_memory(error)
        bench.release()
        if len(found) == 2:
            break
    return (max(found)[1], max(found)[0]) if found else None


def predict(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor) -> None:
    """The batch size that each search finds from a start that is far too large."""
    for search in ("first", "predicted"):
        calls: list[int] = []

        @find_executable_batch_size(starting_batch_size=min(100, len(tokens)), search=search)
        def fit(rows: int, calls: list[int] = calls) -> None:
            calls.append(rows)
            updates(bench, sizes, tokens[:rows], 4, rows)

        with bench.attempt(f"batch size, search={search!r}"):
            seconds = bench.seconds(fit)
            bench.row(
                Row(f"batch size, search={search!r}", fit.batch_size, "rows", note=f"calls: {calls}; {seconds:.1f} s")
            )
        bench.release()


def bisect(bench: Bench, sizes: dict[str, int], tokens: torch.Tensor) -> int | None:
    """The largest batch of a plain loop that fits; None: not even one row does."""

    @find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=len(tokens))
    def fit(rows: int) -> None:
        updates(bench, sizes, tokens[:rows], 2, rows)
        bench.synchronize()

    try:
        seconds = bench.seconds(fit)
    except BatchSizeError as error:
        bench.row(Row("largest batch, by bisection", note=str(error)))
        return None
    bench.row(
        Row(
            "largest batch, by bisection",
            fit.batch_size,
            "rows",
            note=f"of {len(tokens)}; the search took {seconds:.1f} s",
        )
    )
    return int(fit.batch_size)


def automatic(
    bench: Bench, sizes: dict[str, int], tokens: torch.Tensor, num_batches: int, largest: int
) -> tuple[list[float], int]:
    """The same with microbatching="auto", which is told nothing; returns the seconds of each batch, and rows a piece at last."""
    accelerator = accelerator_of(
        "headway", bench, mixed_precision="no" if bench.is_cpu else "bf16", microbatching="auto"
    )
    model, optimizer = accelerator.prepare(*made(bench, sizes))
    pieces: list[list[int]] = []

    def loss(piece: Any) -> torch.Tensor:
        pieces[-1].append(len(piece))
        return loss_of(model, (piece,))

    def one() -> None:
        pieces.append([])
        accelerator.forward_backward(tokens, loss)
        optimizer.step()
        optimizer.zero_grad()

    times = [bench.seconds(one) for _ in range(num_batches)]
    replayed = sum(sum(batch) > len(tokens) for batch in pieces)
    bench.row(
        Row(
            "pieces that it settles on", max(pieces[-1]), "rows", largest, "by bisection",
            note=f"batches of {len(tokens)} rows; {replayed} of {num_batches} were run again; first: {pieces[0]}, last: {pieces[-1]}",
        )
    )  # fmt: skip
    accelerator.free_memory()
    return times, max(pieces[-1])
