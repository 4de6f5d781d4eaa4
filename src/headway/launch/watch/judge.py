"""The judge of hangs: from what every rank's pulse says, which rank the others wait for, where it is, and why.

A pure function of a table. A rank waits when it has entered a collective (by Headway's ledger or torch's flight
recorder) and not left it, or stands in torch.distributed's own code. Where somebody has waited for longer than the
timeout, those who do not wait are missing. Ages are in seconds, so that tables of several machines fit together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.common.text import format_seconds, ranges
from headway.launch.watch import views as stacks
from headway.launch.watch.views import LATE, CollectiveCall, RankView
from headway.runtime.control_plane.attendance import SAVE


@dataclass(frozen=True)
class HangDiagnosis:
    """A hang.

    Attributes:
        timeout: what was waited, in seconds.
        waiting: the ranks that wait, longest first.
        missing: the ranks that do not come; empty where every rank waits.
        world_size: all ranks.
    """

    timeout: float
    waiting: tuple[RankView, ...]
    missing: tuple[RankView, ...]
    world_size: int
    notes: tuple[str, ...] = field(default=())


def judge(views: Sequence[RankView], timeout: float, world_size: int | None = None) -> HangDiagnosis | None:
    """Does the run hang, and for whom?

    Args:
        views: what is known about each rank.
        timeout: seconds that a rank may be missing from a collective; 0: for ever. To it comes the longest lenience that a
            rank asks for.
        world_size: all ranks, where `views` are not all of them.

    Returns:
        None where nothing hangs, or where a rank has failed and that is the thing to report.
    """
    if timeout <= 0 or any(view.exit_code for view in views):
        return None
    lenience = max((view.lenience for view in views if not view.has_ended), default=0.0)
    timeout += lenience
    present = [view for view in views if view.wait is not None and not view.has_ended and not view.is_mute]
    waiting = sorted(present, key=_age, reverse=True)
    if not waiting or _age(waiting[0]) <= timeout:
        return None
    total = world_size or len(views)
    first = waiting[0].wait
    assert first is not None
    absent = [view for view in views if view not in present and not _has_passed(view, first)]
    members = [view for view in absent if first.members is None or view.rank in first.members]
    missing = [view for view in members or absent if min(_age(waiting[0]), view.excused_age) > timeout]
    if missing:
        return HangDiagnosis(timeout, tuple(waiting), tuple(missing), total, _lenience_note(lenience))
    if len(waiting) == len(views) and min(min(_age(view), view.excused_age) for view in views) > timeout:
        return HangDiagnosis(timeout, tuple(waiting), (), total, _lenience_note(lenience))
    return None


def excuse(view: RankView, timeout: float) -> str:
    """Why the others must wait for this rank without complaint; "" where there is no reason."""
    if view.state == "t" or stacks.is_in_debugger(view.frames):
        return "a debugger holds it"
    return "it writes a file" if is_writing(view) and view.writing_age < timeout else ""


def is_writing(view: RankView) -> bool:
    """Is it inside code that writes a checkpoint or weights, and not waiting there for other ranks?"""
    is_at_the_door = view.wait is not None and view.wait.group in ("headway", "")
    return not is_at_the_door and (stacks.is_saving(view.frames) or view.phase.startswith("saving"))


def is_stuck_writing(view: RankView, seconds: float) -> bool:
    """Has a write inside a library's code, not in a hook or `state_dict` of the user's, moved no byte for so long?"""
    is_still = seconds < min(view.writing_age, view.still_age) and view.writing_age < math.inf
    return is_still and is_writing(view) and stacks.is_in_saver(view.frames)


def lingering(views: Sequence[RankView], timeout: float, world_size: int) -> HangDiagnosis | None:
    """All scripts are over; does a process that does nothing any more keep the run from ending?

    A thread that still uploads something is at work and may take its time; one that waits for ever is idle.

    Args:
        views: what is known about each rank.
        timeout: seconds that a process may be idle after its script; 0: for ever.
        world_size: all ranks.
    """
    if timeout <= 0 or len(views) < world_size or any(view.exit_code or not view.has_ended for view in views):
        return None
    left = tuple(view for view in views if view.exit_code is None and min(view.phase_age, view.idle_age) > timeout)
    if not left or any(view.idle_age == math.inf for view in left):
        return None
    return HangDiagnosis(timeout, (), left, world_size)


def lateness(view: RankView) -> str:
    """What a person should hear of a rank whose script is over, and which does not end."""
    doing = (
        f"a thread or an exit function of it is at {where(view)}" if view.frames else "nothing is known of where it is"
    )
    return f"rank {view.rank}{_who(view)} has come to the end of its script, but has not ended for {_span(view.phase_age)}: {doing}"


def silence(views: Sequence[RankView]) -> str:
    """What a person should hear of ranks whose checkpoint is not taken by their disk."""
    first, has = views[0], "has" if len(views) == 1 else "have"
    return (
        f"{_ranks(views)}{_who(first) if len(views) == 1 else ''} {has} not written a byte of a checkpoint for "
        f"{_span(first.writing_age)}, at {where(first)}{_disk(first)}. The run goes on when it does"
    )


def _disk(view: RankView) -> str:
    waits = "; the kernel says D: it waits for a disk or a network file system" if view.state == "D" else ""
    return f": its file system does not answer{waits}"


def _lenience_note(lenience: float) -> tuple[str, ...]:
    if not lenience:
        return ()
    return (
        f"  {_span(lenience)} of this timeout were added because a rank ran out of memory in a batch-size search, and others may "
        "wait in a collective that ends with the process group's timeout",
    )


def _age(view: RankView) -> float:
    wait = view.wait
    return (wait.age or 0.0) if wait is not None else 0.0


def _has_passed(view: RankView, call: CollectiveCall) -> bool:
    """Has it entered this collective as well, and goes on?"""
    number = view.number_in(call.group)
    return number is not None and number >= call.number > 0 and not view.has_ended and not view.is_mute


# -------------------------------------------------------------------- telling


def headline(verdict: HangDiagnosis) -> str:
    """The hang in one line."""
    waiting, missing = verdict.waiting, verdict.missing
    timeout = f"timeout {_span(verdict.timeout)}"
    if not waiting:
        verb, longest = "has" if len(missing) == 1 else "have", _span(max(view.phase_age for view in missing))
        return (
            f"this run does not end: {_ranks(missing)} of {verdict.world_size} {verb} come to the end of the script, but not ended "
            f"for {longest} ({timeout})"
        )
    longest = _span(_age(waiting[0]))
    if not missing:
        return f"this run hangs: all {verdict.world_size} ranks have waited for {longest} ({timeout}), {_for_what(waiting)}"
    verb, has = "is" if len(missing) == 1 else "are", "has" if len(waiting) == 1 else "have"
    operations = " and ".join(dict.fromkeys(view.operation for view in waiting))
    return (
        f"this run hangs: {_ranks(missing)} of {verdict.world_size} {verb} missing from {operations}, "
        f"where {_ranks(waiting)} {has} waited for {longest} ({timeout})"
    )


def text(verdict: HangDiagnosis) -> str:
    """The report as people read it."""
    lines = [headline(verdict)]
    saving = [view for view in verdict.waiting if view.operation == SAVE]
    if saving and len(saving) < verdict.world_size:
        lines.append(
            f"  save_state was called on {_ranks(saving)} only, at {where(saving[0])}: call it on every rank, unconditionally"
        )
    for view in verdict.missing:
        lines += _about_missing(view, verdict.waiting[0]) if verdict.waiting else _about_lingering(view)
    told: dict[str, list[RankView]] = {}
    for view in verdict.waiting:
        told.setdefault(_place(view), []).append(view)
    for place, views in told.items():
        verb = "waits" if len(views) == 1 else "wait"
        lines.append(f"  {_ranks(views)}{_who(views[0]) if len(views) == 1 else ''} {verb} in {place}")
        found = stacks.condition(views[0].frames)
        if found is not None and (verdict.missing or len(told) > 1):
            lines.append(f"      under `{found[1]}` ({found[0]}), which not every rank passes: call it on all ranks")
    return "\n".join([*lines, *verdict.notes])


def where(view: RankView) -> str:
    """The user's innermost line, and the library's that it called."""
    frames = stacks.users(view.frames) or view.frames
    return str(frames[0]) if frames else "an unknown place"


def _about_missing(view: RankView, waiting: RankView) -> list[str]:
    name = f"  rank {view.rank}{_who(view)}"
    if view.has_ended:
        text = f"{name} has finished its script"
        return [text, "      it left before the others: give all ranks the same number of batches and collectives"]
    lines = [f"{name} {_doing(view)}", *_source(view)]
    lines += [f"      called from {frame}" for frame in stacks.users(view.frames)[1:4]]
    loop = stacks.left_loop(view.frames, waiting.frames)
    if loop is not None:
        lines.append(f"      it has left the loop of {loop}, in which the others wait: give all ranks as many steps")
    lines.append(f"      {_advice(view)}")
    return lines


def _about_lingering(view: RankView) -> list[str]:
    advice = "let threads end when the script does (daemon=True), and exit functions return; --timeout 0 waits for ever"
    return [f"  {lateness(view)}", *_source(view), f"      {advice}"]


def _source(view: RankView) -> list[str]:
    """The user's innermost line as it stands in the file, where that is here."""
    return [f"      {frame.source}" for frame in stacks.users(view.frames)[:1] if frame.source]


