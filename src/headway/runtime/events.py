"""What happens to a run, told once where it happens and heard by whoever keeps a record of it.

Below everything that tells (out of memory, checkpoints, resumes, preemption), so that no part knows who listens.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Happening:
    """Something that happened to this process's run.

    Attributes:
        name: "out_of_memory", "checkpoint", "resumed", "preempted", "non_finite", ...
        step: the update it belongs to; None: the one in progress.
        source: the clock of the run it happened to; None: whichever run this process has.
        details: what else is known, as JSON has it.
    """

    name: str
    step: int | None = None
    source: object = None
    details: dict[str, Any] = field(default_factory=dict)


_listeners: list[weakref.WeakMethod[Callable[[Happening], None]]] = []


def subscribe(listener: Callable[[Happening], None]) -> None:
    """Call the method `listener` for everything that happens from now on, while its object lives; on any thread."""
    method = weakref.WeakMethod(listener)
    if method not in _listeners:
        _listeners.append(method)


def notify(name: str, *, step: int | None = None, source: object = None, **details: Any) -> None:
    """Tell that something happened; listeners that fail are named in the log and hold nothing up.

    Args:
        name: what.
        step: the update it belongs to; None: the one in progress.
        source: the clock of the run it happened to; None: whichever run this process has.
        details: what else is known.
    """
    happening = Happening(name, step, source, details)
    for method in list(_listeners):
        listener = method()
        if listener is None:
            _listeners.remove(method)
            continue
        try:
            listener(happening)
        except Exception as error:
            log.warning("%r was not recorded: %s: %s", name, type(error).__name__, error)
