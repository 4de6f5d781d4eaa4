"""A view of a rank, in ages: what its pulse says, and what its stack says of where it is.

What a stack says about its rank: the user's line, a debugger, a data loader, a line that only some ranks reach.
"""

import ast
import linecache
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.common.callsite import Frame, is_users
from headway.runtime import pulse
from headway.runtime.heartbeat import ENDED

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


_NAMES = {
    "numbers": "an exchange of numbers",
    "objects": "gather_object",
    "object": "broadcast_object_list",
    "pad": "pad_across_processes",
    # as NCCL's recorder calls them
    "all_reduce_barrier": "barrier",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce of several tensors",
    "coalesced": "several collectives at once",
}

LATE = 3.0
"""Seconds without a heartbeat after which a running process is taken to hold the interpreter lock."""


@dataclass(frozen=True)
class CollectiveCall:
    """The latest collective of a rank in one group.

    Attributes:
        group: "headway" for the ledger, else torch's name of the group.
        number: how many this rank has entered in this group.
        age: for how long it has been inside; None where it has left.
        members: the ranks of the group; None where nobody says.
    """

    group: str
    number: int
    operation: str
    age: float | None = None
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RankView:
    """What is known about one rank.

    Attributes:
        exit_code: how it ended; None while it runs.
        state: the kernel's letter for it: R, S, D, T (stopped), t (traced), Z; "" where unknown; "?" of a rank that does
            not answer.
        beat_age: since its last heartbeat; None where it has none (a program that is not Python).
        timeout: how long its program lets others be late; 0.0 where it has not said.
        lenience: how much later than that everybody may be for now, as it says.
        phase: "" for its program; "ended".
        phase_age: since it said so.
        frames: its main thread's stack, innermost first.
        frames_age: how old the stack is; 0 for a live one.
        still_age: for how long the stack has been the same.
        calls: its latest collective in each group; None: on the move just now.
        writing_age: since it last wrote to a file.
        transfer: what it waits for from one other rank; "": nothing.
        transfer_age: for how long.
        idle_age: since it last used the processor or wrote anything; math.inf where nobody has looked.
        excused_age: since there was last a reason to let the others wait (a debugger, a file being written).
    """

    rank: int
    host: str = ""
    pid: int = 0
    exit_code: int | None = None
    state: str = ""
    beat_age: float | None = None
    timeout: float = 0.0
    lenience: float = 0.0
    phase: str = ""
    update: int = 0
    micro_step: int = 0
    frames: tuple[Frame, ...] = ()
    frames_age: float = 0.0
    still_age: float = 0.0
    calls: tuple[CollectiveCall, ...] | None = ()
    writing_age: float = math.inf
    excused_age: float = math.inf
    phase_age: float = 0.0
    idle_age: float = math.inf
    transfer: str = ""
    transfer_age: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Is its program over?"""
        return self.exit_code is not None or self.phase == ENDED

    @property
    def is_stopped(self) -> bool:
        """Has a signal stopped it?"""
        return self.state == "T"

    @property
    def is_mute(self) -> bool:
        """Does it live without beating?"""
        return self.state in ("T", "?") or (self.beat_age is not None and self.beat_age > LATE)

    @property
    def wait(self) -> CollectiveCall | None:
        """What it is inside of: a transfer between two ranks, or a collective, the ledger's before torch's."""
        if self.transfer:
            return CollectiveCall("", 0, self.transfer, self.transfer_age)
        inside = [call for call in self.calls or () if call.age is not None]
        if inside:
            return min(inside, key=lambda call: (call.group != "headway", -(call.age or 0.0)))
        if is_meeting(self.frames):
            return CollectiveCall("", 0, meeting(self.frames) or self.frames[0].function, self.still_age)
        if self.phase == pulse.PARTS:
            return CollectiveCall("", 0, "the commit of a checkpoint", self.phase_age)
        return None

    @property
    def operation(self) -> str:
        """What it waits in, by the name that a user knows."""
        wait = self.wait
        return "" if wait is None else _NAMES.get(wait.operation, wait.operation)

    def number_in(self, group: str) -> int | None:
        """How many collectives of a group it has entered, where that is known."""
        return next((call.number for call in self.calls or () if call.group == group), None)


def view_of(rank: int, reading: pulse.PulseReading, now: float) -> RankView:
    """What a pulse says, in ages."""
    note = reading.note
    calls: tuple[CollectiveCall, ...] | None = None
    if isinstance(note.get("torch"), list) or not note:
        calls = tuple(
            CollectiveCall(
                one["group"],
                one["number"],
                one["operation"],
                None if one["since"] is None else now - one["since"],
                _members(one),
            )
            for one in note.get("torch", [])
        )
    if reading.calls:
        last = reading.calls[-1]
        own = CollectiveCall("headway", last.number, last.operation, None if last.left else now - last.entered)
        calls = (own, *(calls or ()))
    return RankView(
        rank,
        socket.gethostname(),
        reading.pid,
        beat_age=now - reading.beat if reading.beats else None,
        timeout=reading.timeout,
        lenience=reading.lenience,
        phase=reading.phase,
        update=reading.update,
        micro_step=reading.micro_step,
        frames=tuple(Frame(*frame) for frame in note.get("stack", [])),
        frames_age=now - reading.noted,
        still_age=now - note.get("still", now),
        calls=calls,
        phase_age=now - reading.phase_since,
        transfer=reading.transfer,
        transfer_age=now - reading.transfer_since,
    )


def encode(view: RankView) -> dict[str, Any]:
    """A view as JSON, for another machine; frames that nobody reads are left out."""
    kept = [*view.frames[:6], *users(view.frames[6:])][:12]
    finite = {name: value for name, value in asdict(replace(view, frames=())).items() if value != math.inf}
    return {**finite, "frames": [[frame.file, frame.line, frame.function] for frame in kept]}


def decode(content: Mapping[str, Any]) -> RankView:
    """Read `encode`'s JSON."""
    frames, calls = tuple(Frame(*frame) for frame in content["frames"]), content["calls"]
    if calls is not None:
        calls = tuple(CollectiveCall(**{**call, "members": _members(call)}) for call in calls)
    return RankView(**{**content, "frames": frames, "calls": calls})


def _members(call: Mapping[str, Any]) -> tuple[int, ...] | None:
    return None if call["members"] is None else tuple(call["members"])
