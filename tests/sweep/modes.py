"""The modes that the sweep trains in: what is read, how, and what an update consists of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        reading: "one" loader, two side by side ("zip"), or two loops in one epoch ("in turn"); "trainer": the Trainer's own;
            "accelerate": a script for Accelerate, which skips what it has done.
        rows: of the data set; the last batch is a short one.
        is_stream: read an iterable data set.
        is_mixture: read a mixture of three data sets, whose sources drop out one after the other.
        is_packed: pack the samples of the mixture into sequences.
        num_workers: of each loader.
        accumulation: micro-batches per update.
        precision: the mixed precision.
        is_blocking: False: checkpoints are written behind the loop.
        is_split: batches are those of all ranks together.
        layout: how the model is spread.
        learning: "loop"; "function": `forward_backward`; "local": local SGD; "models": two models, in windows in turn.
        is_short: memory runs out for a while on rank 0, and batches are cut into pieces.
        is_uneven: each rank takes longer than the one before.
        num_ranks: processes of its runs; several: in turn.
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
"""Each rank writes its part of the model, in step or behind the loop."""
