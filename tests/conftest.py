"""Fixtures of the whole suite."""

import logging
import signal
from collections.abc import Iterator

import pytest

from headway.runtime import process


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Each test starts its own process runtime, and leaves none behind."""
    process.reset()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    process.reset()
    for number, handler in handlers.items():  # a run that was preempted ends deaf to further signals
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    logging.getLogger("headway").setLevel(logging.NOTSET)  # a Trainer's log_level lasts
