"""State of a rank (`RankView`), read from its heartbeat file, with times converted to ages.

A rank writes to its heartbeat file the time of each heartbeat, its stack and the collective in which it waits.
"""

import math
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.common.callsite import Frame
from headway.core.runtime import heartbeat_file
from headway.core.runtime.heartbeat import ENDED
from headway.launch.watch.stacks import find_meeting_call, is_meeting, select_user_frames

_NAMES = {
    "numbers": "an exchange of numbers",
    "objects": "gather_object",
    "object": "broadcast_object_list",
    "pad": "pad_across_processes",
    "loss weights": "the sum of loss weights (backward with weight=)",
    # names in NCCL's flight recorder
    "all_reduce_barrier": "barrier",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce of several tensors",
    "coalesced": "several collectives at once",
}

LATE = 3.0
"""Seconds without a heartbeat after which a running process is assumed to be blocked by a thread that holds the GIL."""


@dataclass(frozen=True)
class CollectiveCall:
    """Latest collective that a rank has entered in one process group.

    Attributes:
        group: "headway" for collectives that Headway itself counts, otherwise torch's name of the process group. Empty
            for a wait that is not counted, such as a transfer between two ranks.
        number: Number of collectives that this rank has entered in this group. 0 for a wait that is not counted.
        operation: Name of the operation.
        age: Seconds since the rank entered the collective. None if the rank has left it.
        members: Ranks of the process group. None if unknown.
    """

    group: str
    number: int
    operation: str
    age: float | None = None
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RankView:
    """State of one rank, as known from its heartbeat file and from the kernel.

    All ages are in seconds.

    Attributes:
        rank: Global rank.
        host: Host name of the rank's machine.
        pid: Process ID.
        exit_code: Exit code. None while the rank runs.
        state: The kernel's letter for the process state: R, S, D, T (stopped), t (traced), Z. Empty if unknown; "?" for
            a rank that does not answer.
        beat_age: Age of the rank's last heartbeat. None if it sends none, for example if it is not a Python program.
        timeout: Seconds that a rank may be missing from a collective, as set by its program. 0.0 if not set.
        lenience: Seconds by which the rank currently requests to extend the timeout.
        phase: Activity that the rank has announced, such as saving a checkpoint; "ended" after its program has ended;
            otherwise empty.
        update: Number of completed updates.
        micro_step: Number of micro-batches started in the current accumulation window.
        frames: Stack of the main thread, innermost frame first.
        frames_age: Age of the stack; 0 for a live stack.
        still_age: Seconds for which the stack has not changed.
        calls: Latest collective that the rank has entered in each process group. None if unknown because the rank's
            collectives are advancing, which means that it does not hang.
        writing_age: Seconds since the rank last wrote to a file.
        excused_age: Seconds since the rank last had a valid reason to keep others waiting (a debugger, a file write).
        phase_age: Seconds since the phase began.
        idle_age: Seconds since the rank last used the CPU or wrote to a file. math.inf if not observed.
        transfer: Transfer with another rank that the rank waits for. Empty if it waits for none.
        transfer_age: Seconds since the rank began to wait for the transfer.
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
        """Whether the rank's program has ended."""
        return self.exit_code is not None or self.phase == ENDED

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank's process."""
        return self.state == "T"

    @property
    def is_mute(self) -> bool:
        """Whether the rank's process exists but neither sends heartbeats nor responds."""
        return self.state in ("T", "?") or (self.beat_age is not None and self.beat_age > LATE)

    @property
    def wait(self) -> CollectiveCall | None:
        """Operation in which the rank waits, or None if it does not wait.

        The operation is a transfer between two ranks, a collective, another call of torch.distributed, or the commit of
        a checkpoint. Headway's own count of collectives has priority over torch's flight recorder.
        """
        if self.transfer:
            return CollectiveCall("", 0, self.transfer, self.transfer_age)
        inside = [call for call in self.calls or () if call.age is not None]
        if inside:
            return min(inside, key=lambda call: (call.group != "headway", -(call.age or 0.0)))
        if is_meeting(self.frames):
            return CollectiveCall("", 0, find_meeting_call(self.frames) or self.frames[0].function, self.still_age)
        if self.phase == heartbeat_file.WAITING_FOR_PARTS:
            return CollectiveCall("", 0, "the commit of a checkpoint", self.phase_age)
        return None

    @property
    def wait_age(self) -> float:
        """Seconds for which the rank has waited in its current operation; 0.0 if it does not wait."""
        wait = self.wait
        return 0.0 if wait is None else wait.age or 0.0

    @property
    def operation(self) -> str:
        """Name of the operation in which the rank waits, for messages. Empty if it does not wait."""
        wait = self.wait
        return "" if wait is None else _NAMES.get(wait.operation, wait.operation)

    def number_in(self, group: str) -> int | None:
        """Return the number of collectives that the rank has entered in a process group. None if unknown."""
        return next((call.number for call in self.calls or () if call.group == group), None)


