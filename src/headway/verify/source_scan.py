"""Finds calls in the script's source that can make two runs differ: unseeded generators, or reads such as the time.

`SourceWatch` records such calls while they run. It cannot see calls in worker processes of a loader, or calls of types
that cannot be replaced, such as `datetime.now` and `RandomState`. A call in the source may never run, so it is weaker
evidence than a recorded one.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from headway.common.callsite import is_user_file

_UNSEEDED = ("RandomState", "default_rng", "Random", "PCG64", "Philox", "SeedSequence")
"""Constructors of generators that take a seed as their first argument."""
_OUTSIDE = (
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
    ("Timestamp", "now"),
    ("os", "urandom"),
    ("os", "getpid"),
    ("random", "SystemRandom"),
    ("secrets", ""),
)
"""Last two names of functions whose results differ between runs. The second name "" stands for any."""
_MOST_FILES = 50
"""Largest number of source files that are searched."""
_MOST_BYTES = 1 << 20
"""Largest size in bytes of a source file that is searched."""
_MOST_LINES = 20
"""Largest number of lines that are returned for each kind of call."""


def scan_sources() -> dict[str, dict[str, str]]:
    """Return calls in the source of all imported files of the user, by kind and by line, such as "train.py:12".

    The kinds are "unseeded" (generators that are created without a seed) and "outside" (values from outside of the
    program, such as the time or a process ID).
    """
    calls_by_kind: dict[str, dict[str, str]] = {"unseeded": {}, "outside": {}}
    for path in _list_files():
        try:
            tree = ast.parse(path.read_text())
        except (OSError, ValueError, SyntaxError):
            continue
        shown_path = str(path).removeprefix(os.getcwd() + os.sep)
        for line, kind, name in _list_calls(tree):
            if len(calls_by_kind[kind]) < _MOST_LINES:
                calls_by_kind[kind].setdefault(f"{shown_path}:{line}", name)
    return calls_by_kind


def _list_files() -> list[Path]:
    """Return the source files of the user's modules that have been imported, without very large ones."""
    names = dict.fromkeys(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    paths = [Path(name) for name in names if name.endswith(".py") and is_user_file(name)]
    return [path for path in paths if path.exists() and path.stat().st_size < _MOST_BYTES][:_MOST_FILES]


def _list_calls(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the name of each call that can make two runs differ."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # For "numpy.random.default_rng", the last two names are "random" and "default_rng".
        owner, function = ("", *name.split("."))[-2:]
        if (owner, function) in _OUTSIDE or (owner, "") in _OUTSIDE:
            yield node.lineno, "outside", name
        elif function in _UNSEEDED and not node.keywords and all(_is_none(each) for each in node.args):
            yield node.lineno, "unseeded", name


def _is_none(node: ast.expr) -> bool:
    """Whether an expression in the source is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None