def _doing(view: RankView) -> str:
    at = where(view)
    if view.is_stopped:
        return (
            f"is stopped (process state T: SIGSTOP or Ctrl-Z); at its last heartbeat, "
            f"{_span(view.beat_age or 0.0)} ago, it was at {at}"
        )
    if view.state == "?":
        return "does not answer: it is stopped, holds the interpreter lock in C code, or is gone"
    if view.is_mute:
        live = "it is" if view.frames_age < LATE else "it was last seen"
        return f"holds the interpreter lock in C code (no heartbeat for {_span(view.beat_age or 0.0)}); {live} at {at}"
    if stacks.is_loading_data(view.frames):
        return f"waits for data at {at}, for {_span(view.still_age)}"
    if view.beat_age is None:
        return "is alive; it is not a Python program that Headway started, so nothing more is known"
    return f"is at {at}" + (f", for {_span(view.still_age)}" if view.still_age >= 1 else "")


def _advice(view: RankView) -> str:
    own = stacks.users(view.frames)
    if view.state == "?":
        return "start the run with `headway launch`, whose watch sees such a rank from outside"
    if view.is_stopped:
        return f"continue it with `kill -CONT {view.pid}` before the timeout is over, or find out who stops it"
    if view.is_mute:
        return f"`py-spy dump --native --pid PID` in the next run shows the C code; state {view.state or 'unknown'}"
    if is_stuck_writing(view, 1.0):
        return f"it writes a checkpoint, and no byte has moved for {_span(view.writing_age)}{_disk(view)}"
    if view.state == "D":
        return "the kernel says D: it waits for a disk or a network file system"
    if stacks.is_in_dataset(view.frames):
        return "the dataset does not come back from this line; every rank waits for this batch"
    if stacks.is_loading_data(view.frames):
        return "look at the dataset: with num_workers=0 the stack ends in the line that blocks"
    if own and "sleep(" in own[0].source:
        return "it sleeps there; ranks must not wait for anything but each other"
    return "if this is meant to take so long, raise --timeout; otherwise let every rank reach the same collectives"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else format_seconds(seconds)


