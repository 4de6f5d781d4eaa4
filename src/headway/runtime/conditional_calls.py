"""Calls on a sharded model that are exchanges of all ranks: one that only some ranks make is refused before it waits for ever."""

from typing import Any

import torch

from headway.common.callsite import way
from headway.errors import UnsupportedError
from headway.runtime.callers import calling_ranks
from headway.runtime.process import ProcessRuntime

_DEPTH = 12
"""How many frames tell one way to a call from another."""


class RankConditionalCallCheck:
    """Looks, at the first call from each place, whether the conditions around it keep other ranks away.

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
            self.check(f"{type(model).__name__} is called", "a forward")

    def check(self, call: str, action: str) -> None:
        """A call begins that needs all ranks.

        Args:
            call: what is called, as the beginning of a sentence.
            action: what needs all parts of the model.

        Raises:
            UnsupportedError: other ranks do not come here.
        """
        key = way(_DEPTH)
        if key in self._seen:
            return
        self._seen.add(key)
        callers = calling_ranks(self._runtime)
        if len(callers.ranks) < self._runtime.world_size:
            who = f"rank{'s' if len(callers.ranks) > 1 else ''} {', '.join(map(str, callers.ranks))}"
            raise UnsupportedError(
                f"{call} at {callers.call_site} on {who} only, {callers.reason}: under the {self._strategy} strategy each "
                f"rank holds a part of the model, and {action} needs all parts. Call it on every rank, "
                "and put only the code that uses the result under the condition"
            )
