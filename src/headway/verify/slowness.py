"""`SlowFunctions`: samples which function of the script runs while a loader fetches a batch in the main process."""

import sys
import threading
from collections import Counter
from types import FrameType

from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.verify.record_types import SlowFunctionEntry

_INTERVAL = 0.001
"""Seconds between two samples. Python switches threads less often while the main thread computes."""


class SlowFunctions:
    """Sampler of the main thread's stack while batches are fetched. Used as a context manager around each fetch."""

    def __init__(self) -> None:
        self._main_thread = threading.get_ident()
        self._is_fetching = threading.Event()
        # Number of stack samples, by the loader's task and the script's function.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._has_thread = False

    def __enter__(self) -> None:
        if not self._has_thread:
            self._has_thread = True
            self._main_thread = threading.get_ident()
            threading.Thread(target=self._sample_until_end, daemon=True).start()
        self._is_fetching.set()

    def __exit__(self, *error: object) -> None:
        self._is_fetching.clear()

    def _sample_until_end(self) -> None:
        """Count the function that the main thread runs, at regular intervals while it fetches a batch. Never return.

        The method runs in a daemon thread, which ends with the process.
        """
        pause = threading.Event()
        while True:
            self._is_fetching.wait()
            pause.wait(_INTERVAL)
            frame = sys._current_frames().get(self._main_thread)
            if frame is not None and self._is_fetching.is_set():
                self._counts[_describe_call(frame)] += 1

    def list_functions(self) -> list[SlowFunctionEntry]:
        """Return the script's most frequently sampled functions, at most five, the most frequent first."""
        return [
            {"num_samples": count, "task": task, "function": function}
            for (task, function), count in self._counts.most_common(5)
            if function
        ]


def _describe_call(frame: FrameType) -> tuple[str, str]:
    """Return a pair of the loader's task ("collate" or "item") and the innermost function of the script that runs.

    Both are "" if no function of the script runs.

    Args:
        frame: Innermost frame of the main thread.
    """
    function, task = "", ""
    for each in walk_stack(frame):
        code = each.f_code
        if is_user_file(code.co_filename):
            function = function or str(Frame(code.co_filename, code.co_firstlineno, code.co_name))
            if code.co_name in ("__getitem__", "__getitems__", "__iter__", "__next__"):
                task = "item"
        elif code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            break  # frames further out belong to the training loop
    if function and not task:
        task = "collate"
    return task, function
