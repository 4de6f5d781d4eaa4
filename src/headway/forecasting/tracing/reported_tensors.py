"""Report the tensors of a model, a batch and an optimizer to the observer of a training step."""

from typing import Any

import torch
from torch import nn

from headway.forecasting._torch import tree_leaves
from headway.forecasting.tracing.batches import list_batch_tensors
from headway.forecasting.tracing.engine import StepObserver
from headway.forecasting.tracing.four_bit import iterate_scales
from headway.forecasting.tracing.tensors import iterate_plain_tensors

Batch = Any
"""Micro-batch as the user's function returns it: tensors, possibly in containers or other objects."""


def mark_batch(batch: Batch, observer: StepObserver) -> Batch:
    """Report the tensors of a new micro-batch to the observer, and return the micro-batch."""
    observer.mark_tensors(list_batch_tensors(batch), "batch")
    return batch


def mark_model(model: nn.Module, observer: StepObserver) -> None:
    """Report the model's tensors to the observer, in the order in which `.to(device)` allocates them.

    The tensors of submodules precede those of the module itself.
    """
    for child in model.children():
        mark_model(child, observer)
    for tensors, kind in ((model._parameters, "weights"), (model._buffers, "buffers")):
        # Tensors that are still on the meta device belong to other pipeline stages.
        observer.mark_tensors([each for each in tensors.values() if each is not None and not each.is_meta], kind)
    observer.mark_tensors(iterate_scales(model), "weights")


def list_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state, except scalars such as step counts, whose memory is negligible."""
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return [
        part
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        for part in iterate_plain_tensors(leaf)
    ]
