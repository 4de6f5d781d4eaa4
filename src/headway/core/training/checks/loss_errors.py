"""Error messages about losses and loss weights that backward cannot use."""

from typing import Any, NoReturn

import torch

from headway.errors import LossError


def refuse_loss(loss: Any) -> NoReturn:
    """Raise an error that explains why the loss cannot be used.

    Raises:
        LossError: Always. The loss is not a tensor, not a scalar, or has no graph.
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
    raise LossError(
        "backward() got a loss without a graph: it does not depend on any parameter that requires grad. Was it made under "
        "torch.no_grad(), detached, or are all parameters frozen?"
    )


def refuse_weight(weight: float | None, reduction: str) -> NoReturn:
    """Raise an error that explains why the weight or the reduction cannot be used.

    Raises:
        LossError: Always. The reduction is unknown, or the weight is negative or not finite.
    """
    if reduction not in ("mean", "sum"):
        raise LossError(f"reduction={reduction!r}; allowed: 'mean' (of `weight` items) and 'sum' (over `weight` items)")
    raise LossError(f"weight={weight!r}; give the number of items the loss was taken over, 0 or more")
