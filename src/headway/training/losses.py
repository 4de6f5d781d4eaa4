"""What backward() is given, looked at before it runs: what cannot be a loss, and what was divided already."""

from typing import Any

import torch

from headway.errors import LossError
from headway.log import get_logger

log = get_logger(__name__)


def check_loss(loss: Any, weight: float | None, reduction: str) -> None:
    """Refuse what cannot be a loss.

    Raises:
        LossError: no tensor, no scalar, no graph, a weight that is negative or not finite, an unknown reduction.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(
            f"backward() got a {type(loss).__name__}; give the loss tensor (for a model output: output.loss)"
        )
    if loss.numel() != 1:
        raise LossError(
            f"backward() got a loss of shape {tuple(loss.shape)}; reduce it first: loss.mean(), or loss.sum() with "
            "weight= and reduction='sum'"
        )
    if not loss.requires_grad:
        raise LossError(
            "backward() got a loss without a graph: it does not depend on any parameter that requires grad. Was it made under "
            "torch.no_grad(), detached, or are all parameters frozen?"
        )
    if reduction not in ("mean", "sum"):
        raise LossError(f"reduction={reduction!r}; allowed: 'mean' (of `weight` items) and 'sum' (over `weight` items)")
    if weight is not None and not 0 <= weight < float("inf"):
        raise LossError(f"weight={weight!r}; give the number of items the loss was taken over, 0 or more")


def look_for_division(loss: torch.Tensor, num_steps: int) -> None:
    """Warn where the last operation on a loss divides it by the number of micro-batches, which a window does itself."""
    node: Any = loss.grad_fn
    if num_steps == 1 or node is None or node.name() != "DivBackward0":
        return
    divisor = node._saved_other
    if divisor is not None and divisor.device.type == "cpu" and divisor.numel() == 1 and divisor.item() == num_steps:
        log.warning_once(
            "the loss was divided by %d, the number of micro-batches of an update, before backward(), which divides by it too: "
            "gradients are %d times too small. Give the loss as it is, unless the division is part of it",
            num_steps,
            num_steps,
        )
