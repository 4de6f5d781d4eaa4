"""The precision protocol, and full precision, which does nothing."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class GradientLayout(Protocol):
    """Does each rank hold all of the gradients?"""

    @property
    def whole_gradients(self) -> bool: ...


class OverflowGroup(Protocol):
    """What an overflow is agreed on through."""

    def reduce_numbers(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """Sums over the ranks."""


class GradientParts(Protocol):
    """Where gradients lie, as the strategy knows."""

    @property
    def capabilities(self) -> GradientLayout: ...

    @property
    def everyone(self) -> OverflowGroup: ...

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of each gradient that there is, as plain tensors that may be changed in place."""


class Precision(Protocol):
    """What a number format adds to a training step."""

    name: str
    is_mixed: bool

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's gradient scaler, where there is one."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward should see it."""

    def gradient_scale(self) -> float:
        """What gradients that are not unscaled yet have been multiplied by; on an accelerator the host waits for it."""

    def unscaled_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of gradients that are not unscaled yet as that of their true values; nobody waits."""

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

    def snapshot(self) -> Any:
        """What `restore` needs to take a window back."""

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot, which stays good."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class FullPrecision:
    """Tensors keep the dtypes they have."""

    name = "no"
    is_mixed = False
    scaler: torch.amp.GradScaler | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """No autocast."""
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss itself."""
        return loss

    def gradient_scale(self) -> float:
        """1: gradients are true values."""
        return 1.0

    def unscaled_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm itself."""
        return norm

    def adjust(self) -> None:
        """There is no scale."""

    def settle(self, num_optimizers: int) -> None:
        """There is no scale."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """There is no scale."""

    def discard(self, optimizer: torch.optim.Optimizer) -> None:
        """There is no scale."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step; never skipped."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def snapshot(self) -> Any:
        """Nothing changes."""
        return None

    def restore(self, snapshot: object) -> None:
        """Nothing has changed."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""
