"""`SourceWatch`: records where the script creates optimizers, loaders or models, or reads clocks or random values.

A failed proof can then name the line. Functions of Python and numpy, and the constructors of three torch classes, are
replaced by wrappers that call them unchanged. The constructors are wrapped because torch calls no hook when it creates
an optimizer, loader or module. All replacements are made only in the processes of `headway verify`.
"""

import random
import time
import uuid
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import torch

from headway.common import scope
from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.verify.record_types import SourceFacts
from headway.verify.source_scan import scan_sources

# Names of the functions of Python's `time` and `random` and of `numpy.random` that are watched.
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_RANDOM = ("random", "randint", "randrange", "choice", "choices", "sample", "shuffle", "uniform", "gauss")
_NUMPY = (
    "rand",
    "randn",
    "random",
    "randint",
    "choice",
    "permutation",
    "shuffle",
    "normal",
    "uniform",
    "random_sample",
)
_MOST_LINES = 20
"""Largest number of lines that are recorded for each kind, such as reads of the clock."""


class SourceWatch:
    """Record of the script's lines that create certain objects, or read values that can differ between runs.

    Attributes:
        clock_lines: Names of functions that read the clock or create a UUID, by the script line that calls them.
        unseeded_lines: Generators that were created without a seed, by the script line that creates them.
        draw_lines: Names of functions that draw from Python's or numpy's global generator, by the script line that
            calls them.
        seed_lines: Seeds that the script passed to `random.seed`, directly or through `set_seed`, by the script line.
        eval_lines: "eval", by the script line that put a module into evaluation mode.
    """

    def __init__(self) -> None:
        self.clock_lines: dict[str, str] = {}
        self.unseeded_lines: dict[str, str] = {}
        self.draw_lines: dict[str, str] = {}
        self.seed_lines: dict[str, str] = {}
        self.eval_lines: dict[str, str] = {}
        self._suspects: dict[str, dict[str, str]] | None = None
        self._creations: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._is_installed = False

    def install_watches(self) -> None:
        """Replace the watched functions in this process, once."""
        if self._is_installed:
            return
        self._is_installed = True
        for name in _CLOCKS:
            self._watch_function(time, name, self.clock_lines, f"time.{name}")
        for name in _RANDOM:
            self._watch_function(random, name, self.draw_lines, f"random.{name}")
        for name in _NUMPY:
            self._watch_function(numpy.random, name, self.draw_lines, f"numpy.random.{name}")
        self._watch_function(
            uuid, "uuid4", self.clock_lines, "uuid.uuid4"
        )  # like a clock, a UUID is weak evidence, because file names often contain one
        self._watch_function(torch.nn.Module, "eval", self.eval_lines, "eval")
        self._watch_default_rng()
        self._watch_random_objects()
        self._watch_seed()
        self._watch_creation(torch.optim.Optimizer)
        self._watch_creation(torch.utils.data.DataLoader)
        self._watch_creation(torch.nn.Module)

    def get_creation_line(self, created: Any) -> str:
        """Return the line of the script that created an object, or "" if it is unknown.

        Args:
            created: Optimizer, loader or module.
        """
        reference, line = self._creations.get(id(created), (None, ""))
        # The `id` of an object that no longer exists can belong to another object.
        return line if reference is not None and reference() is created else ""

    def list_facts(self) -> SourceFacts:
        """Return the recorded lines, and calls that were only found in the source of the script ("suspects")."""
        if self._suspects is None:
            self._suspects = scan_sources()
        return SourceFacts(
            clock_lines=self.clock_lines,
            unseeded_lines=self.unseeded_lines,
            global_draw_lines=self.draw_lines,
            seed_lines=self.seed_lines,
            eval_lines=self.eval_lines,
            suspects=self._suspects,
        )

    # ---------------------------------------------------------------- replacements

    def _watch_function(self, module: Any, name: str, lines: dict[str, str], title: str) -> None:
        """Replace a function of a module by one that also records the script line of each call.

        Args:
            module: Module, such as `time`.
            name: Name of the function in the module.
            lines: Dict to which the line is added.
            title: Name of the function in the record.
        """
        original: Callable[..., Any] = getattr(module, name)

        @wraps(original)
        def call_and_record(*args: Any, **kwargs: Any) -> Any:
            _record_line(lines, title)
            return original(*args, **kwargs)

        setattr(module, name, call_and_record)

    def _watch_default_rng(self) -> None:
        """Record NumPy random generators that `default_rng` creates without a seed.

        `RandomState` cannot be replaced by a function, because it is a class. `scan_sources` searches for it instead.
        """
        original: Callable[..., Any] = numpy.random.default_rng

        @wraps(original)
        def create_and_record(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            if seed is None:
                _record_line(self.unseeded_lines, "default_rng()")
            return original(seed, *args, **kwargs)

        numpy.random.default_rng = create_and_record

    def _watch_random_objects(self) -> None:
        """Record `random.Random` objects that are created without a seed."""
        original = random.Random.__init__

        @wraps(original)
        def create_and_record(created: Any, x: Any = None) -> None:
            if x is None:
                _record_line(self.unseeded_lines, f"{type(created).__name__}()")
            original(created, x)

        random.Random.__init__ = create_and_record  # type: ignore[method-assign, assignment]

    def _watch_seed(self) -> None:
        """Replace `random.seed` by a function that also records the script line and the seed of each call."""
        original = random.seed

        @wraps(original)
        def seed_and_record(a: Any = None, *args: Any, **kwargs: Any) -> None:
            line = _find_caller()
            if line and line not in self.seed_lines and len(self.seed_lines) < _MOST_LINES:
                self.seed_lines[line] = repr(a)
            original(a, *args, **kwargs)

        random.seed = seed_and_record

    def _watch_creation(self, kind: type) -> None:
        """Replace a class's `__init__` by one that also records the script line that creates each object.

        Args:
            kind: Class whose objects are recorded.
        """
        original = kind.__init__  # type: ignore[misc]
        creations = self._creations

        @wraps(original)
        def create_and_record(created: Any, *args: Any, **kwargs: Any) -> None:
            original(created, *args, **kwargs)
            line = _find_caller()
            if line:
                creations[id(created)] = (weakref.ref(created), line)

        kind.__init__ = create_and_record  # type: ignore[misc]


def _find_caller() -> str:
    """Return the innermost script line on the stack that is not in a constructor.

    If all script lines on the stack are in constructors, return the innermost one; "" if there is no script line.
    """
    inside = ""
    for frame in walk_stack():
        if is_user_file(frame.f_code.co_filename):
            if frame.f_code.co_name != "__init__":
                return str(Frame.from_frame(frame))
            inside = inside or str(Frame.from_frame(frame))
    return inside


def _record_line(lines: dict[str, str], title: str) -> None:
    """Record the line of the script that called a watched function. Calls from libraries are left out.

    Args:
        lines: Recorded lines, to which the calling line is added.
        title: Name of the function.
    """
    frame = next(each for each in walk_stack() if each.f_code.co_filename != __file__)
    if is_user_file(frame.f_code.co_filename) and len(lines) < _MOST_LINES:
        lines.setdefault(str(Frame.from_frame(frame)), title)


def get_source_watch() -> SourceWatch:
    """Return this process's `SourceWatch`."""
    return scope.get_or_create(SourceWatch)
