"""Memory that runs out in AdamW's first step, while its state comes into being: made again, with the bits of a run that had room."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.cap import capped
from benchmarks.gpu.training import accelerator_of
from headway.extras.replay.piece_size import PieceSize

KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True, "foreach": True}}
ROWS, NUM_UPDATES, DEPTH = 16, 4, 3
WIDTH = 3000
"""A parameter of 36 MB: glibc maps each one by itself, so that what is freed is given back and a limit is felt."""


def run(bench: Bench) -> None:
    """Each kind of AdamW: one run in which memory runs out, and one that has the pieces of its end from the start."""
    for name, options in KINDS.items():
        if name == "capturable" and bench.is_cpu:
            bench.row(Row(name, note="left out: torch's capturable optimizers need an accelerator"))
            continue
        with bench.attempt(name):
            disturbed, sizes = train(bench, options, is_disturbed=True)
            bench.release()
            plain, _ = train(bench, options, is_disturbed=False)
            was_hit = ROWS in sizes and ROWS // 2 in sizes
            bench.row(
                Row(
                    f"{name}: updates made in halves", sizes.count(ROWS // 2) // 2, "updates", NUM_UPDATES, "in all",
                    "the first step runs out, and all bits are equal afterwards", was_hit and disturbed == plain,
                    f"pieces: {sizes}; " + ("equal" if disturbed == plain else "weights or state differ"),
                )
            )  # fmt: skip


class Trap:
    """Leaves the first step room for a part of its state only, until the next forward.

    Args:
        bench: the run.
        num_bytes: the room.
    """

    def __init__(self, bench: Bench, num_bytes: int) -> None:
        self._bench, self._num_bytes = bench, num_bytes
        self._has_sprung = False
        self._open = ExitStack()

    def spring(self, *_: Any) -> None:
        """Before a step."""
        if not self._has_sprung:
            self._has_sprung = True
            self._open.enter_context(capped(self._bench, self._num_bytes))

    def release(self) -> None:
        """Before a forward."""
        self._open.close()


def train(bench: Bench, options: dict[str, bool], is_disturbed: bool) -> tuple[str, list[int]]:
    """(a hash of all weights and state, the pieces that were run)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    accelerator = accelerator_of("headway", bench, microbatching="auto")
    optimizer = torch.optim.AdamW(model.to(bench.device).parameters(), lr=1e-3, **options)
    # Room for half of the state: both kinds fail in the middle of making it.
    trap = Trap(bench, DEPTH * WIDTH * WIDTH * 4)
    if is_disturbed:
        optimizer.register_step_pre_hook(trap.spring)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not is_disturbed:
        accelerator._training_step.transaction.size = PieceSize(limit=ROWS // 2)
    batches = torch.randn(NUM_UPDATES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(bench.device)
    sizes: list[int] = []

    def loss(piece: torch.Tensor) -> torch.Tensor:
        trap.release()
        sizes.append(len(piece))
        found: torch.Tensor = model(piece).square().mean()
        return found

    for batch in batches:
        accelerator.forward_backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    trap.release()
    inner = optimizer.optimizer
    told = fingerprint([*model.parameters(), *(t for state in inner.state.values() for t in state.values())])
    accelerator.free_memory()
    return told, sizes


def fingerprint(tensors: list[torch.Tensor], digest: Callable[[], Any] = hashlib.sha256) -> str:
    """A hash of their bits."""
    found = digest()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(found.hexdigest())
