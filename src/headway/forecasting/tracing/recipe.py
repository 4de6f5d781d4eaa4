"""Configure the training steps that a forecast traces: optimizer, loss, precision, accumulation and loop."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.config.other_library_names import explain_precision
from headway.core.config.values import check_count
from headway.core.training.forecast_types import Loop, Loss, MakeOptimizer
from headway.errors import ConfigError

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of autocast, by precision."""

PRECISIONS = ("no", *_HALF)
"""Precisions in which steps can be traced."""

NUM_UPDATES = 2
"""Number of updates to trace.

The optimizer creates its state in the first update, so only the second one is like all later ones.
"""

LOOPS = ("plain", "zero_grad_before_backward", "loss_function")
"""Names of the loops that `run_recipe` can run. They differ in how long outputs, loss and gradients stay in memory."""


def check_precision(precision: str) -> None:
    """Raise ConfigError if steps cannot be traced in this precision."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision={precision!r}; allowed: {', '.join(PRECISIONS)}{explain_precision(precision, PRECISIONS)}"
        )


@dataclass(frozen=True)
class StepRecipe:
    """Configuration of the training steps to run.

    Attributes:
        optimizer: Function that makes the optimizer from the trainable parameters, or None for no update.
        loss: Loss function of outputs and targets, or None if the model returns its loss.
        precision: "no", "bf16" or "fp16", applied by autocast. "fp16" also scales the loss.
        accumulation: Micro-batches per update.
        max_norm: Maximum norm for gradient clipping, or None for no clipping.
        keeps_gradients: Whether gradients keep their memory because they are zeroed in place, as with
            `zero_grad(set_to_none=False)`.
        loop: Loop that determines how long tensors stay in memory, one of `LOOPS` or a function that is called as the
            loop. With "plain", variables such as the outputs and the loss live until they are assigned again, and
            gradients are freed after the update. "zero_grad_before_backward" is like "plain", but frees gradients
            between forward and backward. With "loss_function", a function computes the loss, and the outputs are freed
            when it returns.
        lengths: Sequence length of each micro-batch, in order. Empty if all micro-batches have the same size.
        averages: For each moving average of the trainable parameters, its dtype. None for the dtype of the parameters,
            but at least float32.

    Raises:
        ConfigError: If the precision or the loop is unknown, `accumulation` is less than 1, or `max_norm` is no number or
            negative. Also if `max_norm` is given for a user's own loop, or `lengths` does not consist of the whole numbers
            of at least two whole updates.
    """

    optimizer: MakeOptimizer | None
    loss: Loss | None = None
    precision: str = "no"
    accumulation: int = 1
    max_norm: float | None = None
    keeps_gradients: bool = False
    loop: str | Loop = "plain"
    lengths: tuple[int, ...] = ()
    averages: tuple[torch.dtype | None, ...] = ()

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if callable(self.loop) and self.max_norm is not None:
            raise ConfigError(
                f"max_norm={self.max_norm!r} and your own loop: the loop clips its gradients itself; leave max_norm out"
            )
        if not callable(self.loop) and self.loop not in LOOPS:
            raise ConfigError(
                f"loop={self.loop!r}; allowed: {', '.join(LOOPS)}, or a function (model, batches, optimizer)"
            )
        check_count(accumulation=self.accumulation)
        if self.max_norm is not None and not (isinstance(self.max_norm, int | float) and self.max_norm >= 0):
            raise ConfigError(f"max_norm={self.max_norm!r}; give a norm of 0 or more, or None for no clipping")
        fractions = [length for length in self.lengths if not hasattr(length, "__index__")]
        if fractions:
            raise ConfigError(f"lengths has {fractions[0]!r}; each length is a whole number of 1 or more")
        if self.lengths and (
            len(self.lengths) % self.accumulation or self.count_updates() < NUM_UPDATES or min(self.lengths) < 1
        ):
            raise ConfigError(
                f"lengths: {len(self.lengths)} of them, the smallest {min(self.lengths)}; give those of {NUM_UPDATES} or more whole "
                f"updates of {self.accumulation} micro-batch(es) each, all of 1 or more"
            )

    def count_updates(self, default: int = NUM_UPDATES) -> int:
        """Return the number of updates to run.

        If the recipe has `lengths`, the number follows from them, because there is one length per micro-batch.

        Args:
            default: Number of updates for a recipe without `lengths`. Default: `NUM_UPDATES`.
        """
        return len(self.lengths) // self.accumulation if self.lengths else default

    def iterate_batch_args(self, default: int = NUM_UPDATES) -> Iterator[tuple[int, ...]]:
        """Yield the arguments of `batch_fn` that follow the number of samples, as a tuple for each micro-batch.

        If the recipe has `lengths`, the tuple contains the micro-batch's sequence length. Otherwise it is empty.

        Args:
            default: Number of updates for a recipe without `lengths`. Default: `NUM_UPDATES`.
        """
        if self.lengths:
            yield from ((length,) for length in self.lengths)
        else:
            yield from [()] * (default * self.accumulation)


def make_autocast(precision: str) -> AbstractContextManager[Any]:
    """Return the autocast context for the forward pass in a precision: "no", "bf16" or "fp16"."""
    # Autocast is that of the CPU even if the target is a GPU, because fake tensors are on the CPU. `substitute_kernels`
    # corrects the differences.
    return torch.autocast("cpu", dtype=_HALF[precision]) if precision in _HALF else nullcontext()
