"""Precision of a training step: the base class for full precision, and mixed precision with torch.autocast.

Mixed precision is bf16, fp16 (with one gradient scaler for all optimizers), or fp8 (see `float8.py`).

The fp16 loss scale changes only when every optimizer whose gradients are unscaled has made its step. So, with several
optimizers, all gradients of an accumulation window are divided by the scale with which they were computed. Whether an
update was skipped is observed in the optimizer's step and not inferred from the scale.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from headway.core.config.engines import EngineOptions
from headway.core.config.torch_kwargs import AutocastKwargs
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import Hardware
from headway.log import get_logger

log = get_logger(__name__)


class GradientShards(Protocol):
    """Interface of objects that return this rank's shards of the gradients, such as the strategy.

    Attributes:
        capabilities: Capabilities of the strategy. Its field `whole_gradients` is True if each rank has all gradients,
            with equal values on all ranks.
        everyone: Collectives over all ranks.
    """

    @property
    def capabilities(self) -> Any: ...

    @property
    def everyone(self) -> Collectives: ...

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the existing gradients of the parameters as plain tensors, which the caller may change in place.

        For a sharded gradient, the tensor is this rank's shard. Parameters without a gradient are left out.
        """


class Precision:
    """Hooks that a number format adds to a training step. This base class is full precision, and its hooks do nothing.

    Attributes:
        name: Value of the Accelerator's `mixed_precision`.
        is_mixed: Whether forward passes run under torch.autocast.
        scaler: Gradient scaler. None if losses are not scaled. The training step then does not call `scale_loss`,
            `update_scale`, `unscale` and `discard_gradients`.
    """

    name = "no"
    is_mixed = False
    scaler: torch.amp.GradScaler | None = None

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return the context manager for a forward pass. This base class returns one that does nothing.

        Args:
            options: Settings of autocast for this context. None: the run's settings.
        """
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for the backward call, multiplied by the loss scale if the format has one.

        This base class returns `loss` unchanged.
        """
        return loss

    def get_gradient_scale(self) -> float:
        """Return the loss scale, by which gradients are multiplied until `unscale`. This base class returns 1.0.

        With fp16, the host waits for the device.
        """
        return 1.0

    def unscale_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm that gradients would have without the loss scale, given the norm of scaled gradients.

        The host does not wait for the device. This base class returns `norm` unchanged.
        """
        return norm

    def update_scale(self) -> None:
        """Update the loss scale for completed steps. This base class does nothing.

        With fp16, do nothing while an optimizer's gradients are unscaled: between its `unscale` and its `step` or
        `discard_gradients`.
        """

    def adjust_if_all_stepped(self, num_optimizers: int) -> None:
        """Update the loss scale if all optimizers have stepped, so that a later read returns the new value.

        This base class does nothing.

        Args:
            num_optimizers: Number of optimizers that step in each accumulation window.
        """

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale. A second call in one accumulation window does nothing."""

    def discard_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer's gradients are discarded without a step.

        The next gradients are then unscaled again.
        """

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any] | None,
        run: Callable[[], Any] | None = None,
    ) -> bool:
        """Step the optimizer. Return False if the gradient scaler (fp16) skipped the update.

        Args:
            optimizer: torch's own optimizer.
            closure: Closure as in torch, or None.
            run: Function that makes the update instead of `optimizer.step`. Default: None, which calls
                `optimizer.step`. It is ignored if there is a closure.
        """
        if closure is None:
            (run or optimizer.step)()
        else:
            optimizer.step(closure)
        return True

    def snapshot(self) -> Any:
        """Return the state from which `restore` undoes an accumulation window."""
        return None

    def restore(self, snapshot: object) -> None:
        """Restore the state that `snapshot` returned. A snapshot can be restored several times."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load state that `state_dict` returned."""


def halve_embeddings(model: torch.nn.Module) -> torch.nn.Module:
    """Make embeddings return float32 outputs in autocast's dtype, so that the residual stream is in half precision.

    Enabled by `AutocastKwargs(half_residual=True)`. Outside of autocast, outputs are unchanged. If the model has no
    embeddings, a warning is logged. Return the model, which is changed in place.
    """
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if not embeddings:
        log.warning_once("half_residual=True has no effect on %s, which has no embeddings", type(model).__name__)
    for module in embeddings:
        module.register_forward_hook(_cast_to_autocast_dtype)
    return model


def _cast_to_autocast_dtype(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook that returns a float32 output in autocast's dtype, and any other output unchanged."""
    kind = output.device.type
    is_cast = torch.is_autocast_enabled(kind) and output.dtype == torch.float32
    return output.to(torch.get_autocast_dtype(kind)) if is_cast else output


class Bf16Precision(Precision):
    """bfloat16 autocast for forward passes. Weights, gradients and optimizer state keep their dtype."""

    name = "bf16"
    is_mixed = True
    dtype = torch.bfloat16

    def __init__(self, hardware: Hardware, options: EngineOptions) -> None:
        self._kind = hardware.kind
        self._options = options.autocast

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return torch.autocast for the device type in use, with `options` or else the run's settings."""
        chosen = self._options if options is None else options
        return torch.autocast(self._kind, dtype=self.dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled)


class Float8Precision(Bf16Precision):
    """bfloat16 autocast for forward passes in which linear layers compute in float8.

    The layers are converted when the model is prepared, not by this class.
    """

    name = "fp8"
