"""Switch schedule-free optimizers between training and evaluation mode, which use different weights."""

from typing import Any

from headway.core.training.prepared.optimizer import PreparedOptimizer


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer has modes for training and evaluation, in which the weights differ.

    This is the case for schedule-free optimizers.

    Args:
        optimizer: Optimizer, prepared or not.
    """
    bare = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
    return callable(getattr(bare, "train", None)) and callable(getattr(bare, "eval", None))


def set_optimizer_mode(optimizer: Any, is_training: bool) -> None:
    """Switch a schedule-free optimizer between training and evaluation. Other optimizers are left unchanged.

    Each switch rounds the weights. Switch back only before the next training step, so that weights that are evaluated
    are also the ones that are saved.

    Args:
        optimizer: Optimizer, prepared or not. None is allowed.
        is_training: Whether to switch to training mode.
    """
    if has_modes(optimizer):
        optimizer.train() if is_training else optimizer.eval()
