"""A model whose memory is measured and forecast, with its batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model with its batches and its loss.

    Attributes:
        make: Function that builds the model.
        batch: Function that makes a batch of a number of samples.
        loss: Function of outputs and targets, or None if the model returns its loss.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
