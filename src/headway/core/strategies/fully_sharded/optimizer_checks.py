"""Checks that an optimizer can step on sharded parameters.

Most optimizers work element by element and can step on shards. An optimizer is rejected if it computes means over rows
and columns of a full matrix. It is also rejected if DTensor does not support its state, or the operation of its step.
torch's own errors in the first step do not explain this. `tests/distributed/test_sharded_optimizers.py` runs the
optimizers that work.
"""

from collections.abc import Callable

import torch

from headway.core.strategies.fully_sharded import dtensors
from headway.errors import UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_NEEDS_FULL_MATRICES = f"it needs full matrices for means over rows and columns; {_ELEMENTWISE}"
_UNSHARDED_STATE = (
    "it steps on plain tensors only, and gets DTensors under pp and with ShardingOptions(whole_updates=False). Leave out this "
    f"option, use torchao's AdamW8bit, or {_ELEMENTWISE}"
)
_ONE_PROCESS = "it is for one process; use ShardingOptions(cpu_offload=True) with torch's AdamW"
_UNSUPPORTED_OPTIMIZERS = {
    ("torch", "Adafactor"): _NEEDS_FULL_MATRICES,
    ("transformers", "Adafactor"): _NEEDS_FULL_MATRICES,
    ("torch", "Rprop"): f"it changes elements of gradients by a mask, which shards do not support; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    **dict.fromkeys((("torchao", name) for name in ("AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")), _UNSHARDED_STATE),
    ("torchao", "CPUOffloadOptimizer"): _ONE_PROCESS,
}
_WITHOUT_FUSED_DTENSOR = ("SGD", "Adagrad")
"""Class names of optimizers whose fused step supports unsharded tensors only. Fused Adam and AdamW support DTensors."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer cannot step on shards. Base classes of the optimizer are checked, too.

    Raises:
        UnsupportedError: If the optimizer needs full matrices, sparse gradients or plain tensors, works on one process
            only, or is set to a fused step that does not support DTensor.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for base_class in type(optimizer).__mro__:
        package, name = base_class.__module__.partition(".")[0], base_class.__name__
        reason = _UNSUPPORTED_OPTIMIZERS.get((package, name))
        if package == "bitsandbytes":
            reason = _UNSHARDED_STATE
        elif package == "torch" and name in _WITHOUT_FUSED_DTENSOR and is_fused:
            reason = f"torch's fused step of {name} does not support DTensor; use {name}(foreach=True)"
        if reason is not None:
            raise UnsupportedError(f"{type(optimizer).__name__} cannot train a sharded model: {reason}")


def warn_of_own_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer's state dict has a custom form, in which checkpoints cannot save sharded state."""
    saved = optimizer.state_dict()
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        log.warning(
            "%s.state_dict() returns no 'state' and 'param_groups' as torch's optimizers do: it trains, but a checkpoint cannot "
            "contain its sharded tensors. Return these two from state_dict(), or train without sharding",
            type(optimizer).__name__,
        )


def check_sizes(optimizer: torch.optim.Optimizer, find_current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise an error if LBFGS or Muon cannot step on the shards, because shards differ in size or a rank has none.

    LBFGS flattens all parameters into one vector, which DTensor supports only if all ranks have shards of equal size.
    Muon multiplies matrices and needs a row on each rank. torch's errors in the first step do not name the parameter.

    Args:
        optimizer: Optimizer of a sharded model.
        find_current: Function that returns the shard that has replaced a parameter.

    Raises:
        UnsupportedError: If the shards of a parameter differ in size (LBFGS), or a rank has none (Muon).
    """
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    if not is_lbfgs and not isinstance(optimizer, torch.optim.Muon):
        return
    requirement = "be divisible by this number" if is_lbfgs else "be at least that large"
    for shard in (find_current(p) for group in optimizer.param_groups for p in group["params"]):
        for dimension, num_ranks in dtensors.count_shards(shard).items():
            size = shard.shape[dimension]
            fits = size % num_ranks == 0 if is_lbfgs else size >= num_ranks
            if not fits:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} cannot train this sharded model: dimension {dimension} of a parameter of shape "
                    f"{tuple(shard.shape)} is shared by {num_ranks} ranks; it must {requirement}. Choose such a size, "
                    "strategy='ddp', or another optimizer for this parameter"
                )
