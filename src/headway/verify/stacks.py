"""Python stacks of a run that makes no progress. Each rank writes its stack, and the report names the script lines."""

import faulthandler
import re
from dataclasses import dataclass
from pathlib import Path

from headway.common.callsite import is_user_file

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
"""Line of a stack that faulthandler has written."""


@dataclass(frozen=True)
class StuckRank:
    """Rank that made no progress.

    Attributes:
        rank: Rank of the process.
        line: Innermost line of the user's code, such as "train.py:30 in main"; "" if none was on the stack.
        is_waiting: Whether the rank probably waited for other ranks, in a collective or in backward.
    """

    rank: int
    line: str
    is_waiting: bool


def get_stack_file(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stack."""
    return folder / f"stack{rank}.txt"


def write_stack(folder: Path, rank: int) -> None:
    """Write the stacks of all threads of this process to its stack file.

    Args:
        folder: Folder for the records of the run.
        rank: Rank of this process.
    """
    with get_stack_file(folder, rank).open("w") as file:
        faulthandler.dump_traceback(file)


def is_any_stuck(folder: Path) -> bool:
    """Whether any rank of the run has written its stack, which means that the run made no progress."""
    return any(path.stat().st_size for path in folder.glob("stack*.txt"))


def read_stacks(folder: Path, num_processes: int) -> list[StuckRank]:
    """Return a `StuckRank` for each rank that has written its stack."""
    stuck_ranks = []
    for rank in range(num_processes):
        path = get_stack_file(folder, rank)
        # The file is empty if the server has prepared it, but the rank has not reached its time limit.
        if path.exists() and (text := path.read_text("utf-8", "replace")):
            stuck_ranks.append(_read_stack(rank, text))
    return stuck_ranks


def _read_stack(rank: int, text: str) -> StuckRank:
    """Return the `StuckRank` for the text that faulthandler has written on a rank."""
    # faulthandler prints the main thread last, after the recorder's threads and those of libraries.
    main_thread = text.rpartition("hread 0x")[2]
    frames = [match for line in main_thread.splitlines() if (match := _FRAME.match(line))]
    user_frame = next((each for each in frames if is_user_file(each["file"])), None)
    line = ""
    if user_frame is not None:
        line = f"{Path(user_frame['file']).name}:{user_frame['line']} in {user_frame['name']}"
    return StuckRank(rank, line, any(_is_wait(each) for each in frames))


def _is_wait(frame: re.Match[str]) -> bool:
    """Whether a stack frame probably waits for other ranks: in a collective, or in backward.

    In backward, DDP and FSDP wait for other ranks in C++ code, which a Python stack does not show.
    """
    is_collective = "collectives" in frame["file"] or "distributed_c10d" in frame["file"]
    return is_collective or frame["name"] == "_engine_run_backward"


def describe_stuck(ranks: list[StuckRank]) -> str:
    """Return a phrase that names the rank for which the others wait, and the line of each rank; "" if nothing is known.

    At most four ranks are listed.

    Args:
        ranks: Ranks that have written their stacks.
    """
    known = [each for each in ranks if each.line]
    if not known:
        return ""
    if len(ranks) == 1:
        return f"it was at {known[0].line}"
    places = ", ".join(f"rank {each.rank} at {each.line}" for each in known[:4])
    not_waiting = [each for each in ranks if not each.is_waiting]
    if len(not_waiting) == 1:
        return f"the other ranks waited for rank {not_waiting[0].rank}: {places}"
    return places
