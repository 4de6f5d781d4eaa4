"""Run functions that a script compiles with `torch.compile` without compilation.

`headway verify` needs each torch call of a compiled function with its line, and the forecast of a script traces calls on
tensors without values.

torch's own switch is `torch.compiler.set_stance("force_eager")`. It imports torch._dynamo, which takes more than a
second, and it does not show whether anything was compiled. So `torch.compile` is replaced in this process, which runs
only for the check or the forecast. The replacement sets the stance at the first call.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from headway.common.callsite import is_user_file, walk_stack


class EagerCalls:
    """Replacement of `torch.compile` in this process that makes compiled functions run without compilation.

    Attributes:
        is_used: Whether the script has asked for compilation. A library that only decorates functions with
            `torch.compile` when it is imported, as torchao does, does not count.
        is_eager: Whether torch's compiler stance is "force_eager".
    """

    def __init__(self) -> None:
        self.is_used = False
        self.is_eager = False
        self._is_installed = False

    def install(self, has_script_begun: bool = True) -> None:
        """Turn compilation off, and from then on record in `is_used` whether the script compiles functions.

        `torch.compile` is replaced, and its first call turns compilation off. If torch._dynamo is loaded already,
        compilation is turned off at once, also for functions that are compiled already. Further calls of this method do
        nothing.

        Args:
            has_script_begun: Whether the script may have compiled functions already. If so, and torch._dynamo is loaded,
                `is_used` becomes True at once. Default: True.
        """
        if self._is_installed:
            return
        self._is_installed = True
        original: Callable[..., Any] = torch.compile

        @wraps(original)
        def compile_and_record(*args: Any, **kwargs: Any) -> Any:
            self.is_used = self.is_used or not _is_import_of_library()
            self._force_eager()
            return original(*args, **kwargs)

        torch.compile = compile_and_record
        if "torch._dynamo" in sys.modules:  # a function may have been compiled already
            self.is_used = has_script_begun
            self._force_eager()

    def _force_eager(self) -> None:
        """Set torch's compiler stance "force_eager", in which compiled functions run without compilation."""
        if not self.is_eager:
            # Importing torch._dynamo takes more than a second, so scripts that compile nothing do not set the stance.
            torch.compiler.set_stance("force_eager")
            self.is_eager = True


def _is_import_of_library() -> bool:
    """Whether `torch.compile` is called while a library is imported, and not by a line of the user's code."""
    for frame in walk_stack():
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return True
        if is_user_file(name):
            return False
    return False
