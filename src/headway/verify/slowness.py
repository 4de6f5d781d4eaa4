"""`SlowLines`: samples which function of the script runs while a loader fetches a batch in the main process."""

import sys
import threading
from collections import Counter
from types import FrameType

from headway.common.callsite import Frame, is_user_file, walk_stack

_INTERVAL = 0.001
"""Seconds between two samples. Python switches threads less often while the main thread computes."""


class SlowLines:
    """Sampler of the main thread's stack while batches are fetched. Used as a context manager around each fetch."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._is_fetching = threading.Event()
        self._samples: Counter[tuple[str, str]] = Counter()
        self._has_thread = False

    def __enter__(self) -> None:
        if not self._has_thread:
            self._has_thread = True
            self._owner = threading.get_ident()
            threading.Thread(target=self._sample_until_end, daemon=True).start()
        self._is_fetching.set()

    def __exit__(self, *error: object) -> None:
        self._is_fetching.clear()

    def _sample_until_end(self) -> None:
        pause = threading.Event()
        while True:
            self._is_fetching.wait()
            pause.wait(_INTERVAL)
            frame = sys._current_frames().get(self._owner)
            if frame is not None and self._is_fetching.is_set():
                self._samples[_describe_call(frame)] += 1

    def list_lines(self) -> list[list[object]]:
        """Return the script's most frequently sampled functions, at most five, as [number of samples, kind, function].

        The kind is the loader's call in which the function ran: "collate", or "item" for reading a sample.
        """
        return [[count, kind, name] for (kind, name), count in self._samples.most_common(5) if name]


def _describe_call(frame: FrameType) -> tuple[str, str]:
    """Return a pair of the loader's call ("collate" or "item") and the script's function that runs in it.

    Both are "" if no function of the script runs.

    Args:
        frame: Innermost frame of the main thread.
    """
    name, kind = "", ""
    for each in walk_stack(frame):
        code = each.f_code
        if is_user_file(code.co_filename):
            line = Frame(code.co_filename, code.co_firstlineno, code.co_name)
            if not name:
                name = str(line)
            if code.co_name in ("__getitem__", "__getitems__", "__iter__", "__next__"):
                kind = "item"
        elif code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            break
    if not kind and name:
        kind = "collate"
    return kind, name
