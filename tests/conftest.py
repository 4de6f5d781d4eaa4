"""Fixtures of the whole suite."""

import logging
from collections.abc import Iterator

import pytest

from headway.runtime import process


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Each test starts its own process runtime, and leaves none behind."""
    process.reset()
    yield
    process.reset()
    logging.getLogger("headway").setLevel(logging.NOTSET)  # a Trainer's log_level lasts
