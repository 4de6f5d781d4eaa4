"""Kinds of updates of sharded parameters, and the kind that each known class of optimizers needs."""

from enum import Enum

import torch

from headway.layouts.low_bit import bitsandbytes
from headway.layouts.low_bit.states import keeps_low_bit_state


class UpdateKind(Enum):
    """Ways in which an optimizer can update sharded parameters."""

    DIRECT = "on DTensors"
    """The optimizer's step receives DTensors directly, as in plain torch."""
    LOCAL = "on local shards"
    """The optimizer works element by element and receives this rank's shards as plain tensors."""
    OWNED = "by owners"
    """The optimizer receives full (unsharded) parameters. Each is updated on one rank, its owner."""
    TOGETHER = "by one rank"
    """The optimizer receives all full parameters on one rank, because their updates depend on each other."""


class TrialRefused(Exception):
    """Raised if an optimizer cannot update other tensors, such as shards, in place of its own parameters."""


_DIRECT_NAMES = (
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD LBFGS SparseAdam AdamWScheduleFree SGDScheduleFree "
    "RAdamScheduleFree"
)
_KNOWN = {
    **{(package, name): UpdateKind.DIRECT for package in ("torch", "schedulefree") for name in _DIRECT_NAMES.split()},
    ("torch", "Adafactor"): UpdateKind.OWNED,
    ("torch", "Muon"): UpdateKind.OWNED,
    ("torch", "Rprop"): UpdateKind.LOCAL,
    ("transformers", "Adafactor"): UpdateKind.OWNED,
    ("headway", "MatrixOptimizer"): UpdateKind.OWNED,
}
"""Kinds by package and class name. Other classes, including subclasses of these, are tried out (`trial.py`)."""
_SELF_MANAGED_PACKAGES = ("torchao", "bitsandbytes", "deepspeed")
"""Packages whose optimizers manage the storage of parameters themselves.

Those that do not keep low-bit states are called directly, or rejected by other checks.
"""
_FUSED_ON_PLAIN_TENSORS = ("SGD", "Adagrad")
"""Optimizers whose fused step supports plain tensors only."""


def find_known_kind(optimizer: torch.optim.Optimizer) -> UpdateKind | None:
    """Return the kind of updates that an optimizer of a known class makes, or None if a trial is necessary.

    Low-bit optimizers count as known. They work element by element, except that the values of a block share a scale. A
    trial that splits parameters changes the blocks, so it would find small differences.

    Raises:
        TrialRefused: If the optimizer keeps low-bit states and needs norms of full parameters.
    """
    optimizer_class = type(optimizer)
    package = optimizer_class.__module__.partition(".")[0]
    if keeps_low_bit_state(optimizer):
        if bitsandbytes.needs_whole_norms(optimizer):
            raise TrialRefused("it computes norms of full parameters, and each rank has shards")
        return UpdateKind.LOCAL
    if any(each.__module__.partition(".")[0] in _SELF_MANAGED_PACKAGES for each in optimizer_class.__mro__):
        return UpdateKind.DIRECT
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and package == "torch" and optimizer_class.__name__ in _FUSED_ON_PLAIN_TENSORS:
        return UpdateKind.LOCAL
    return find_kind_of_class(optimizer_class)


def find_kind_of_class(optimizer_class: type) -> UpdateKind | None:
    """Return the kind of updates that a class of optimizers makes, or None if a trial is necessary."""
    return _KNOWN.get((optimizer_class.__module__.partition(".")[0], optimizer_class.__name__))
