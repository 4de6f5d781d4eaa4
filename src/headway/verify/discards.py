"""Finds calls of `zero_grad` that discard the gradients of a batch before an optimizer step has used them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.verify.calls import find_line


class DiscardWatch:
    """Record of the script's lines that discard gradients.

    Only scripts with one optimizer are watched. With several, such as those of a GAN, the gradients of one network are
    often discarded on purpose. Gradients also count as used if the next backward pass is for the same batch, because
    some methods compute two gradients of each batch.
    """

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._batches: set[int] = set()
        self._cleared: tuple[str, set[int]] | None = None

    def watch_optimizer(self, optimizers: Sequence[Any]) -> None:
        """Watch `zero_grad` of the prepared optimizer, if there is only one.

        Args:
            optimizers: Prepared optimizers of the run.
        """
        if len(optimizers) == 1:
            self._optimizer = optimizers[0]
            self._optimizer.zero_grad = self._record_discards(self._optimizer.zero_grad)

    def note_backward(self, batch: int, loss: float) -> list[str]:
        """Record a backward pass. Return a list with the line that discarded an earlier batch's gradients, if any.

        Args:
            batch: Number of the batch.
            loss: Value of the loss. If it is infinite or NaN, the script may discard its gradients, which is not
                reported.
        """
        found = []
        if self._cleared is not None:
            line, batches = self._cleared
            if batch not in batches:
                found.append(line)
            self._cleared = None
        if math.isfinite(loss):
            self._batches.add(batch)
        return found

    def forget_backwards(self) -> None:
        """Forget all backward passes, because an optimizer step uses their gradients."""
        self._batches, self._cleared = set(), None

    def _record_discards(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        def clear_and_record(*args: Any, **kwargs: Any) -> Any:
            line = find_line() if self._batches else ""
            had_gradients = bool(line) and self._has_gradients()
            result = clear(*args, **kwargs)
            if had_gradients and not self._has_gradients():
                self._cleared = (line, self._batches)
                self._batches = set()
            return result

        return clear_and_record

    def _has_gradients(self) -> bool:
        """Whether a parameter of the optimizer has a gradient that is not zero."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            return any(p.grad is not None and bool(p.grad.detach().abs().sum() > 0) for p in parameters)