def _who(view: RankView) -> str:
    parts = [f"host {view.host}"] if view.host else []
    parts += [f"pid {view.pid}"] if view.pid else []
    if view.update or view.micro_step:
        parts.append(f"update {view.update}, micro-step {view.micro_step}")
    return f" ({', '.join(parts)})" if parts else ""


def _place(view: RankView) -> str:
    wait = view.wait
    assert wait is not None
    number = f" #{wait.number}" if wait.number else ""
    during = " of the gradients" if stacks.is_in_backward(view.frames) else ""
    return f"{view.operation}{number}{during} at {where(view)}"


def _for_what(waiting: Sequence[RankView]) -> str:
    calls = {(view.wait.group, view.wait.number, view.wait.operation) for view in waiting if view.wait is not None}
    if len(calls) == 1:
        return "in the same operation: the network between them is the suspect"
    number = min(number for _, number, _ in calls)
    behind = [view for view in waiting if view.wait is not None and view.wait.number == number]
    if len({group for group, _, _ in calls}) == 1 and len(behind) < len(waiting):
        return f"but not in the same operation: {_ranks(behind)} cannot leave an earlier one, or their order differs"
    return "but not in the same operation: their order differs"


def _ranks(views: Sequence[RankView]) -> str:
    return f"rank{'s' if len(views) > 1 else ''} {ranges(view.rank for view in views)}"


def encode(verdict: HangDiagnosis) -> dict[str, Any]:
    """The hang for failure.json."""

    def one(view: RankView) -> dict[str, Any]:
        wait = view.wait
        return {
            "rank": view.rank,
            "host": view.host,
            "pid": view.pid,
            "state": view.state,
            "where": where(view),
            "operation": view.operation or None,
            "seconds": round(_age(view), 1) if wait is not None else None,
            "heartbeat_age": view.beat_age,
            "update": view.update,
            "micro_step": view.micro_step,
            "stack": [str(frame) for frame in view.frames],
        }

    return {
        "timeout": verdict.timeout,
        "headline": headline(verdict),
        "missing": [one(view) for view in verdict.missing],
        "waiting": [one(view) for view in verdict.waiting],
    }
