"""Analysis of a rank's stack: what the rank is doing, and which conditions and loops contain its current line.

A rank can be saving, loading data, computing gradients, waiting for other ranks, or stopped in a debugger.
"""

import ast
import linecache
import os
import re
from collections.abc import Iterable, Sequence

from headway.common.callsite import Frame, is_user_file

_RANK_WORDS = re.compile(
    r"\b(is_(local_)?main_process|is_last_process|on_(local_)?(main_|last_)?process|(local_)?process_index|get_rank"
    r"|(local_|global_)?rank|RANK|LOCAL_RANK)\b"
)

_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/", "/pudb/", "/IPython/terminal/debugger")

_SAVING_PATHS = (
    "/torch/serialization.py",
    "/safetensors/",
    "/torch/distributed/checkpoint/",
    "/headway/core/checkpoint/",
    "/headway/core/weights/",
    "/shutil.py",
    "/numpy/lib/format.py",
    "/huggingface_hub/",
)

_TORCH_WAIT_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/rendezvous.py")

_FAULT_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def select_user_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that belong to user code, innermost first."""
    return [frame for frame in frames if is_user_file(frame.file)]


def parse_main_stack(text: str) -> list[Frame]:
    """Return the main thread's frames, innermost first, from the latest dump of faulthandler.

    Empty if there is no dump, or if it was cut off because of too many threads.
    """
    stacks = parse_stacks(text)
    return [] if not stacks or "\n..." in text else stacks[-1]  # dots mark that there were too many threads to show


def parse_stacks(text: str) -> list[list[Frame]]:
    """Return the frames of each thread, innermost first, in a dump of faulthandler. The main thread comes last."""
    stacks: list[list[Frame]] = []
    current: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (most recent")):
            # A dump lists the newest thread first, so the main thread is the last.
            current = []
            stacks.append(current)
        frame = _FAULT_LINE.match(line)
        if frame:
            current.append(Frame(frame[1], int(frame[2]), frame[3]))
    return stacks


def is_in_debugger(frames: Sequence[Frame]) -> bool:
    """Whether the stack contains a debugger's code, which means that the program is stopped in the debugger."""
    return _contains_library_path(frames, _DEBUGGERS)


def is_saving(frames: Sequence[Frame]) -> bool:
    """Whether the stack contains library code that writes files of weights or state."""
    return _contains_library_path(frames, _SAVING_PATHS)


