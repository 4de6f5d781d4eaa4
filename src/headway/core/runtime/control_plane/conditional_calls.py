"""Check that all ranks make a call on a sharded model, because such a call contains collectives of all ranks.

A call that only some ranks make would wait forever. The check raises an error instead.
"""

from typing import Any

import torch

from headway.common.callsite import trace_calls
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.process import ProcessRuntime
from headway.errors import UnsupportedError

_DEPTH = 12
"""Number of stack frames that distinguish one call path from another."""


class RankConditionalCallCheck:
    """Callable check that raises `UnsupportedError` if only some ranks make a call on a sharded model.

    The check runs only once for each stack (the innermost 12 frames) from which the call is made.

    Args:
        runtime: Runtime of this process.
        strategy: Name of the sharding strategy, for the error message.
    """

    def __init__(self, runtime: ProcessRuntime, strategy: str) -> None:
        self._runtime = runtime
        self._strategy = strategy
        self._checked_stacks: set[tuple[tuple[int, int], ...]] = set()

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `UnsupportedError` before a forward of the model starts if another rank does not run this forward.

        Only the first forward from each stack is checked, and none while torch.compile traces.

        Args:
            model: Sharded model.
            args: Unused.
            kwargs: Unused.

        Raises:
            UnsupportedError: If another rank has continued its script without running this forward.
        """
        if not torch.compiler.is_compiling():  # torch.compile cannot trace a stack walk
            # Distinguish the modes, so that an evaluation on one rank is not mistaken for the other ranks' next step.
            action = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
            self.check(f"{type(model).__name__} is called", action)

    def check(self, call: str, action: str) -> None:
        """Raise `UnsupportedError` before a call starts if another rank does not make it.

        Only the first call from each stack is checked.

        Args:
            call: Start of the error message, which describes the call, such as "GPT is called".
            action: Operation that needs all shards of the model, such as "a forward".

        Raises:
            UnsupportedError: If another rank has continued its script without making this call.
        """
        attendance = self._runtime.scope.get_or_create(Attendance)
        attendance.count_call(action)
        stack = trace_calls(_DEPTH)
        if stack in self._checked_stacks:
            return
        self._checked_stacks.add(stack)
        participants = attendance.find_current_participants()
        if participants.absence:
            raise UnsupportedError(
                f"{call} {participants}. Under the {self._strategy} strategy each rank has a shard of the model, and {action} needs "
                "all shards. Call it on every rank, and put only the code that uses the result under the condition"
            )
