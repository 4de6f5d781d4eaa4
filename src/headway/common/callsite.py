"""Inspection of stack frames, to find the line of user code that made a call.

No other module walks up the call stack.
"""

import importlib.util
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, TracebackType

_GENERATED_FILES = (
    "<frozen ",
    "<string>",
    "<__array_function__",
    "<eval_with_key>",
    "<attrs generated",
    "<decorator-gen",
)
"""Pseudo file names of code that Python and libraries generate.

Any other name without a file (notebook cell, console, exec) is user code.
"""

_HEADWAY_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_PATHS = sysconfig.get_paths()

_FOLDERS = sorted({_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})

_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages.

sysconfig names only the folder of the current environment. Packages may also be in the folder of the environment below
it (`python -m venv --system-site-packages`), in that of `pip install --user`, or in Debian's `dist-packages`.
"""


def _find_torch_paths() -> tuple[str, ...]:
    """Return the paths that contain torch's code. Empty if torch is in one of `_PACKAGE_FOLDERS`.

    torch can run from a clone of its repository. If `pip install --target` has installed torch, return the paths of all
    packages that pip has installed in that folder. The folder itself may also contain the script.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a test has put an object without a spec into sys.modules
        return ()
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = os.path.abspath(spec.submodule_search_locations[0])
    if any(each in folder for each in _PACKAGE_FOLDERS):
        return ()
    parent = os.path.dirname(folder)
    try:
        installed = [name for name in os.listdir(parent) if name.endswith(".dist-info")]
    except OSError:  # the folder can be entered, but not listed
        installed = []
    if not any(name.startswith("torch-") for name in installed):
        return (folder + os.sep,)
    paths = {folder + os.sep}
    for name in installed:
        paths |= _read_installed_paths(parent, name)
    return tuple(sorted(paths))


def _read_installed_paths(folder: str, metadata: str) -> set[str]:
    """Return the paths of the modules and folders that pip has installed for one package.

    Paths of folders end with a separator.

    Args:
        folder: Folder in which pip installs packages.
        metadata: Name of the package's `.dist-info` folder in `folder`.
    """
    try:
        with open(os.path.join(folder, metadata, "RECORD"), encoding="utf-8") as file:
            entries = [line.strip('"').split(",", 1)[0] for line in file]
    except (OSError, UnicodeError):
        return set()
    paths = set()
    for entry in entries:
        top, slash, _ = entry.partition("/")
        if top != ".." and (slash or top.endswith(".py")):
            paths.add(os.path.join(folder, top) + (os.sep if slash else ""))
    return paths


_LIBRARY_PREFIXES = (
    *_GENERATED_FILES,
    _HEADWAY_FOLDER,
    *(folder + os.sep for folder in _FOLDERS),
    *_find_torch_paths(),
)
"""Path prefixes of code that is not the user's.

They are computed at import, because a later lookup might run while the disk fails. This takes 2 ms, and 1 ms more for each
package that `pip install --target` has put beside torch.
"""


@dataclass(frozen=True)
class Frame:
    """File, line number and function name of one stack frame."""

    file: str
    line: int
    function: str

    @classmethod
    def from_frame(cls, frame: FrameType) -> "Frame":
        """Return the current position of `frame`."""
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def __str__(self) -> str:
        """Format as `train.py:12 in main`, with the path relative to the current directory where possible."""
        try:
            name = self.file.removeprefix(os.getcwd() + os.sep)
        except OSError:  # the folder is gone
            name = self.file
        return f"{name}:{self.line}" + ("" if self.function == "<module>" else f" in {self.function}")

    @property
    def source(self) -> str:
        """Source text of the line, or "" if the source file is not available on this machine."""
        return linecache.getline(self.file, self.line).strip()


def is_headway_file(file: str) -> bool:
    """Whether `file` belongs to the Headway package."""
    return file.startswith(_HEADWAY_FOLDER)


@lru_cache(maxsize=4096)  # called by each collective for every frame between it and the line of user code
def is_user_file(file: str) -> bool:
    """Whether `file` is user code: not part of Headway, of an installed package, or of Python itself."""
    return not file.startswith(_LIBRARY_PREFIXES) and not any(folder in file for folder in _PACKAGE_FOLDERS)


def walk_stack(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the call stack, innermost first.

    Args:
        frame: Innermost frame to yield. Default: the caller's own frame.
    """
    return _iterate_outward(frame or sys._getframe(1))


def _iterate_outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and the frames that have called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def trace_calls(depth: int) -> tuple[tuple[int, int], ...]:
    """Return pairs of (code object ID, line) for up to `depth` frames above the caller, innermost first.

    The caller's own frame is not included. Two calls that are made along the same call path return equal tuples, so the
    result can serve as a cache key.
    """
    frames = islice(_iterate_outward(sys._getframe(2)), depth)
    return tuple((id(frame.f_code), frame.f_lineno) for frame in frames)


def is_called_by(code: CodeType) -> bool:
    """Whether the function that calls `is_called_by` was itself called by the function with the code object `code`."""
    return sys._getframe(2).f_code is code


def find_user_frame(frame: FrameType | None = None, excluded_files: Container[str] = ()) -> FrameType | None:
    """Return the innermost frame of user code, or None if there is none.

    Args:
        frame: Frame to start from. Default: the caller's own frame.
        excluded_files: File names whose frames are skipped. Default: none.
    """
    for candidate in walk_stack(frame or sys._getframe(1)):
        file = candidate.f_code.co_filename
        if is_user_file(file) and file not in excluded_files:
            return candidate
    return None


def find_call_site() -> str:
    """Return the innermost line of user code on the stack as `file:line`.

    If no frame is user code, return the innermost frame outside Headway. If there is none, return the caller's line.
    """
    caller = sys._getframe(1)
    frame = find_user_frame(caller)
    if frame is None:
        outer_frames = (each for each in walk_stack(caller) if not is_headway_file(each.f_code.co_filename))
        frame = next(outer_frames, caller)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def find_user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback, such as "train.py:12 in main", or "" if there is none."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if is_user_file(frame.f_code.co_filename)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return str(Frame(frame.f_code.co_filename, line, frame.f_code.co_name))
