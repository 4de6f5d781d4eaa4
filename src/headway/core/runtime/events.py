"""Listeners within one process for run events and for phases of a training step, and additional texts for progress bars.

A run event (out of memory, a checkpoint, a resume) is reported once, by the code that causes it. All listeners of the
run receive it.

The phases of a training step follow each other without gaps: "forward" (everything up to backward: the batch, the
model, the loss), "backward", and "step" (from the last backward of an accumulation window to the end of the
optimizer's step).

Every progress bar also shows the registered texts, such as the peak memory that a MemoryMonitor measures.
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
    """Event of this process's run.

    Attributes:
        name: Kind of event: "out_of_memory", "checkpoint", "resumed", "preempted", "non_finite", ...
        step: Number of the update that the event belongs to; None for the update in progress.
        source: Object that counts the updates of the run that the event belongs to, if a process has several runs. None
            for this process's run.
        details: Details of the event, as JSON values.
    """

    name: str
    step: int | None = None
    source: object = None
    details: dict[str, Any] = field(default_factory=dict)


class Listeners:
    """Functions of this process that receive run events and phases, or provide texts for progress bars.

    Attributes:
        event_listeners: Methods that receive run events. Only weak references are kept.
        phase_listeners: Functions that are called at the start of each phase of a training step.
        progress_texts: Functions that return additional texts for progress bars. A progress bar calls them whenever it
            is drawn. An object that provides a text, such as a memory monitor, adds its function at its start and
            removes it at its end.
    """

    def __init__(self) -> None:
        self.event_listeners: list[weakref.WeakMethod[Callable[[RunEvent], None]]] = []
        self.phase_listeners: list[Callable[[str], None]] = []
        self.progress_texts: list[Callable[[], str]] = []


def subscribe(listener: Callable[[RunEvent], None]) -> None:
    """Register a method that receives every later run event, as long as its object is alive.

    The method may be called on any thread.

    Args:
        listener: Method that receives the event. Only a weak reference is kept.
    """
    listeners, method = scope.get_or_create(Listeners).event_listeners, weakref.WeakMethod(listener)
    if method not in listeners:
        listeners.append(method)


def notify_listeners(name: str, *, step: int | None = None, source: object = None, **details: Any) -> None:
    """Report a run event to all listeners. If a listener raises, the error is logged and the run continues.

    Args:
        name: Kind of event.
        step: Number of the update that the event belongs to. Default: the update in progress.
        source: Object that counts the updates of the run that the event belongs to. Default: None, for this process's
            run.
        details: Details of the event, as JSON values.
    """
    event = RunEvent(name, step, source, details)
    listeners = scope.get_or_create(Listeners).event_listeners
    for method in list(listeners):
        listener = method()
        if listener is None:
            listeners.remove(method)
            continue
        try:
            listener(event)
        except Exception as error:
            log.warning("%r was not recorded: %s: %s", name, type(error).__name__, error)


def mark_phase(phase: str) -> None:
    """Report to all listeners that a phase of the training step begins. The previous phase ends at that time.

    Args:
        phase: "forward", "backward" or "step".
    """
    for listener in scope.get_or_create(Listeners).phase_listeners:
        listener(phase)


@contextmanager
def listen_to_phases(listener: Callable[[str], None]) -> Iterator[None]:
    """Return a context in which `listener` is called at the start of each phase of a training step.

    Args:
        listener: Function that receives the name of the phase.
    """
    listeners = scope.get_or_create(Listeners).phase_listeners
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def get_progress_texts() -> list[Callable[[], str]]:
    """Return the list of functions whose texts every progress bar shows in addition to its own.

    The list itself is returned, not a copy, so that callers can add and remove functions.
    """
    return scope.get_or_create(Listeners).progress_texts
