"""Report of a hang, which describes where each waiting and each missing rank is, with advice.

This module only formats locations in code. A rank's heartbeat thread (`headway.core.runtime.heartbeat`) reads the stack
of the main thread, and `views` stores the stack in a `RankView`. `stacks` selects the frames of user code, and
`locate_rank` names the innermost one. If a report names a wrong line, check two functions:
`headway.common.callsite.is_user_file` decides which files are user code, and `hang_watch._use_live_stack` replaces the
stack of a heartbeat with a newer one.
"""

from collections.abc import Sequence
from typing import Any

from headway.common.text import format_ranges, format_seconds
from headway.core.runtime.control_plane.attendance import SAVE_CALL
from headway.launch.watch import stacks
from headway.launch.watch.judge import HangDiagnosis, find_loop_left_behind, is_stuck_writing, list_operations
from headway.launch.watch.views import LATE, RankView

_LEFT_LOOP_ADVICE = (
    "give all ranks the same number of steps, or leave the loop on all ranks together (call accelerator.set_trigger() on one, "
    "and break on all where accelerator.check_trigger() is true)"
)


def describe_lateness(view: RankView) -> str:
    """Return a message about a rank whose script has ended, but whose process is still running."""
    position = "its position is not known"
    if view.frames:
        position = f"a thread or an exit function of it is at {locate_rank(view)}"
    return (
        f"rank {view.rank}{_describe_process(view)} has come to the end of its script, but has not ended for "
        f"{_format_span(view.phase_age)}: {position}"
    )


def describe_blocked_writers(views: Sequence[RankView]) -> str:
    """Return a message about ranks whose checkpoint writes are blocked, because their file system does not respond.

    Args:
        views: State of each of these ranks. At least one is required.
    """
    first = views[0]
    has = "has" if len(views) == 1 else "have"
    return (
        f"{_describe_one_or_more(views)} {has} not written a byte of a checkpoint for {_format_span(first.writing_age)}, "
        f"at {locate_rank(first)}{_describe_disk(first)}. The run continues when it does"
    )


def _describe_disk(view: RankView) -> str:
    state = "; process state D: it waits for a disk or a network file system" if view.state == "D" else ""
    return f": its file system does not answer{state}"


def format_headline(verdict: HangDiagnosis) -> str:
    """Return a one-line summary of the hang.

    It names the missing ranks and the operations in which the others wait. If no rank is missing, it compares the
    operations in which all ranks wait. If all scripts have ended, it names the processes that are still running.
    """
    waiting, missing = verdict.waiting, verdict.missing
    timeout = f"timeout {_format_span(verdict.timeout)}"
    if not waiting:
        has = "has" if len(missing) == 1 else "have"
        longest = _format_span(max(view.phase_age for view in missing))
        return (
            f"this run does not end: {_name_ranks(missing)} of {verdict.world_size} {has} come to the end of the "
            f"script, but not ended for {longest} ({timeout})"
        )
    longest = _format_span(waiting[0].wait_age)
    if not missing:
        return f"this run hangs: all {verdict.world_size} ranks have waited for {longest} ({timeout}), {_compare_operations(waiting)}"
    are = "is" if len(missing) == 1 else "are"
    have = "has" if len(waiting) == 1 else "have"
    operations = " and ".join(dict.fromkeys(view.operation for view in waiting))
    return (
        f"this run hangs: {_name_ranks(missing)} of {verdict.world_size} {are} missing from {operations}, "
        f"where {_name_ranks(waiting)} {have} waited for {longest} ({timeout})"
    )


def format_report(verdict: HangDiagnosis) -> str:
    """Return the full report of the hang as text for the screen."""
    lines = [format_headline(verdict)]
    saving = [view for view in verdict.waiting if view.operation == SAVE_CALL]
    if saving and len(saving) < verdict.world_size:
        lines.append(
            f"  save_state was called on {_name_ranks(saving)} only, at {locate_rank(saving[0])}: call it on every "
            "rank, unconditionally"
        )
    for view in verdict.missing:
        lines += _describe_missing(view, verdict.waiting[0]) if verdict.waiting else _describe_lingering(view)
    ranks_by_wait: dict[str, list[RankView]] = {}
    for view in verdict.waiting:
        ranks_by_wait.setdefault(_describe_wait(view), []).append(view)
    # If all ranks wait in the same operation, no loop or condition separates them.
    has_diverged = bool(verdict.missing) or len(ranks_by_wait) > 1
    for wait, views in ranks_by_wait.items():
        ranks = _describe_one_or_more(views)
        lines.append(f"  {ranks} {'waits' if len(views) == 1 else 'wait'} in {wait}")
        left_loop = None if verdict.missing else _describe_left_loop(views[0], verdict.waiting)
        if left_loop is not None:
            lines.append(f"      {left_loop}: {_LEFT_LOOP_ADVICE}")
        elif has_diverged:
            lines += _describe_condition(views[0])
    return "\n".join([*lines, *_describe_lenience(verdict.lenience)])


