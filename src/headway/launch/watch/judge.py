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
    lenience = max((view.lenience for view in views if not view.has_ended), default=0.0)
    timeout += lenience
    present = [view for view in views if view.wait is not None and not view.has_ended and not view.is_mute]
    waiting = sorted(present, key=lambda view: view.wait_age, reverse=True)
    total = world_size or len(views)
    if waiting and len(waiting) == total and _is_parted(waiting, min(timeout, _LEFT_LOOP_TIMEOUT + lenience)):
        return HangDiagnosis(timeout, tuple(waiting), (), total, lenience)
    if not waiting or waiting[0].wait_age <= timeout:
        return None
    first = waiting[0].wait
    assert first is not None
    absent = [view for view in views if view not in present and not _has_passed(view, first)]
    members = [view for view in absent if first.members is None or view.rank in first.members]
    missing = [view for view in members or absent if min(waiting[0].wait_age, view.excused_age) > timeout]
    if missing:
        return HangDiagnosis(timeout, tuple(waiting), tuple(missing), total, lenience)
    if len(waiting) == len(views) and min(min(view.wait_age, view.excused_age) for view in views) > timeout:
        return HangDiagnosis(timeout, tuple(waiting), (), total, lenience)
    return None


def _is_parted(waiting: Sequence[RankView], seconds: float) -> bool:
    """Whether all ranks have waited for `seconds`, and some of them have left a loop in which others still wait.

    Such a wait can never end, because every rank waits. So it is reported before the full timeout has passed, which is
    meant only for slow ranks.

    Args:
        waiting: Ranks that wait.
        seconds: Minimum time for which all ranks must have waited.
    """
    if min(min(view.wait_age, view.excused_age) for view in waiting) <= seconds or len(list_operations(waiting)) == 1:
        return False
    return any(find_loop_left_behind(view, waiting) is not None for view in waiting)


def list_operations(waiting: Sequence[RankView]) -> set[tuple[str, int, str]]:
    """Return the operations in which ranks wait, as a set of tuples (process group, number, name)."""
    return {(view.wait.group, view.wait.number, view.wait.operation) for view in waiting if view.wait is not None}


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
    is_at_the_door = view.wait is not None and view.wait.group in ("headway", "")
    return not is_at_the_door and (stacks.is_saving(view.frames) or view.phase.startswith("saving"))


def is_stuck_writing(view: RankView, seconds: float) -> bool:
    """Whether the rank is writing a file and has made no progress for longer than `seconds`.

    This applies only to writes in library code, not to those in a hook or a `state_dict` that the user has written.

    Args:
        view: State of the rank.
        seconds: Maximum time without progress.
    """
    is_still = seconds < min(view.writing_age, view.still_age) and view.writing_age < math.inf
    return is_still and is_writing(view) and stacks.is_in_saver(view.frames)


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
    left = tuple(view for view in views if view.exit_code is None and min(view.phase_age, view.idle_age) > timeout)
    if not left or any(view.idle_age == math.inf for view in left):
        return None
    return HangDiagnosis(timeout, (), left, world_size)


def _has_passed(view: RankView, call: CollectiveCall) -> bool:
    """Whether a rank has entered `call` or a later collective of the same group, its script still runs, and its process responds.

    False if the rank's position in the group is unknown, or if `call` has no number, such as a point-to-point transfer.
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
    inside = [each for each in waiting if stacks.find_left_loop(view.frames, each.frames, both_wait=True) is not None]
    loop = stacks.find_left_loop(view.frames, inside[0].frames, both_wait=True) if inside else None
    return None if loop is None else (loop, inside)