def make_view(rank: int, reading: heartbeat_file.HeartbeatReading, now: float) -> RankView:
    """Convert the contents of a rank's heartbeat file to a `RankView`, in which times are replaced by ages.

    Args:
        rank: Global rank.
        reading: Contents of the rank's heartbeat file.
        now: Current time on the monotonic clock.
    """
    note = reading.note
    calls: tuple[CollectiveCall, ...] | None = None
    # The note's list of torch's collectives is missing if they were advancing when the rank wrote the note.
    if isinstance(note.get("torch"), list) or not note:
        calls = tuple(_make_call(entry, now) for entry in note.get("torch", []))
    if reading.calls:
        last = reading.calls[-1]
        age = None if last.exit_time else now - last.entry_time
        calls = (CollectiveCall("headway", last.number, last.operation, age), *(calls or ()))
    return RankView(
        rank,
        socket.gethostname(),
        reading.pid,
        beat_age=now - reading.last_beat if reading.num_beats else None,
        timeout=reading.timeout,
        lenience=reading.timeout_extension,
        phase=reading.phase,
        update=reading.update,
        micro_step=reading.micro_step,
        frames=tuple(Frame(*frame) for frame in note.get("stack", [])),
        frames_age=now - reading.note_time,
        still_age=now - note.get("still", now),
        calls=calls,
        phase_age=now - reading.phase_since,
        transfer=reading.transfer,
        transfer_age=now - reading.transfer_since,
    )


def _make_call(entry: Mapping[str, Any], now: float) -> CollectiveCall:
    """Convert an entry of torch's flight recorder, as a heartbeat file contains it.

    Args:
        entry: Entry, with the time at which the rank entered the collective, or None if the rank has left it.
        now: Current time on the monotonic clock.
    """
    age = None if entry["since"] is None else now - entry["since"]
    return CollectiveCall(entry["group"], entry["number"], entry["operation"], age, _get_members(entry))


def encode_view(view: RankView) -> dict[str, Any]:
    """Encode a `RankView` as a JSON object for another machine. Frames that no report uses are left out."""
    kept_frames = [*view.frames[:6], *select_user_frames(view.frames[6:])][:12]
    # JSON has no infinity. Left out, such a field gets its default, which is infinity.
    fields = {name: value for name, value in asdict(replace(view, frames=())).items() if value != math.inf}
    return {**fields, "frames": [[frame.file, frame.line, frame.function] for frame in kept_frames]}


def decode_view(content: Mapping[str, Any]) -> RankView:
    """Decode a `RankView` from a JSON object that `encode_view` has returned."""
    frames = tuple(Frame(*frame) for frame in content["frames"])
    calls = content["calls"]
    if calls is not None:
        calls = tuple(CollectiveCall(**{**call, "members": _get_members(call)}) for call in calls)
    return RankView(**{**content, "frames": frames, "calls": calls})


def _get_members(call: Mapping[str, Any]) -> tuple[int, ...] | None:
    return None if call["members"] is None else tuple(call["members"])
