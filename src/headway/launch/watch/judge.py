"""Diagnose hangs: determine from the states of all ranks (`RankView`) for which rank the others wait.

The diagnosis is a pure function. A rank waits if, according to Headway's record of collectives or torch's flight
recorder, it has entered a collective and not left it. It also waits if its innermost frame is torch.distributed's own
code, during a transfer with another rank, and until a checkpoint is committed. If a rank has waited for longer than the
timeout, the ranks that do not wait are missing. Times are ages in seconds, so that the states of ranks on different
machines can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.common.callsite import Frame
from headway.launch.watch import stacks
from headway.launch.watch.views import CollectiveCall, RankView

_LEFT_LOOP_TIMEOUT = 30.0
"""Seconds that all ranks must wait before ranks that have left a loop too early are reported.

A shorter timeout replaces this value.
"""


@dataclass(frozen=True)
class HangDiagnosis:
    """Diagnosis of a hang: the ranks that wait in a collective, and the ranks that have not reached it.

    If all scripts have ended and no rank waits, it names the ranks whose idle processes keep the run from ending.

    Attributes:
        timeout: Time limit of the hang watch in seconds, including `lenience`.
        waiting: Ranks that wait, in descending order of their waiting time. Empty if all scripts have ended.
        missing: Ranks that have not reached the collective, or whose processes do not end. Empty if every rank waits.
        world_size: Number of processes on all machines.
        lenience: Seconds that were added to the timeout at a rank's request.
    """

    timeout: float
    waiting: tuple[RankView, ...]
    missing: tuple[RankView, ...]
    world_size: int
    lenience: float = 0.0


def diagnose_hang(views: Sequence[RankView], timeout: float, world_size: int | None = None) -> HangDiagnosis | None:
    """Return a diagnosis if the run hangs in a collective.

    If all ranks wait, and some of them have left a loop in which others still wait, the timeout is at most 30 seconds
    plus the extension.

    Args:
        views: State of each rank.
        timeout: Seconds that a rank may be missing from a collective; 0 for no limit. The longest extension
            (`lenience`) that a rank requests is added.
        world_size: Number of ranks. Default: the length of `views`.

    Returns:
        The diagnosis. None if no rank hangs, or if a rank has failed, because the failure is then the cause to report.
    """
    if timeout <= 0 or any(view.exit_code for view in views):
        return None
    num_ranks = world_size or len(views)
    lenience = max((view.lenience for view in views if not view.has_ended), default=0.0)
    timeout += lenience
    waiting = sorted(filter(_is_waiting, views), key=lambda view: view.wait_age, reverse=True)
    if not waiting:
        return None
    if len(waiting) < len(views):
        missing = tuple(_list_missing(views, waiting, timeout))
        return HangDiagnosis(timeout, tuple(waiting), missing, num_ranks, lenience) if missing else None
    is_hanging = _have_waited_longer(waiting, timeout)
    if not is_hanging and len(waiting) == num_ranks:
        # If a rank has left a loop, the wait can never end. So it is reported before the full timeout, which is meant
        # for slow ranks. The time is checked first, because the search for loops parses source files.
        short_timeout = min(timeout, _LEFT_LOOP_TIMEOUT + lenience)
        is_hanging = _have_waited_longer(waiting, short_timeout) and _has_rank_left_loop(waiting)
    return HangDiagnosis(timeout, tuple(waiting), (), num_ranks, lenience) if is_hanging else None


def _is_waiting(view: RankView) -> bool:
    """Whether a rank waits for other ranks, its program still runs, and its process responds."""
    return view.wait is not None and not view.has_ended and not view.is_mute


def _list_missing(views: Sequence[RankView], waiting: Sequence[RankView], timeout: float) -> list[RankView]:
    """Return the ranks that have kept the longest-waiting rank waiting for longer than the timeout.

    Args:
        views: State of each rank.
        waiting: Ranks that wait, in descending order of their waiting time.
        timeout: Seconds that a rank may be missing from a collective. A rank with a valid reason (a debugger, a file
            write) is missing only from the time at which the reason ended.
    """
    longest_wait = waiting[0].wait_age
    call = waiting[0].wait
    assert call is not None
    absent = [view for view in views if not _is_waiting(view) and not _has_passed(view, call)]
    absent_members = [view for view in absent if call.members is None or view.rank in call.members]
    # If no member of the group is absent, its members wait for a rank outside of the group, in another collective.
    candidates = absent_members or absent
    return [view for view in candidates if min(longest_wait, view.excused_age) > timeout]


def _have_waited_longer(waiting: Sequence[RankView], seconds: float) -> bool:
    """Whether every rank has waited for longer than `seconds`, and had no valid reason to be late in that time."""
    return all(min(view.wait_age, view.excused_age) > seconds for view in waiting)


def _has_rank_left_loop(waiting: Sequence[RankView]) -> bool:
    """Whether a waiting rank has left a loop in which other ranks still wait, in another operation."""
    if len(list_operations(waiting)) == 1:
        return False
    return any(find_loop_left_behind(view, waiting) is not None for view in waiting)


class Operation(NamedTuple):
    """Operation in which a rank waits. See `CollectiveCall` for the attributes."""

    group: str
    number: int
    name: str


def list_operations(waiting: Sequence[RankView]) -> set[Operation]:
    """Return the different operations in which ranks wait."""
    waits = [view.wait for view in waiting if view.wait is not None]
    return {Operation(wait.group, wait.number, wait.operation) for wait in waits}


def find_excuse(view: RankView, timeout: float) -> str:
    """Return the reason why a rank for which others wait is not reported as hanging. Empty if there is no reason.

    Args:
        view: State of the rank.
        timeout: Seconds without progress after which a file write is no longer a valid reason.
    """
    if view.state == "t" or stacks.is_in_debugger(view.frames):
        return "a debugger has stopped it"
    return "it writes a file" if is_writing(view) and view.writing_age < timeout else ""


def is_writing(view: RankView) -> bool:
    """Whether the rank is running code that writes a checkpoint or weights, and is not waiting for other ranks.

    A wait that only torch's flight recorder reports does not count as waiting here.
    """
    is_waiting = view.wait is not None and view.wait.group in ("headway", "")  # "": a wait that is not counted
    return not is_waiting and (stacks.is_saving(view.frames) or view.phase.startswith("saving"))


def is_stuck_writing(view: RankView, seconds: float) -> bool:
    """Whether the rank is writing a file and has made no progress for longer than `seconds`.

    This applies only to writes in library code, not to those in a hook or a `state_dict` that the user has written.

    Args:
        view: State of the rank.
        seconds: Maximum time without progress.
    """
    has_written = view.writing_age < math.inf
    has_stalled = min(view.writing_age, view.still_age) > seconds
    return has_written and has_stalled and is_writing(view) and stacks.is_in_saver(view.frames)


def diagnose_lingering(views: Sequence[RankView], timeout: float, world_size: int) -> HangDiagnosis | None:
    """Return a diagnosis if all scripts have ended and an idle process keeps the run from ending, else None.

    A process with a thread that still uploads data is active and may take its time. A process whose threads only wait
    is idle.

    Args:
        views: State of each rank.
        timeout: Seconds that a process may be idle after its script has ended; 0 for no limit.
        world_size: Number of ranks. There is no diagnosis unless `views` contains all of them.
    """
    if timeout <= 0 or len(views) < world_size or any(view.exit_code or not view.has_ended for view in views):
        return None
    idle = tuple(view for view in views if view.exit_code is None and min(view.phase_age, view.idle_age) > timeout)
    is_activity_known = all(view.idle_age < math.inf for view in idle)
    if not idle or not is_activity_known:
        return None
    return HangDiagnosis(timeout, (), idle, world_size)


def _has_passed(view: RankView, call: CollectiveCall) -> bool:
    """Whether a rank has entered `call` or a later collective of the same group, and is still running and responding.

    False if the rank's position in the group is unknown. Also False if `call` is not counted (its number is 0), as with
    a point-to-point transfer.
    """
    number = view.number_in(call.group)
    return number is not None and number >= call.number > 0 and not view.has_ended and not view.is_mute


def find_loop_left_behind(view: RankView, waiting: Sequence[RankView]) -> tuple[Frame, list[RankView]] | None:
    """Return a loop that a waiting rank has left and in which other ranks still wait.

    Args:
        view: State of the rank that might have left a loop.
        waiting: States of the ranks that wait.

    Returns:
        Pair of (location of the loop, ranks that wait in it). None if there is no such loop.
    """
    loops = [(stacks.find_left_loop(view.frames, other.frames, both_wait=True), other) for other in waiting]
    ranks_in_loop = [other for loop, other in loops if loop is not None]
    for loop, _ in loops:
        if loop is not None:
            return loop, ranks_in_loop
    return None
