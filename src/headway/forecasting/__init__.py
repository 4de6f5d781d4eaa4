"""What a training step will hold, before it is run: one step traced on fake tensors, its allocations replayed.

Where a process only forecasts its script tensors have no values, and what needs values cannot be tried: here that is asked.
"""

from headway.common import scope


class DryRunMode:
    """Lies in the process's scope from where a script is forecast on."""


def begin_forecast() -> None:
    """From here on this process forecasts its script."""
    scope.own(DryRunMode)


def is_forecast() -> bool:
    """Does this process only forecast its script?"""
    return scope.has(DryRunMode)
