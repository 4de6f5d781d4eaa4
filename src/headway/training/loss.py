"""What a loss may be, and how losses are divided."""

from typing import Any, Protocol

import torch

from headway.errors import LossError


class LossPolicy(Protocol):
    """How losses are divided; a compatibility layer can bring its own."""

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """What a backward multiplies its mean loss by, given that the engine divides by `divisor`."""

    def correction(self, nominal: float, actual: float) -> float:
        """What a closing window multiplies gradients by."""


class WeightedMean:
    """The mean over everything in the window, on all ranks."""

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """weight / nominal, with the engine's average undone."""
        return weight * divisor / nominal

    def correction(self, nominal: float, actual: float) -> float:
        """nominal / actual."""
        return nominal / actual


class ConstantDivision:
    """The plain recipe: every loss divided by the number of steps, ranks averaged, whatever the window really held."""

    def factor(self, weight: float, nominal: float, divisor: int, num_steps: int) -> float:
        """1 / steps."""
        return 1 / num_steps

    def correction(self, nominal: float, actual: float) -> float:
        """None."""
        return 1.0


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
        raise LossError(f"backward() got a loss of shape {tuple(loss.shape)}; reduce it first: loss.mean(), or loss.sum() with "
                        "weight= and reduction='sum'")  # fmt: skip
    if not loss.requires_grad:
        raise LossError(
            "backward() got a loss without a graph: it does not depend on any parameter that requires grad. Was it made under "
            "torch.no_grad(), detached, or are all parameters frozen?"
        )
    if reduction not in ("mean", "sum"):
        raise LossError(f"reduction={reduction!r}; allowed: 'mean' (of `weight` items) and 'sum' (over `weight` items)")
    if weight is not None and not 0 <= weight < float("inf"):
        raise LossError(f"weight={weight!r}; give the number of items the loss was taken over, 0 or more")
