"""Copies that kernels make of tensors with other layouts than they read, and RMSNorm: torch's allocator compared with a trace."""

from typing import Any

import pytest

from tests.simulated_cuda.operations import run_on_device, trace_operation

# Also executed in the process with a device: operations, layouts of inputs and gradients, and `run` for both directions.
COMMON = """
import torch
from torch import nn
F = nn.functional
ROWS, IMAGES = (16, 196, 384), (8, 64, 40, 36)
def picked(x):
    return torch.zeros(100, dtype=torch.long, device=x.device)
OPERATIONS = {
    "layer_norm": (ROWS, 384, lambda x, w: F.layer_norm(x, (384,), w)),
    "rms_norm": (ROWS, 384, lambda x, w: F.rms_norm(x, (384,), w)),
    "group_norm": (IMAGES, 64, lambda x, w: F.group_norm(x, 8, w)),
    "softmax": (ROWS, 0, lambda x: x.softmax(-1)),
    "log_softmax": (ROWS, 0, lambda x: x.log_softmax(-1)),
    "cumsum": (ROWS, 0, lambda x: x.cumsum(1)),
    "gather": (ROWS, 0, lambda x: x.gather(1, picked(x).view(1, 100, 1).expand(16, 100, 384))),
    "index_select": (ROWS, 0, lambda x: x.index_select(1, picked(x))),
    "max": (ROWS, 0, lambda x: x.max(1).values),
    "sort": (ROWS, 0, lambda x: x.sort(-1).values),
    "huber_loss": (ROWS, 0, lambda x: F.huber_loss(x, x.detach())),
    "max_pool2d": (IMAGES, 0, lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": (IMAGES, 0, lambda x: F.avg_pool2d(x, 2)),
    "interpolate": (IMAGES, 0, lambda x: F.interpolate(x, scale_factor=2)),
}
LAID = {"in a row": lambda made: made, "turned": lambda made: made.mT.contiguous().mT, "channels last": lambda made: made}
def run(name, x_lies, gradient_lies, device, meter, mark=lambda tensors: None):
    shape, width, function = OPERATIONS[name]
    x = LAID[x_lies](torch.empty(shape, device=device))
    if x_lies == "channels last":
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    inputs = [x, *([torch.empty(width, device=device, requires_grad=True)] if width else [])]
    mark(inputs)
    forward, outputs = meter(lambda: function(*inputs))
    gradient = LAID[gradient_lies](torch.empty(outputs.shape, device=device)) if outputs.dim() > 1 else torch.empty_like(outputs)
    mark([gradient])
    backward, _ = meter(lambda: torch.autograd.grad(outputs, inputs, gradient))
    return forward, backward
"""
NAMESPACE: dict[str, Any] = {}
exec(COMMON, NAMESPACE)
IN_ROWS, IMAGES = (
    [n for n, each in NAMESPACE["OPERATIONS"].items() if each[0] == NAMESPACE[k]] for k in ("ROWS", "IMAGES")
)
CASES = [
    [name, x_lies, gradient_lies]
    for name in (*IN_ROWS, *IMAGES)
    for x_lies in ("in a row", "turned", *(["channels last"] if name in IMAGES else []))
    for gradient_lies in ("in a row", "turned")
]


def select_large_sizes(sizes: list[int]) -> list[int]:
    """Return the sizes above 64 KiB, rounded up to 512 bytes, in a canonical order.

    Frees at the same time have no order, so they are sorted. Frees at the start belong to an earlier case and are
    removed.
    """
    rounded = [(-1 if size < 0 else 1) * -(-abs(size) // 512) * 512 for size in sizes if abs(size) > 1 << 16]
    while rounded and rounded[0] < 0:
        del rounded[0]
    found: list[int] = []
    for size in rounded:
        found.append(size)
        place = len(found) - 1
        while size < 0 and place and size < found[place - 1] < 0:
            found[place - 1 : place + 1] = found[place], found[place - 1]
            place -= 1
    return found


@pytest.mark.parametrize("kind", ["h100", "t4"])
def test_trace_counts_the_copies_that_torchs_kernels_make(kind: str) -> None:
    wrong = []
    for case, real in zip(CASES, run_on_device(kind, COMMON, CASES)):
        found = trace_operation(kind, NAMESPACE["run"], case)
        wrong += [(case, a, b) for a, b in zip(map(select_large_sizes, real), map(select_large_sizes, found)) if a != b]
    assert not wrong, wrong
