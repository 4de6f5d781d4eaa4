"""Interface of the extension that updates full parameters, for optimizers that cannot step on shards.

The core knows the extension (`headway.layouts.whole_updates`) only through this class, so that mypy compares the calls
with the methods that they reach.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class FullParameterUpdates(Protocol):
    """Updates of full parameters for the optimizers of one strategy. A subclass documents each method in full."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take over the updates of an optimizer if it cannot step on DTensors. Return whether they are taken over."""

    def keeps_whole_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's state consists of full tensors, each on the rank that owns the parameter."""

    def find_step(self, optimizer: torch.optim.Optimizer, closure: object) -> Callable[[], None] | None:
        """Return a function that updates an optimizer's parameters, or None if the optimizer's own step must be called."""

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call a method of an optimizer, such as "train", with plain tensors in place of its sharded parameters."""

    def expose_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context in which an optimizer's state covers the parameters of all ranks, for a checkpoint."""
