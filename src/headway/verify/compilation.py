"""Turn off torch.compile in recorded runs, so that each torch call of a compiled function is recorded with its line.

Compiled code makes no calls that a torch function mode can see. A difference that arises in compiled code could
therefore not be traced to a line.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from headway.common import scope
from headway.verify.request import RunRequest


class EagerCalls:
    """Switch that lets compiled functions run without compilation in this process.

    Attributes:
        is_used: Whether the process has called `torch.compile`.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._is_installed = False

    def install_for(self, request: RunRequest | None) -> None:
        """Turn compilation off for a run whose calls are recorded. Functions that are compiled already are included.

        A run that measures or forecasts memory runs compiled code, because compilation changes the memory.

        Args:
            request: Options of the run, or None if it is no run of `headway verify`.
        """
        if self._is_installed or request is None or request.measures_tensors or not request.is_recorded:
            return
        self._is_installed = True
        original: Callable[..., Any] = torch.compile

        @wraps(original)
        def compile_nothing(*args: Any, **kwargs: Any) -> Any:
            self._force()
            return original(*args, **kwargs)

        torch.compile = compile_nothing
        if "torch._dynamo" in sys.modules:  # the script has compiled a function before it created the Accelerator
            self._force()

    def _force(self) -> None:
        """Set torch's compiler stance "force_eager", in which compiled functions run without compilation."""
        if not self.is_used:
            # Importing torch._dynamo takes more than a second, so scripts that compile nothing do not set the stance.
            torch.compiler.set_stance("force_eager")
            self.is_used = True


def run_eagerly() -> EagerCalls:
    """Return this process's `EagerCalls`."""
    return scope.own(EagerCalls)