def _describe_one_or_more(views: Sequence[RankView]) -> str:
    """Return the numbers of some ranks. A single rank is described with its host, PID, and position in the training."""
    if len(views) == 1:
        return _name_ranks(views) + _describe_process(views[0])
    return _name_ranks(views)


def _describe_condition(view: RankView) -> list[str]:
    """Return a line about the condition on ranks, such as `if rank == 0`, under which a rank waits; [] if there is none."""
    condition = stacks.find_condition(view.frames)
    if condition is None:
        return []
    location, source = condition
    return [f"      under `{source}` ({location}), which not every rank passes: call it on all ranks"]


def locate_rank(view: RankView) -> str:
    """Return the innermost line of user code in a rank's stack, such as "train.py:12 in main".

    If no frame is user code, return the innermost frame. If the stack is empty, return "an unknown place".
    """
    frames = stacks.select_user_frames(view.frames) or view.frames
    return str(frames[0]) if frames else "an unknown place"


def _describe_lenience(lenience: float) -> list[str]:
    """Return a line about the seconds that were added to the timeout; [] if none were added."""
    if not lenience:
        return []
    return [
        f"  {_format_span(lenience)} of this timeout were added because a rank waits for data from remote storage, is in a block of "
        "main_process_first(timeout=...), or ran out of memory in a batch-size search while others may wait in a collective that "
        "ends with the process group's timeout"
    ]


def _describe_left_loop(view: RankView, waiting: Sequence[RankView]) -> str | None:
    """Return a phrase about a waiting rank that is no longer in a loop in which others still wait.

    Return None if there is no such loop.
    """
    loop_and_ranks = find_loop_left_behind(view, waiting)
    if loop_and_ranks is None:
        return None
    loop, ranks_in_loop = loop_and_ranks
    wait = "waits" if len(ranks_in_loop) == 1 else "wait"
    return f"it has left the loop of {loop}, in which {_name_ranks(ranks_in_loop)} {wait}"


def _describe_missing(view: RankView, waiting: RankView) -> list[str]:
    """Return the lines about a rank that has not reached the collective of a waiting rank."""
    name = f"  rank {view.rank}{_describe_process(view)}"
    if view.has_ended:
        text = f"{name} has finished its script"
        return [text, "      it left before the others: give all ranks the same number of batches and collectives"]
    lines = [f"{name} {_describe_activity(view)}", *_quote_source(view)]
    lines += [f"      called from {frame}" for frame in stacks.select_user_frames(view.frames)[1:4]]
    loop = stacks.find_left_loop(view.frames, waiting.frames)
    if loop is not None:
        lines.append(f"      it has left the loop of {loop}, in which the others wait: {_LEFT_LOOP_ADVICE}")
    lines.append(f"      {_suggest_action(view, waiting)}")
    return lines


def _waits_for_first_rank(waiting: RankView) -> bool:
    """Whether a rank waits at the start of a `main_process_first` or `local_main_process_first` block."""
    frames = stacks.select_user_frames(waiting.frames)
    return bool(frames) and "main_process_first(" in frames[0].source


def _describe_lingering(view: RankView) -> list[str]:
    advice = "let threads end when the script does (daemon=True), and exit functions return; --timeout 0 waits for ever"
    return [f"  {describe_lateness(view)}", *_quote_source(view), f"      {advice}"]


def _quote_source(view: RankView) -> list[str]:
    """Return the source text of the innermost line of user code, as a list of one line; [] if it is not available."""
    return [f"      {frame.source}" for frame in stacks.select_user_frames(view.frames)[:1] if frame.source]


def _describe_activity(view: RankView) -> str:
    """Return a phrase about what a missing rank is doing, with its position in the code."""
    at = locate_rank(view)
    if view.is_stopped:
        return (
            f"is stopped (process state T: SIGSTOP or Ctrl-Z); at its last heartbeat, "
            f"{_format_span(view.beat_age or 0.0)} ago, it was at {at}"
        )
    if view.state == "?":
        return "does not answer: it is stopped, holds the interpreter lock in C code, or is gone"
    if view.is_mute:
        live = "it is" if view.frames_age < LATE else "it was last seen"
        return f"holds the interpreter lock in C code (no heartbeat for {_format_span(view.beat_age or 0.0)}); {live} at {at}"
    if stacks.is_loading_data(view.frames):
        return f"waits for data at {at}, for {_format_span(view.still_age)}"
    if view.beat_age is None:
        return "is alive; it is not a Python program that Headway started, so nothing more is known"
    return f"is at {at}" + (f", for {_format_span(view.still_age)}" if view.still_age >= 1 else "")


