"""What a stack says about its rank: the user's line, a debugger, a data loader, a line that only some ranks reach."""

import ast
import linecache
import os
import re
from collections.abc import Iterable, Sequence

from headway.common.callsite import Frame, is_users

_RANK_WORDS = re.compile(
    r"\b(is_(local_)?main_process|is_last_process|on_(local_)?(main_|last_)?process|(local_)?process_index|get_rank"
    r"|(local_|global_)?rank|RANK|LOCAL_RANK)\b"
)
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/", "/pudb/", "/IPython/terminal/debugger")
_SAVERS = (
    "/torch/serialization.py",
    "/safetensors/",
    "/torch/distributed/checkpoint/",
    "/headway/checkpoint/",
    "/headway/weights/",
    "/shutil.py",
    "/numpy/lib/format.py",
    "/huggingface_hub/",
)
_WAITING = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/rendezvous.py")
_FAULT_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def users(frames: Sequence[Frame]) -> list[Frame]:
    """The user's frames, innermost first."""
    return [frame for frame in frames if is_users(frame.file)]


def parse(text: str) -> list[Frame]:
    """The main thread's frames, innermost first, from what faulthandler wrote last."""
    stacks = parse_all(text)
    return [] if not stacks or "\n..." in text else stacks[-1]  # dots: there were too many threads to show


def parse_all(text: str) -> list[list[Frame]]:
    """The frames of each thread in what faulthandler wrote; the main thread's come last."""
    stacks: list[list[Frame]] = []
    current: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (most recent")):
            # Threads come newest first, so the main thread is the last of a dump.
            current = []
            stacks.append(current)
        found = _FAULT_LINE.match(line)
        if found:
            current.append(Frame(found[1], int(found[2]), found[3]))
    return stacks


def is_in_debugger(frames: Sequence[Frame]) -> bool:
    """Does somebody hold the program with a debugger?"""
    return _passes(frames, _DEBUGGERS)


def is_saving(frames: Sequence[Frame]) -> bool:
    """Is it inside code that writes files of weights or states?"""
    return _passes(frames, _SAVERS)


def is_in_saver(frames: Sequence[Frame]) -> bool:
    """The same, and it is not the user's own code, called from there, that runs?"""
    return is_saving(frames[: _innermost_own(frames)])


def is_loading_data(frames: Sequence[Frame]) -> bool:
    """Does it wait for a batch?"""
    return _passes(frames, ("/torch/utils/data/", "/headway/data/"))


def is_in_dataset(frames: Sequence[Frame]) -> bool:
    """Is it the user's own code, called by a data loader, that does not return?"""
    own = _innermost_own(frames)
    return is_loading_data(frames[own:]) and not is_loading_data(frames[:own])


def _innermost_own(frames: Sequence[Frame]) -> int:
    """The index of the user's innermost frame; that after the last where there is none."""
    return next((index for index, frame in enumerate(frames) if is_users(frame.file)), len(frames))


def is_meeting(frames: Sequence[Frame]) -> bool:
    """Is the innermost frame torch.distributed's own, which waits for others without a collective?"""
    return bool(frames) and frames[0].file.replace(os.sep, "/").endswith(_WAITING)


def meeting(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed's that the user's code called."""
    inner = ""
    for frame in frames:
        if not frame.file.replace(os.sep, "/").endswith((*_WAITING, "/torch/distributed/c10d_logger.py")):
            break
        inner = inner if frame.function in ("wrapper", "inner") else frame.function
    return inner


def is_in_backward(frames: Sequence[Frame]) -> bool:
    """Is it computing gradients?"""
    return _passes(frames[:6], ("/torch/autograd/",))


def _passes(frames: Iterable[Frame], parts: tuple[str, ...]) -> bool:
    """Is any of these frames a library's of that place? A user's folder may have such a name too."""
    return any(
        part in frame.file.replace(os.sep, "/") and not is_users(frame.file) for frame in frames for part in parts
    )


def condition(frames: Sequence[Frame]) -> tuple[Frame, str] | None:
    """The innermost `if` (or decorator) of the user's around these frames that lets only some ranks pass, if any."""
    for frame in users(frames):
        found: tuple[Frame, str] | None = None
        for node in _around(frame):
            for line, source in _conditions(node, frame.line):
                if _RANK_WORDS.search(source):
                    found = (Frame(frame.file, line, frame.function), source)
        if found:
            return found
    return None


def _conditions(node: ast.stmt, line: int) -> list[tuple[int, str]]:
    if isinstance(node, (ast.If, ast.While)) and line >= node.body[0].lineno:
        word = "if" if isinstance(node, ast.If) else "while"
        word = word if line <= (node.body[-1].end_lineno or 0) else f"else of {word}"
        return [(node.lineno, f"{word} {ast.unparse(node.test)}:")]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [(mark.lineno, f"@{ast.unparse(mark)}") for mark in node.decorator_list]
    return []


def left_loop(gone: Sequence[Frame], waiting: Sequence[Frame]) -> Frame | None:
    """The loop of the user's that these `waiting` frames are in and the `gone` ones are past; None where there is none."""
    inward = list(reversed(users(waiting)))
    for depth, (left, here) in enumerate(zip(reversed(users(gone)), inward)):
        if (left.file, left.function) != (here.file, here.function):
            return None
        if left.line == here.line:
            continue
        loops = _loops(here)
        if left.line < here.line or any(left.line <= (node.end_lineno or 0) for node in loops):
            return None  # both are in one loop: who is ahead cannot be told
        for frame in inward[depth:]:
            for node in _loops(frame):
                return Frame(frame.file, node.lineno, frame.function)
        return None
    return None


def _loops(frame: Frame) -> list[ast.stmt]:
    return [node for node in _around(frame) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))]


def _around(frame: Frame) -> list[ast.stmt]:
    """The statements that the frame's line is part of, outer before inner."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.file)))
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return [node for node in nodes if node.lineno <= frame.line <= (node.end_lineno or 0)]
