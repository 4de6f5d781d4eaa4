"""Explain which operation prevents a training step from being traced, and why."""

from typing import Any

from headway.common.callsite import find_user_line
from headway.errors import UnsupportedError
from headway.forecasting._torch import fake_tensor

_REASONS: dict[type[Any], str] = {
    fake_tensor.DataDependentOutputException: (
        "it reads a value of a tensor (.item(), .tolist(), `if tensor:`), and nothing is computed here"
    ),
    fake_tensor.DynamicOutputShapeException: (
        "the shape of its result depends on values (nonzero, unique, a mask of bools as index), and nothing is computed here"
    ),
    fake_tensor.UnsupportedOperatorException: (
        "it has no fake kernel, which gives the shape of its result without computing it (torch.library.register_fake)"
    ),
}
"""Reason why an operation cannot be traced, by the exception that torch raises."""


def is_trace_error(error: Exception) -> bool:
    """Whether torch has raised an error because a tensor has no values, or because an operator has no fake kernel."""
    cause = getattr(error, "inner_exception", error)  # TorchDynamo wraps the exception
    return isinstance(cause, (fake_tensor.UnsupportedFakeTensorException, *_REASONS))


def make_trace_error(error: Exception, last_operation: str) -> UnsupportedError:
    """Return the error to raise after a failed trace. Its message has the operation, the user's line and the reason.

    If torch refuses an operation because the trace has no values, the message names this reason. A real run could raise
    any other exception, too, for example because of a wrong shape or name.

    Args:
        error: Exception that ended the trace.
        last_operation: Name of the last operation that ran, or "" if none ran.
    """
    cause: Any = getattr(error, "inner_exception", error)  # TorchDynamo wraps the exception
    line = find_user_line(cause.__traceback__)
    where = f", called at {line}" if line else ""
    needs_shapes = "A forecast needs a step whose shapes depend on shapes alone"
    if isinstance(cause, fake_tensor.UnsupportedFakeTensorException):
        return UnsupportedError(f"the step cannot be traced: {last_operation}{where}: {cause.reason}. {needs_shapes}")
    for kind, reason in _REASONS.items():
        if isinstance(cause, kind):
            return UnsupportedError(f"the step cannot be traced: {cause.func}{where}: {reason}. {needs_shapes}")
    message = (str(cause).strip() or "it gives no reason").splitlines()[0].rstrip(".")
    at = f" at {line}" if line else ""
    if not last_operation:
        return UnsupportedError(
            f"the step failed{at} before its first operation: {type(cause).__name__}: {message}. A batch that is a mapping "
            "is called as model(**batch), a pair as model(batch[0]); docs/forecast.md has more"
        )
    return UnsupportedError(
        f"the step failed{at}, after {last_operation}: {type(cause).__name__}: {message}. If it runs without a forecast, it needs "
        "the values of tensors, and a forecast knows only their shapes"
    )
