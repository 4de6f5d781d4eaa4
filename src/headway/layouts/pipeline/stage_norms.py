"""Error for norms of gradients that cover only the stages of one rank.

`torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` is correct under `ddp` and on the DTensors of `fsdp` and `tp`.
In a pipeline, each rank has gradients of its own stages only. Each rank would clip by another norm, without a message.

torch's function has no hook, and the gradients are plain tensors, so the function itself is replaced while a pipeline is
prepared. Scripts that imported `clip_grad_norm_` earlier are covered, because it calls the replaced function.
"""

import weakref
from typing import Any

import torch

from headway.common import scope
from headway.errors import UnsupportedError
from headway.layouts.pipeline._torch import get_total_norm, replace_total_norm

_PARTIAL_NORM = (
    "torch.nn.utils computes the norm of the gradients that this rank has, and under pp these are the gradients of its own stages: "
    "each rank would get another norm, and clip by it. Call accelerator.clip_grad_norm_(model.parameters(), max_norm), which returns "
    "the norm over all stages; max_norm=float('inf') clips nothing (docs/pipeline_parallel.md#differences-from-other-layouts)"
)


class StageNormCheck:
    """Check for calls of torch's `clip_grad_norm_` and `get_total_norm` with gradients of a pipeline, which are errors.

    torch's function is replaced while there is a pipeline in this process. Use `scope.get_or_create(StageNormCheck)`.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._compute_total_norm: Any = None  # torch's function, while it is replaced

    def add_model(self, model: torch.nn.Module) -> None:
        """Check the gradients of a model that has been split into stages."""
        self._models.add(model)
        if self._compute_total_norm is None:
            self._compute_total_norm = get_total_norm()
            replace_total_norm(self._check_and_compute)

    def remove_model(self, model: torch.nn.Module) -> None:
        """Check the gradients of the model no longer. Restore torch's function if no other model is checked."""
        self._models.discard(model)
        if not self._models and self._compute_total_norm is not None:
            replace_total_norm(self._compute_total_norm)
            self._compute_total_norm = None

    def _check_and_compute(self, tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return torch's total norm of tensors that are not gradients of a pipeline.

        Raises:
            UnsupportedError: If one of them is a gradient of a checked model.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients = {id(parameter.grad) for model in self._models for parameter in model.parameters()} - {id(None)}
        if any(id(tensor) in gradients for tensor in tensors):
            raise UnsupportedError(_PARTIAL_NORM)
        norm: torch.Tensor = self._compute_total_norm(tensors, *args, **kwargs)
        return norm


def check_norms(model: torch.nn.Module) -> None:
    """Raise an error if torch computes a norm of the model's gradients, until `release_norms` is called."""
    scope.get_or_create(StageNormCheck).add_model(model)


def release_norms(model: torch.nn.Module) -> None:
    """Allow norms of the model's gradients again."""
    scope.get_or_create(StageNormCheck).remove_model(model)
