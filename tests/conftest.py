"""Fixtures of the whole suite."""

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import log
from headway.common import scope
from headway.runtime import process

ROOT = Path(__file__).parent
MATRICES = (
    "accelerator", "cluster", "ecosystem", "sweep", "wrong_use",
    "distributed/test_compiled.py", "distributed/test_examples.py", "distributed/test_group_signals.py",
    "distributed/test_kill_sweep.py", "distributed/test_layouts_launched.py", "distributed/test_plan.py",
    "distributed/test_public_scripts.py", "distributed/test_sharded_out_of_memory.py",
    "distributed/test_tensor_parallel.py", "distributed/test_trainer_preempted.py",
)  # fmt: skip
"""Folders and files of the mark `matrix`: about two fifths of the suite's time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the matrices."""
    folders = [ROOT / name for name in MATRICES]
    for item in items:
        if any(folder in (item.path, *item.path.parents) for folder in folders):
            item.add_marker("matrix")


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
