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
from headway.common.callsite import is_user_file, walk_stack
from headway.verify.request import RunRequest


class EagerCalls:
    """Replacement of `torch.compile` in this process that makes compiled functions run without compilation.

    Attributes:
        is_used: Whether the script has asked for compilation. A library that only decorates functions with
            `torch.compile` when it is imported, as torchao does, does not count.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._is_eager = False
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
        def compile_and_record(*args: Any, **kwargs: Any) -> Any:
            self.is_used = self.is_used or not _is_import_of_library()
            self._force_eager()
            return original(*args, **kwargs)

        torch.compile = compile_and_record
        if "torch._dynamo" in sys.modules:  # the script has compiled a function before it created the Accelerator
            self.is_used = True
            self._force_eager()

    def _force_eager(self) -> None:
        """Set torch's compiler stance "force_eager", in which compiled functions run without compilation."""
        if not self._is_eager:
            # Importing torch._dynamo takes more than a second, so scripts that compile nothing do not set the stance.
            torch.compiler.set_stance("force_eager")
            self._is_eager = True


def _is_import_of_library() -> bool:
    """Whether `torch.compile` is called while a library is imported, and not by a line of the user's code."""
    for frame in walk_stack():
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return True
        if is_user_file(name):
            return False
    return False


def get_eager_calls() -> EagerCalls:
    """Return this process's `EagerCalls`."""
    return scope.get_or_create(EagerCalls)
