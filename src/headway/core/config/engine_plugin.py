"""Interface `EnginePlugin` between a run and a training engine that replaces torch's own, such as DeepSpeed.

The core knows only this protocol. `headway.core.extensions` maps the public name of an engine to the function that
chooses the engine's plugin. That function is imported only if a script gives a plugin, or if a strategy requests the
engine. This module does not import torch.
"""

from typing import Any, Protocol


class EnginePlugin(Protocol):
    """Settings of a training engine, such as DeepSpeed, and values that a run needs before the engine exists."""

    @property
    def precision(self) -> str | None:
        """Mixed precision that the engine's configuration enables, or None if it enables none."""

    @property
    def num_steps(self) -> int | None:
        """Number of micro-batches per update that the engine's configuration sets, or None if it sets none."""

    def build_strategy(self, collectives: Any, options: Any, number_format: str, is_deferred: bool) -> Any:
        """Return the `Strategy` object that trains with the engine.

        Args:
            collectives: Collectives over all ranks.
            options: Options for DDP, autocast, GradScaler and similar components.
            number_format: The run's `mixed_precision`.
            is_deferred: Whether gradients are reduced only once per update, after the last backward of its accumulation
                window.

        Raises:
            UnsupportedError: If the engine does not support the number format or deferred reduction.
        """
