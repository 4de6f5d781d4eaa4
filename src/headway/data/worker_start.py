"""How a worker process starts in a run that listens for signals: it leaves the response to its rank.

SLURM, systemd and a terminal send a signal to every process of a job. A worker that it ended would take its rank along
before that has saved. So a worker that a signal reaches asks whether its rank has heard one too, and then goes on: the
rank saves and ends, and its workers with it. Where the rank has heard nothing the signal was meant for the worker, as
when torch ends one that does not come back; so it is at the second signal.
"""

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

_HEARD = 2.0
"""Seconds in which the rank says that it has heard the same signal."""


class Heard(Protocol):
    """An event among processes: the rank has heard a signal."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it."""


class WorkerStart:
    """A worker_init_fn that makes the worker leave signals to its rank, then calls the user's.

    Args:
        worker_init_fn: the user's, if any.
        signals: those that ask the run to end.
        heard: set by the rank when one of them has come to it.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, signals: Sequence[int], heard: Heard) -> None:
        self.worker_init_fn = worker_init_fn
        self.signals = signals
        self._heard = heard
        self._seen: set[int] = set()

    def __call__(self, worker_id: int) -> None:
        """In the worker."""
        for number in self.signals:
            signal.signal(number, self._leave_to_rank)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)

    def _leave_to_rank(self, number: int, frame: FrameType | None) -> None:
        is_first = number not in self._seen
        self._seen.add(number)
        if not (is_first and self._heard.wait(_HEARD)):
            os._exit(0)  # as torch's worker does when its rank ends it
