"""A view of a rank: what its pulse says, in ages, so that views of several machines fit into one table."""

import math
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.common.callsite import Frame
from headway.launch.watch import frames as stacks
from headway.runtime.heartbeat import file as pulse
from headway.runtime.heartbeat.thread import ENDED

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
        patience: how long its program lets others be late; 0.0 where it has not said.
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
    patience: float = 0.0
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
        if stacks.is_meeting(self.frames):
            return CollectiveCall("", 0, stacks.meeting(self.frames) or self.frames[0].function, self.still_age)
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
                None if one["members"] is None else tuple(one["members"]),
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
        patience=reading.patience,
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
    kept = [*view.frames[:6], *stacks.users(view.frames[6:])][:12]
    finite = {name: value for name, value in asdict(replace(view, frames=())).items() if value != math.inf}
    return {**finite, "frames": [[frame.file, frame.line, frame.function] for frame in kept]}


def decode(content: Mapping[str, Any]) -> RankView:
    """Read `encode`'s JSON."""
    calls = content["calls"]
    return RankView(
        **{
            **content,
            "frames": tuple(Frame(*frame) for frame in content["frames"]),
            "calls": None
            if calls is None
            else tuple(
                CollectiveCall(**{**call, "members": None if call["members"] is None else tuple(call["members"])})
                for call in calls
            ),
        }
    )
