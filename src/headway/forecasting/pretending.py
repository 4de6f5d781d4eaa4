"""Whether this process only forecasts its script: tensors have no values then, and what needs values cannot be tried."""

from headway.common import scope


class DryRunMode:
    """Lies in the process's scope from where a script is forecast on."""


def begin() -> None:
    """From here on this process forecasts."""
    scope.own(DryRunMode)


def is_forecast() -> bool:
    """Does this process only forecast its script?"""
    return scope.has(DryRunMode)
