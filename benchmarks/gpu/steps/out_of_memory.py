"""Memory that runs out while AdamW's first step creates its state: the step is replayed with the bits of an undisturbed run.

`python -m benchmarks.gpu out_of_memory` runs only this step; with `--device cpu`, at a small size.
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.cap import limit_memory
from benchmarks.gpu.training import make_accelerator
from headway.extras.replay.piece_size import PieceSize

KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True, "foreach": True}}
ROWS, NUM_UPDATES, DEPTH = 16, 4, 3
WIDTH = 3000
"""A parameter takes 36 MB. glibc maps each of them separately, so freed memory is returned and the limit takes effect."""


def run(bench: Bench) -> None:
    """Train each kind of AdamW twice: with memory that runs out, and undisturbed with the micro-batches of the first run's end."""
    for name, options in KINDS.items():
        if name == "capturable" and bench.is_cpu:
            bench.add_row(Row(name, note="left out: torch's capturable optimizers need an accelerator"))
            continue
        with bench.attempt(name):
            disturbed, sizes = train(bench, options, is_disturbed=True)
            bench.release()
            plain, _ = train(bench, options, is_disturbed=False)
            ran_out = ROWS in sizes and ROWS // 2 in sizes
            bench.add_row(
                Row(
                    f"{name}: updates in two halves", sizes.count(ROWS // 2) // 2, "updates", NUM_UPDATES, "all updates",
                    "the first step runs out of memory, and all bits equal the undisturbed run's", ran_out and disturbed == plain,
                    f"micro-batches: {sizes}; " + ("equal" if disturbed == plain else "weights or state differ"),
                )
            )  # fmt: skip


class FirstStepLimit:
    """Memory limit for the first optimizer step, until the next forward.

    Args:
        bench: Run of the step.
        num_bytes: Bytes that the optimizer step may allocate.
    """

    def __init__(self, bench: Bench, num_bytes: int) -> None:
        self._bench, self._num_bytes = bench, num_bytes
        self._was_set = False
        self._stack = ExitStack()

    def set(self, *_: Any) -> None:
        """Set the limit, unless it was set before. This is a pre-hook of the optimizer's step."""
        if not self._was_set:
            self._was_set = True
            self._stack.enter_context(limit_memory(self._bench, self._num_bytes))

    def release(self) -> None:
        """Remove the limit. It is called before each forward."""
        self._stack.close()


def train(bench: Bench, options: dict[str, bool], is_disturbed: bool) -> tuple[str, list[int]]:
    """Train, and return (hash of all weights and optimizer state, sizes of the micro-batches that were run)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    accelerator = make_accelerator("headway", bench, microbatching="auto")
    optimizer = torch.optim.AdamW(model.to(bench.device).parameters(), lr=1e-3, **options)
    # Room for half of the state, so that the step fails while it creates the state.
    limit = FirstStepLimit(bench, DEPTH * WIDTH * WIDTH * 4)
    if is_disturbed:
        optimizer.register_step_pre_hook(limit.set)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not is_disturbed:
        accelerator._training_step.transaction.size = PieceSize(limit=ROWS // 2)
    batches = torch.randn(NUM_UPDATES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(bench.device)
    sizes: list[int] = []

    def loss(microbatch: torch.Tensor) -> torch.Tensor:
        limit.release()
        sizes.append(len(microbatch))
        value: torch.Tensor = model(microbatch).square().mean()
        return value

    for batch in batches:
        accelerator.forward_backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    limit.release()
    inner = optimizer.optimizer
    weights_hash = hash_tensors([*model.parameters(), *(t for state in inner.state.values() for t in state.values())])
    accelerator.free_memory()
    return weights_hash, sizes


def hash_tensors(tensors: list[torch.Tensor], digest: Callable[[], Any] = hashlib.sha256) -> str:
    """Return a hash of the tensors' bits."""
    hasher = digest()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())