def is_in_saver(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frame of user code has called a library that writes weights or state to files.

    A library does not count if it has called back into user code, such as a hook. If no frame is user code, all frames
    are searched.
    """
    return is_saving(frames[: _find_innermost_own(frames)])


def is_loading_data(frames: Sequence[Frame]) -> bool:
    """Whether the stack contains library code that loads data, which means that the rank waits for a batch."""
    return _contains_library_path(frames, ("/torch/utils/data/", "/headway/core/data/"))


def is_in_dataset(frames: Sequence[Frame]) -> bool:
    """Whether a data loader has called the innermost frame of user code, such as a method of a dataset.

    False if this user code itself waits for a data loader.
    """
    own = _find_innermost_own(frames)
    return is_loading_data(frames[own:]) and not is_loading_data(frames[:own])


def _find_innermost_own(frames: Sequence[Frame]) -> int:
    """Return the index of the innermost frame of user code, or the number of frames if there is none."""
    return next((index for index, frame in enumerate(frames) if is_user_file(frame.file)), len(frames))


def is_meeting(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frame is torch.distributed's own code, which means that the rank waits for other ranks.

    Such a wait, for example in the rendezvous, need not be a collective.
    """
    return bool(frames) and frames[0].file.replace(os.sep, "/").endswith(_TORCH_WAIT_FILES)


def find_meeting_call(frames: Sequence[Frame]) -> str:
    """Return the name of the torch.distributed function that other code has called and that is still running.

    Empty if the innermost frame is not torch.distributed's code.
    """
    call = ""
    for frame in frames:
        if not frame.file.replace(os.sep, "/").endswith((*_TORCH_WAIT_FILES, "/torch/distributed/c10d_logger.py")):
            break
        if frame.function not in ("wrapper", "inner"):  # torch's decorators around the function
            call = frame.function
    return call


def is_in_backward(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frames contain autograd code, which means that the rank is computing gradients."""
    return _contains_library_path(frames[:6], ("/torch/autograd/",))


def _contains_library_path(frames: Iterable[Frame], parts: tuple[str, ...]) -> bool:
    """Whether a frame is library code whose path contains one of `parts`. The user's own code is ignored."""
    return any(
        part in frame.file.replace(os.sep, "/") and not is_user_file(frame.file) for frame in frames for part in parts
    )


def find_condition(frames: Sequence[Frame]) -> tuple[Frame, str] | None:
    """Return the innermost condition in user code around the given frames that refers to ranks, such as `if rank == 0`.

    Under such a condition only some ranks run the code.

    Returns:
        Pair of (location, source) of an `if`, a `while` or a decorator. None if there is no such condition.
    """
    for frame in select_user_frames(frames):
        conditions = [
            (Frame(frame.file, line, frame.function), source)
            for node in _list_statements_around(frame)
            for line, source in _list_conditions(node, frame.line)
            if _RANK_WORDS.search(source)
        ]
        if conditions:
            return conditions[-1]  # the innermost
    return None


def _list_conditions(node: ast.stmt, line: int) -> list[tuple[int, str]]:
    """Return the conditions that a statement places on the code at `line`, which the statement contains.

    Returns:
        Pairs of (line, source): the test of an `if` or `while`, or the decorators of a function.
    """
    if isinstance(node, (ast.If, ast.While)) and line >= node.body[0].lineno:
        keyword = "if" if isinstance(node, ast.If) else "while"
        is_in_body = line <= (node.body[-1].end_lineno or 0)
        prefix = keyword if is_in_body else f"else of {keyword}"
        return [(node.lineno, f"{prefix} {ast.unparse(node.test)}:")]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [(decorator.lineno, f"@{ast.unparse(decorator)}") for decorator in node.decorator_list]
    return []


def find_left_loop(gone: Sequence[Frame], waiting: Sequence[Frame], *, both_wait: bool = False) -> Frame | None:
    """Return the loop in user code that one rank has left and in which another rank waits.

    Args:
        gone: Frames of the rank that might have left the loop, innermost first.
        waiting: Frames of a rank that waits, innermost first.
        both_wait: Whether both ranks wait in a collective. A rank that is past an inner loop then counts as having left
            it, even if both ranks are still in an outer loop. If only one rank waits, such a position does not show
            which rank is ahead. Default: False.

    Returns:
        Location of the loop. None if there is no such loop.
    """
    # From the outermost frame inward, find the first call in which the two ranks are at different lines.
    gone_frames = list(reversed(select_user_frames(gone)))
    waiting_frames = list(reversed(select_user_frames(waiting)))
    for depth, (gone_frame, waiting_frame) in enumerate(zip(gone_frames, waiting_frames)):
        if (gone_frame.file, gone_frame.function) != (waiting_frame.file, waiting_frame.function):
            return None
        if gone_frame.line == waiting_frame.line:
            continue
        if gone_frame.line < waiting_frame.line:
            return None
        shared_loops = {
            node.lineno
            for node in _list_loops(waiting_frame)
            if node.lineno <= gone_frame.line <= (node.end_lineno or 0)
        }
        if shared_loops and not both_wait:
            return None  # both are in one loop, so it is unknown which rank is ahead
        for frame in waiting_frames[depth:]:
            for node in _list_loops(frame):
                if frame is not waiting_frame or node.lineno not in shared_loops:
                    return Frame(frame.file, node.lineno, frame.function)
        return None
    return None


def _list_loops(frame: Frame) -> list[ast.stmt]:
    return [node for node in _list_statements_around(frame) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))]


def _list_statements_around(frame: Frame) -> list[ast.stmt]:
    """Return the statements that contain the frame's line, outermost first. Empty if the source is not available."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.file)))
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return [node for node in nodes if node.lineno <= frame.line <= (node.end_lineno or 0)]
