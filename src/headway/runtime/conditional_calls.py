"""Calls on a sharded model that are exchanges of all ranks: one that only some ranks make is refused before it waits for ever."""

from typing import Any

import torch

from headway.common.callsite import way
from headway.errors import UnsupportedError
from headway.runtime.control_plane.attendance import Attendance
from headway.runtime.process import ProcessRuntime

_DEPTH = 12
"""How many frames tell one way to a call from another."""


class RankConditionalCallCheck:
    """Asks, at the first call from each place, whether the other ranks come to it.

    Args:
        runtime: this process.
        strategy: under which a forward is an exchange, for the message.
    """

    def __init__(self, runtime: ProcessRuntime, strategy: str) -> None:
        self._runtime = runtime
        self._strategy = strategy
        self._seen: set[tuple[tuple[int, int], ...]] = set()

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins.

        Raises:
            UnsupportedError: other ranks do not come here.
        """
        if not torch.compiler.is_compiling():  # it cannot trace a walk up the stack
            # An evaluation of one rank must not be taken for the others' next step.
            action = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
            self.check(f"{type(model).__name__} is called", action)

    def check(self, call: str, action: str) -> None:
        """A call begins that needs all ranks.

        Args:
            call: what is called, as the beginning of a sentence.
            action: what needs all parts of the model.

        Raises:
            UnsupportedError: other ranks do not come here.
        """
        attendance = self._runtime.scope.own(Attendance)
        attendance.count_call(action)
        key = way(_DEPTH)
        if key in self._seen:
            return
        self._seen.add(key)
        attended = attendance.who_is_here()
        if attended.elsewhere:
            raise UnsupportedError(
                f"{call} {attended}. Under the {self._strategy} strategy each rank holds a part of the model, and {action} needs "
                "all parts. Call it on every rank, and put only the code that uses the result under the condition"
            )
