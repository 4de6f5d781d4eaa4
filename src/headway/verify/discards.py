"""Finds calls of `zero_grad` that discard the gradients of a batch before an optimizer step has used them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from headway.verify.script_frames import find_line


class _ClearedGradients(NamedTuple):
    """Gradients that `zero_grad` has cleared before an optimizer step.

    Attributes:
        line: Line of the script that cleared them.
        batches: Numbers of the batches whose backward passes computed them.
    """

    line: str
    batches: set[int]


class DiscardWatch:
    """Record of the script's lines that discard gradients.

    Only scripts with one optimizer are watched. With several, such as those of a GAN, the gradients of one network are
    often discarded on purpose. Gradients also count as used if the next backward pass is for the same batch, because
    some methods compute two gradients of each batch.
    """

    def __init__(self) -> None:
        self._optimizer: Any = None
        # Numbers of the batches that have contributed to the current gradients.
        self._batches: set[int] = set()
        self._cleared: _ClearedGradients | None = None

    def watch_optimizer(self, optimizers: Sequence[Any]) -> None:
        """Watch `zero_grad` of the prepared optimizer, if there is only one.

        Args:
            optimizers: Prepared optimizers of the run.
        """
        if len(optimizers) == 1:
            self._optimizer = optimizers[0]
            self._optimizer.zero_grad = self._wrap_zero_grad(self._optimizer.zero_grad)

    def record_backward(self, batch: int, loss: float) -> list[str]:
        """Record a backward pass. Return a list with the line that discarded an earlier batch's gradients, if any.

        Args:
            batch: Number of the batch.
            loss: Value of the loss. If it is infinite or NaN, the script may discard its gradients, which is not
                reported.
        """
        lines = []
        if self._cleared is not None and batch not in self._cleared.batches:
            lines.append(self._cleared.line)
        self._cleared = None
        if math.isfinite(loss):
            self._batches.add(batch)
        return lines

    def forget_backwards(self) -> None:
        """Forget all backward passes, because an optimizer step uses their gradients."""
        self._batches, self._cleared = set(), None

    def _wrap_zero_grad(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `zero_grad` that also records whether it clears gradients of micro-batches that no update has used yet.

        Only calls that the script makes are recorded.

        Args:
            zero_grad: Method of the optimizer or of the model.
        """

        def clear_and_record(*args: Any, **kwargs: Any) -> Any:
            line = find_line() if self._batches else ""
            had_gradients = bool(line) and self._has_gradients()
            result = zero_grad(*args, **kwargs)
            if had_gradients and not self._has_gradients():
                self._cleared = _ClearedGradients(line, self._batches)
                self._batches = set()
            return result

        return clear_and_record

    def _has_gradients(self) -> bool:
        """Whether a parameter of the optimizer has a gradient that is not zero."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            return any(p.grad is not None and bool(p.grad.detach().abs().sum() > 0) for p in parameters)
