"""What a number format is to a training step; full precision, which does nothing, is the base of the others."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from headway.runtime.collectives.checked import Collectives


class GradientParts(Protocol):
    """Where gradients lie, as the strategy knows."""

    @property
    def capabilities(self) -> Any: ...

    @property
    def everyone(self) -> Collectives: ...

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of each gradient that there is, as plain tensors that may be changed in place."""


class Precision:
    """What a number format adds to a training step. This one is full precision: tensors keep the dtypes they have."""

    name = "no"
    is_mixed = False
    scaler: torch.amp.GradScaler | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward should see it."""
        return loss

    def gradient_scale(self) -> float:
        """What gradients that are not unscaled yet have been multiplied by; on an accelerator the host waits for it."""
        return 1.0

    def unscaled_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of gradients that are not unscaled yet as that of their true values; nobody waits."""
        return norm

    def adjust(self) -> None:
        """No optimizer waits for a step: the scale may change now."""

    def settle(self, num_optimizers: int) -> None:
        """Adjust where all of so many optimizers have stepped; what is asked about the scale now is up to date."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's gradients true values; harmless when repeated."""

    def discard(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are dropped: the next ones are not unscaled yet."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step the optimizer; False where the update was skipped."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def snapshot(self) -> Any:
        """What `restore` needs to take a window back."""
        return None

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot, which stays good."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
