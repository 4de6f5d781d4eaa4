"""Policies for updates with non-finite losses or gradients, and for updates whose values far exceed recent ones."""

from dataclasses import dataclass

from headway.errors import ConfigError

_NON_FINITE_ACTIONS = ("skip", "stop", "raise", "explain")
_SPIKE_ACTIONS = ("skip", "go_back")


@dataclass(frozen=True)
class NonFinitePolicy:
    """Policy for updates whose loss or gradients are NaN or infinite, for `Accelerator(on_non_finite=...)`.

    If a value on any rank is not finite, the action is taken on all ranks. `Accelerator.non_finite` counts the skipped
    updates. Under fp16, the gradient scaler handles gradients that overflow, and the policy handles losses.

    Attributes:
        action: "skip" (the default): skip the update and continue. "stop": skip the update, and end the training loaders
            after the current batch. "raise": raise NonFiniteError in the optimizer's step, before the update.
            "explain": as "raise", but first run the accumulation window again and check every operation. The error then
            names the operation that produced the value.
        max_in_row: Maximum number of consecutive updates that are skipped, at least 1. If the next update is not finite
            either, NonFiniteError is raised. Default: 10.
        explains: Whether to find the operation that produced the first non-finite value, also for actions other than
            "explain". To find it, the accumulation window is run again. Default: False.

    Raises:
        ConfigError: If the action is unknown, or `max_in_row` is not an integer of at least 1.

    Example::

        accelerator = Accelerator(on_non_finite=NonFinitePolicy("skip", max_in_row=3))
    """

    action: str = "skip"
    max_in_row: int = 10
    explains: bool = False

    def __post_init__(self) -> None:
        if self.action not in _NON_FINITE_ACTIONS:
            raise ConfigError(
                f"on_non_finite={self.action!r} is unknown; allowed: 'skip', 'stop', 'raise', 'explain' or None"
            )
        if isinstance(self.max_in_row, bool) or not isinstance(self.max_in_row, int) or self.max_in_row < 1:
            raise ConfigError(f"max_in_row={self.max_in_row!r} must be a whole number, 1 or more")


@dataclass(frozen=True)
class SpikePolicy:
    """Policy for updates whose loss or gradient norm far exceeds those of recent updates (a spike).

    Pass it as `Accelerator(on_spike=...)`. The decision is taken in the optimizer's step and is equal on all ranks.
    `Accelerator.spikes` counts spikes.

    Attributes:
        action: "skip" (the default): skip the update on all ranks and continue. "go_back": skip the update, and undo at
            least `updates` and fewer than twice as many earlier updates, but none before the start of this pass over
            the data. The batches of undone updates are not used again.
        fence: Number of interquartile ranges by which a loss must exceed the upper quartile of recent losses to be a
            spike. If all recent losses are positive, their logarithms are compared. Default: 5.
        window: Number of recent losses or norms from which the quartiles are computed, at least 32. Spikes are left
            out. Default: 128.
        warm_up: Number of losses or norms that must be recorded before one can be a spike, from 8 to `window`. Default:
            32.
        updates: Minimum number of updates to go back, at least 1. The state is copied to host memory every `updates`
            updates, and two copies are kept. Used only with "go_back". Default: 20.
        max_in_row: Maximum number of spikes that are skipped or undone in a row, at least 1. With "skip", two spikes are
            in a row if no update is made between them. With "go_back", they are in a row if fewer than `updates` updates
            are made between them. If yet another spike follows, SpikeError is raised. Default: 10.
        norm_fence: Number of interquartile ranges by which a gradient norm must exceed the upper quartile of recent
            norms to be a spike. The default of 8 is larger than that of `fence`, because norms have a longer tail.

    Raises:
        ConfigError: If the action is unknown, or a number is out of range.

    Example::

        accelerator = Accelerator(on_spike=SpikePolicy("go_back", updates=50))
    """

    action: str = "skip"
    fence: float = 5.0
    window: int = 128
    warm_up: int = 32
    updates: int = 20
    max_in_row: int = 10
    norm_fence: float = 8.0

    def __post_init__(self) -> None:
        if self.action not in _SPIKE_ACTIONS:
            raise ConfigError(f"on_spike={self.action!r} is unknown; allowed: 'skip', 'go_back', a SpikePolicy or None")
        for name, least in (("window", 32), ("warm_up", 8), ("updates", 1), ("max_in_row", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")
        if self.warm_up > self.window:
            raise ConfigError(f"warm_up={self.warm_up} must not be more than window={self.window}")
        if not (self.fence > 0 and self.norm_fence > 0):
            raise ConfigError(f"fence={self.fence!r} and norm_fence={self.norm_fence!r} must be more than 0")
