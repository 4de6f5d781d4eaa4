"""What parts of this process tell each other without knowing who listens: happenings, phases of a step, facts for bars.

A happening (out of memory, a checkpoint, a resume) is told once where it happens, and heard by whoever keeps a record of
the run. The phases of a training step follow each other without gaps: "forward" (everything up to backward: the batch,
the model, the loss), "backward", "step" (from a window's last backward to the end of the optimizer's step). Facts are what
every progress bar says besides its own values, such as the peak that a MemoryMonitor measures.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headway.common import scope
from headway.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class RunEvent:
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


class Listeners:
    """Who listens in this process.

    Attributes:
        to_happenings: methods, while their objects live.
        to_phases: called at each mark.
        facts: asked by a bar whenever it is drawn; who measures adds itself and takes itself out.
    """

    def __init__(self) -> None:
        self.to_happenings: list[weakref.WeakMethod[Callable[[RunEvent], None]]] = []
        self.to_phases: list[Callable[[str], None]] = []
        self.facts: list[Callable[[], str]] = []


def subscribe(listener: Callable[[RunEvent], None]) -> None:
    """Call the method `listener` for everything that happens from now on, while its object lives; on any thread."""
    listeners, method = scope.own(Listeners).to_happenings, weakref.WeakMethod(listener)
    if method not in listeners:
        listeners.append(method)


def notify(name: str, *, step: int | None = None, source: object = None, **details: Any) -> None:
    """Tell that something happened; listeners that fail are named in the log and hold nothing up.

    Args:
        name: what.
        step: the update it belongs to; None: the one in progress.
        source: the clock of the run it happened to; None: whichever run this process has.
        details: what else is known.
    """
    happening = RunEvent(name, step, source, details)
    listeners = scope.own(Listeners).to_happenings
    for method in list(listeners):
        listener = method()
        if listener is None:
            listeners.remove(method)
            continue
        try:
            listener(happening)
        except Exception as error:
            log.warning("%r was not recorded: %s: %s", name, type(error).__name__, error)


def mark(phase: str) -> None:
    """Tell who measures phases that `phase` begins here; while nobody does, this is an empty loop."""
    for listener in scope.own(Listeners).to_phases:
        listener(phase)


@contextmanager
def hearing_phases(listener: Callable[[str], None]) -> Iterator[None]:
    """Let `listener` hear the marks made in the block."""
    listeners = scope.own(Listeners).to_phases
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def facts() -> list[Callable[[], str]]:
    """What bars ask, to be added to and taken from."""
    return scope.own(Listeners).facts