def _suggest_action(view: RankView, waiting: RankView) -> str:
    """Return advice on a missing rank whose script still runs, according to what the rank is doing.

    Args:
        view: State of the missing rank.
        waiting: State of a rank that waits for it.
    """
    user_frames = stacks.select_user_frames(view.frames)
    if view.state == "?":
        return "start the run with `headway launch`, whose watch sees such a rank from outside"
    if view.is_stopped:
        return f"continue it with `kill -CONT {view.pid}` before the timeout is over, or find out who stops it"
    if view.is_mute:
        return f"`py-spy dump --native --pid PID` in the next run shows the C code; state {view.state or 'unknown'}"
    if is_stuck_writing(view, 1.0):
        return (
            f"it writes a checkpoint, and no byte has moved for {_format_span(view.writing_age)}{_describe_disk(view)}"
        )
    if view.state == "D":
        return "process state D: it waits for a disk or a network file system"
    if stacks.is_in_dataset(view.frames):
        return "the dataset has not returned from this line; all ranks wait for this batch"
    if stacks.is_loading_data(view.frames):
        return "look at the dataset: with num_workers=0 the stack ends in the line that blocks"
    if _waits_for_first_rank(waiting):
        return (
            "the others wait for its main_process_first block; if that is meant to take so long, use "
            "main_process_first(timeout=SECONDS)"
        )
    if user_frames and "sleep(" in user_frames[0].source:
        return "it sleeps there; ranks must not wait for anything but each other"
    return "if this is meant to take so long, raise --timeout; otherwise let every rank reach the same collectives"


def _format_span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else format_seconds(seconds)


def _describe_process(view: RankView) -> str:
    """Return a rank's host, PID and position in the training in parentheses, after a space. Empty if nothing is known."""
    parts = [f"host {view.host}"] if view.host else []
    parts += [f"pid {view.pid}"] if view.pid else []
    if view.update or view.micro_step:
        parts.append(f"update {view.update}, micro-step {view.micro_step}")
    return f" ({', '.join(parts)})" if parts else ""


def _describe_wait(view: RankView) -> str:
    """Return the operation in which a rank waits, with the collective's number and the line of user code."""
    wait = view.wait
    assert wait is not None
    number = f" #{wait.number}" if wait.number else ""
    during = " of the gradients" if stacks.is_in_backward(view.frames) else ""
    return f"{view.operation}{number}{during} at {locate_rank(view)}"


def _compare_operations(waiting: Sequence[RankView]) -> str:
    """Return a phrase on whether all ranks wait in the same operation, with the likely cause of the hang."""
    operations = list_operations(waiting)
    if len(operations) == 1:
        return "in the same operation: the likely cause is the network between them"
    gone = [view for view in waiting if find_loop_left_behind(view, waiting) is not None]
    if gone:
        have = "has" if len(gone) == 1 else "have"
        return f"but not in the same operation: {_name_ranks(gone)} {have} left the loop in which the others are"
    lowest_number = min(operation.number for operation in operations)
    behind = [view for view in waiting if view.wait is not None and view.wait.number == lowest_number]
    num_groups = len({operation.group for operation in operations})
    if num_groups == 1 and len(behind) < len(waiting):  # numbers of different groups cannot be compared
        return (
            f"but not in the same operation: {_name_ranks(behind)} cannot leave an earlier one, or their order differs"
        )
    return "but not in the same operation: their order differs"


def _name_ranks(views: Sequence[RankView]) -> str:
    return f"rank{'s' if len(views) > 1 else ''} {format_ranges(view.rank for view in views)}"


def encode_diagnosis(verdict: HangDiagnosis) -> dict[str, Any]:
    """Return the hang as a JSON object for failure.json."""

    def encode_view(view: RankView) -> dict[str, Any]:
        wait = view.wait
        return {
            "rank": view.rank,
            "host": view.host,
            "pid": view.pid,
            "state": view.state,
            "where": locate_rank(view),
            "operation": view.operation or None,
            "seconds": round(view.wait_age, 1) if wait is not None else None,
            "heartbeat_age": view.beat_age,
            "update": view.update,
            "micro_step": view.micro_step,
            "stack": [str(frame) for frame in view.frames],
        }

    return {
        "timeout": verdict.timeout,
        "headline": format_headline(verdict),
        "missing": [encode_view(view) for view in verdict.missing],
        "waiting": [encode_view(view) for view in verdict.waiting],
    }
