"""Turn off torch.compile in recorded runs, so that each torch call of a compiled function is recorded with its line.

Compiled code makes no calls that a torch function mode can see. A difference that arises in compiled code could
therefore not be traced to a line.
"""

from headway.common import scope
from headway.extras.eager_calls import EagerCalls
from headway.verify.request import RunRequest


def turn_off_compilation(request: RunRequest | None) -> None:
    """Turn compilation off for a run whose calls are recorded.

    A run that measures memory runs compiled code, because compilation changes the memory.

    Args:
        request: Options of the run, or None if it is no run of `headway verify`.
    """
    if request is not None and request.is_recorded and not request.measures_tensors:
        get_eager_calls().install()


def get_eager_calls() -> EagerCalls:
    """Return this process's `EagerCalls`."""
    return scope.get_or_create(EagerCalls)
