"""Fixtures of the whole suite."""

import gc
import hashlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import log
from headway.common import scope
from headway.core.runtime import process

ROOT = Path(__file__).parent
MATRICES = (
    "accelerator", "cluster", "ecosystem", "sweep", "wrong_use",
    "distributed/test_adapters.py", "distributed/test_automatic_plan.py", "distributed/test_compiled.py",
    "distributed/test_examples.py", "distributed/test_expert_parallel.py", "distributed/test_group_signals.py",
    "distributed/test_kill_sweep.py", "distributed/test_layout_checkpoints.py", "distributed/test_layouts_launched.py",
    "distributed/test_pipeline_axes.py", "distributed/test_plan.py", "distributed/test_public_scripts.py",
    "distributed/test_sharded_out_of_memory.py", "distributed/test_tensor_parallel.py", "distributed/test_trainer_preempted.py",
)  # fmt: skip
"""Folders and files of the mark `matrix`, which single tests have as well."""


BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="files in a new order; skip what has not begun after so many minutes"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of matrices are not even imported, which takes seconds, where none of them is to run."""
    is_matrix = any(collection_path == ROOT / name for name in MATRICES)
    return True if is_matrix and "not matrix" in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the matrices; with `--minutes` shuffle the files, so that each has its turn in one of several runs."""
    if config.getoption("minutes") is not None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # one for all workers
        items.sort(key=lambda item: hashlib.sha256(f"{run}{item.path}".encode()).digest())
    folders = [ROOT / name for name in MATRICES]
    for item in items:
        if any(folder in (item.path, *item.path.parents) for folder in folders):
            item.add_marker("matrix")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        # The file is in the reason, as the summary has a line for each reason.
        pytest.skip(f"{item.path.relative_to(ROOT)} did not begin within the {minutes:g} minutes of this run")


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
