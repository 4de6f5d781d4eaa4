"""Flag for a dry run, in which the user's script runs on tensors without values, only to forecast memory and time."""

from headway.common import scope


class DryRunMode:
    """Marker object that is in the process scope during a dry run.

    In a dry run the user's script runs on tensors without values.
    """


def mark_dry_run() -> None:
    """Mark this process as a dry run for the rest of its life."""
    scope.get_or_create(DryRunMode)


def is_dry_run() -> bool:
    """Whether this process is a dry run. Tensors have no values then, so code that reads values must be skipped."""
    return scope.has(DryRunMode)
