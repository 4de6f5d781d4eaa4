"""Optimizers that do not work on sharded parameters, by name.

Most can: what they compute is computed element by element. Those below take means over rows and columns of a whole matrix, or keep
their state in blocks of memory that know no DTensor; torch's own errors in the first step say neither.
"""

import torch

from headway.errors import UnsupportedError

_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_REFUSED = {
    ("torch", "Adafactor"): f"it needs whole matrices for means over rows and columns; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    ("torchao", "AdamW4bit"): f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}",
    ("torchao", "Adam4bit"): f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}",
    ("torchao", "AdamWFp8"): f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}",
    ("torchao", "AdamFp8"): f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}",
}


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Can it step on parts?

    Raises:
        UnsupportedError: it cannot.
    """
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        reason = _REFUSED.get((package, kind.__name__))
        if package == "bitsandbytes":
            reason = f"bitsandbytes does not support DTensor; use torchao's AdamW8bit, or {_ELEMENTWISE}"
        if reason is not None:
            raise UnsupportedError(f"{type(optimizer).__name__} cannot train a sharded model: {reason}")
