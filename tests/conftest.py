"""Fixtures of the whole suite."""

import gc
import logging
import signal
from collections.abc import Iterator

import pytest

from headway import log
from headway.common import scope
from headway.runtime import process


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Headway collects garbage where memory runs out; what is there already need not be looked through each time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Each test starts its own process runtime, and leaves none behind."""
    process.reset()
    scope.drop(log.OnceFilter)  # what is said once per process is said once per test
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    process.reset()
    for number, handler in handlers.items():  # a run that was preempted ends deaf to further signals
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    logging.getLogger("headway").setLevel(logging.NOTSET)  # a Trainer's log_level lasts
