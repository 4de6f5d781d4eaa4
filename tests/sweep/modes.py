"""The training modes of the sweep: which data a run reads, and how it makes its updates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A training mode.

    Attributes:
        reading: "one" loader, two loaders at the same time ("zip"), two loops per epoch ("in turn"), "trainer" for a Trainer, or
            "accelerate" for a script for Accelerate that skips batches itself.
        rows: Number of rows of the dataset. In most modes the last batch is shorter than the others.
        is_stream: Whether to read an iterable dataset.
        is_mixture: Whether to read a mixture of three datasets, which end one after the other.
        is_packed: Whether to pack the samples of the mixture into sequences.
        num_workers: Number of workers of each loader.
        accumulation: Micro-batches per update.
        precision: Value of `mixed_precision`.
        is_blocking: Whether the loop waits for its saves. If False, checkpoints are written in the background.
        is_split: Whether a batch of the loader is split between the ranks.
        layout: Value of `strategy`.
        learning: "loop", "function" (`forward_backward`), "local" (local SGD) or "models" (two models with alternating windows).
        is_short: Whether memory runs out for a while on rank 0, so that batches are split into pieces.
        is_uneven: Whether each rank takes longer than the previous one.
        num_ranks: Numbers of processes. Successive runs use them in turn.
    """

    reading: str = "one"
    rows: int = 37
    is_stream: bool = False
    is_mixture: bool = False
    is_packed: bool = False
    num_workers: int = 0
    accumulation: int = 1
    precision: str = "no"
    is_blocking: bool = True
    is_split: bool = False
    layout: str = "ddp"
    learning: str = "loop"
    is_short: bool = False
    is_uneven: bool = False
    num_ranks: tuple[int, ...] = (1, 2)


MODES = {
    "uneven": Mode(),
    "background": Mode(rows=48, is_blocking=False),
    "accumulation": Mode(rows=43, accumulation=3),
    "bf16": Mode(precision="bf16"),
    "stream": Mode(is_stream=True, accumulation=2),
    "workers": Mode(num_workers=2),
    "stream workers": Mode(is_stream=True, num_workers=2),
    "zip": Mode(reading="zip"),
    "in turn": Mode(reading="in turn", rows=26),
    "split batches": Mode(is_split=True, rows=40),
    "trainer": Mode(reading="trainer"),
    "pipeline": Mode(layout="pp", learning="function", num_ranks=(2,)),
    "pieces": Mode(learning="function", is_short=True),
    "local": Mode(learning="local", num_ranks=(2, 3)),
    "accelerate": Mode(reading="accelerate"),
    "models": Mode(learning="models", accumulation=2, rows=43),
    "uneven ranks": Mode(is_uneven=True, num_ranks=(3,)),
    "mixture": Mode(is_mixture=True, accumulation=2),
    "mixture workers": Mode(is_mixture=True, num_workers=2),
    "packed mixture": Mode(is_mixture=True, is_packed=True, num_workers=2, rows=60),
}

SHARDED = {
    "fsdp": Mode(layout="fsdp", num_ranks=(2,)),
    "fsdp behind": Mode(layout="fsdp", num_ranks=(2,), accumulation=2, is_blocking=False),
    "hsdp": Mode(layout="hsdp=2", num_ranks=(4,)),
    "hsdp behind": Mode(layout="hsdp=2", num_ranks=(4,), rows=43, is_blocking=False),
    "fsdp+tp": Mode(layout="fsdp+tp=2", num_ranks=(4,), accumulation=2),
    "fsdp+tp behind": Mode(layout="fsdp+tp=2", num_ranks=(4,), is_blocking=False),
    "pp+fsdp": Mode(layout="pp=2+fsdp", learning="function", num_ranks=(4,), rows=48),
    "pp+fsdp behind": Mode(layout="pp=2+fsdp", learning="function", num_ranks=(4,), rows=48, is_blocking=False),
}
"""Modes in which each rank writes its part of the model, in the loop or in the background."""
