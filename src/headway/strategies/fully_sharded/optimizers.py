"""Optimizers that do not work on sharded parameters, by name.

Most can: what they compute is computed element by element. Those below take means over rows and columns of a whole matrix, keep
their state in blocks of memory that know no DTensor, or step by an operation that torch has for whole tensors only; torch's own
errors in the first step say none of this. `tests/distributed/test_sharded_optimizers.py` runs those that work.
"""

import torch

from headway.errors import UnsupportedError

_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_WHOLE_MATRICES = f"it needs whole matrices for means over rows and columns; {_ELEMENTWISE}"
_UNSHARDED_STATE = f"its state cannot be sharded; use torchao's AdamW8bit, or {_ELEMENTWISE}"
_REFUSED = {
    ("torch", "Adafactor"): _WHOLE_MATRICES,
    ("transformers", "Adafactor"): _WHOLE_MATRICES,
    ("torch", "Rprop"): f"it changes elements of gradients by a mask, which shards do not support; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    **dict.fromkeys((("torchao", name) for name in ("AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")), _UNSHARDED_STATE),
    (
        "torchao",
        "CPUOffloadOptimizer",
    ): "it is for one process; use ShardingOptions(cpu_offload=True) with torch's AdamW",
}
_NEVER_FUSED = ("SGD", "Adagrad")
"""Those whose fused step torch has for whole tensors only; Adam's and AdamW's know DTensors."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Can it step on parts?

    Raises:
        UnsupportedError: it cannot.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        reason = _REFUSED.get((package, kind.__name__))
        if package == "bitsandbytes":
            reason = f"bitsandbytes does not support DTensor; use torchao's AdamW8bit, or {_ELEMENTWISE}"
        if (package, reason) == ("torch", None) and kind.__name__ in _NEVER_FUSED and is_fused:
            reason = (
                f"torch's fused step of {kind.__name__} does not support DTensor; use {kind.__name__}(foreach=True)"
            )
        if reason is not None:
            raise UnsupportedError(f"{type(optimizer).__name__} cannot train a sharded model: {reason}")
