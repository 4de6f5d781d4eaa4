"""Hooks and fixtures that apply to the whole test suite."""

import gc
import hashlib
import logging
import os
import signal
import sys
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
"""Folders and files whose tests get the mark `matrix`. Single tests elsewhere set this mark themselves."""


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="shuffle the files, and skip tests that have not started after this many minutes"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files marked `matrix` without importing them, which takes seconds, if `-m "not matrix"` is given."""
    is_matrix = any(collection_path == ROOT / name for name in MATRICES)
    return True if is_matrix and "not matrix" in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in `MATRICES` with `matrix`, and shuffle the files if `--minutes` is given.

    Each run uses a new order, so that several time-limited runs together cover all files.
    """
    if config.getoption("minutes") is not None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # the same for all xdist workers
        items.sort(key=lambda item: hashlib.sha256(f"{run}{item.path}".encode()).digest())
    folders = [ROOT / name for name in MATRICES]
    for item in items:
        if any(folder in (item.path, *item.path.parents) for folder in folders):
            item.add_marker("matrix")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        # The file is in the reason, as the summary has a line for each reason.
        pytest.skip(f"{item.path.relative_to(ROOT)} did not start within the {minutes:g} minutes of this run")


@pytest.fixture(autouse=True, scope="module")
def _freeze_existing_objects() -> None:
    """Exclude all existing objects from garbage collection.

    Headway collects garbage whenever memory runs out. Freezing the imported modules' objects makes each collection
    fast.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Reset Headway's process-wide state before and after each test, which must leave the current folder as it was."""
    folder = os.getcwd()
    process.reset()
    scope.drop(log.OnceFilter)  # messages that are logged once per process are logged once per test
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    process.reset()
    for number, handler in handlers.items():  # a preempted run ignores further signals
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "headway" and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)  # a Trainer's log_level, or a page of the docs, would affect later tests
    reset_mlflow()
    if os.getcwd() != folder:
        left_in = os.getcwd()
        os.chdir(folder)  # otherwise, later tests that start `python -m tests...` would fail in its place
        pytest.fail(f"the test left the current folder at {left_in}")


def reset_mlflow() -> None:
    """Undo what a test has set in MLflow for the whole process: the experiment, and the store instead of the environment's."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "set_tracking_uri"):  # not while it is replaced by a test
        mlflow.set_tracking_uri(None)
        os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
