"""The pulse: a small mapped file per rank that tells the launcher where the rank is, even when it can tell no more.

The launcher's agent makes the file and names it in HEADWAY_PULSE; the rank writes into mapped memory, without a system
call; the agent reads it while the rank is stopped, holds the interpreter lock, or is dead. Without an agent the same
object lives in the process's own memory. Torch-free. Text has two slots, the unused one is written and then made the
current one, so that a writer which stops half-way leaves the former text readable.
"""

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.common import env, scope

VARIABLE = "HEADWAY_PULSE"
"""Name of the variable that carries the file's path to a worker."""

PARTS = "waiting for the other ranks' parts of a checkpoint"
"""The phase of a rank that commits a checkpoint, in a wait that is not a collective."""

NUM_CALLS = 64
"""How many collectives the ring holds."""

SIZE = 65536
_MAGIC = b"HWPULSE1"
_HEAD = struct.Struct("=8sQQd")  # magic, pid, beats, time of the last beat
_PROGRESS = struct.Struct("=QQ")  # update, micro-step
_COUNT = struct.Struct("=Q")
_CALL = struct.Struct("=Qdd32s184s")  # number, entered at, left at (0: still inside), operation, call site
_SECONDS = struct.Struct("=d")
_SLOT = struct.Struct("=Id")  # length, time
_PROGRESS_AT, _TIMEOUT_AT, _LENIENCE_AT, _COUNT_AT, _RING_AT = 64, 96, 104, 128, 36864
_IS_TOLD_AT, _SAVES_AT = 112, 113  # the one byte that the agent writes; and: are signals answered by a checkpoint?


@dataclass(frozen=True)
class _Text:
    """Where a text stands: a byte that names the current slot, then two slots of `room` bytes."""

    at: int
    room: int

    def write(self, memory: mmap.mmap, text: str) -> None:
        slot = 1 - memory[self.at] % 2
        start = self.at + 1 + slot * self.room
        encoded = text.encode(errors="replace")[: self.capacity]
        _SLOT.pack_into(memory, start, len(encoded), time.monotonic())
        memory[start + _SLOT.size : start + _SLOT.size + len(encoded)] = encoded
        memory[self.at] = slot

    def read(self, memory: mmap.mmap) -> tuple[str, float]:
        start = self.at + 1 + memory[self.at] % 2 * self.room
        length, when = _SLOT.unpack_from(memory, start)
        text = memory[start + _SLOT.size : start + _SLOT.size + min(length, self.capacity)]
        return text.decode(errors="replace"), when

    @property
    def capacity(self) -> int:
        return self.room - _SLOT.size


_PHASE, _TRANSFER, _NOTE = _Text(192, 128), _Text(512, 128), _Text(1024, 17000)
_LOG = _Text(_RING_AT + NUM_CALLS * _CALL.size, 4200)
assert _PHASE.at + 1 + 2 * _PHASE.room <= _TRANSFER.at
assert _TRANSFER.at + 1 + 2 * _TRANSFER.room <= _NOTE.at
assert _NOTE.at + 1 + 2 * _NOTE.room <= _RING_AT
assert _LOG.at + 1 + 2 * _LOG.room <= SIZE


@dataclass(frozen=True)
class PulseCall:
    """A collective in the ring: its number in this process, and when it was entered and left (None: still inside)."""

    number: int
    operation: str
    site: str
    entered: float
    left: float | None


@dataclass(frozen=True)
class PulseReading:
    """What a pulse said at one moment; all times by this machine's monotonic clock.

    Attributes:
        pid: the writer; 0 where none has come yet.
        beats: heartbeats so far.
        beat: when the last one was; 0.0 before the first.
        update: updates that have happened, as training counts them.
        micro_step: micro-batches begun in this window.
        timeout: how long this rank's program lets others be late, in seconds; 0.0 where it has not said.
        phase: what the process says it does: "" (its program), "ended", or words such as "saving a checkpoint".
        calls: the ring, oldest first.
        note: what the heartbeat last wrote: "stack" (frames, innermost first) and "torch" (its collectives).
        noted: when that was; 0.0 for never.
        lenience: how much longer than their timeout all ranks wait for now, in seconds, because this one asks for it.
        saves_on_signal: does this rank answer a signal by a checkpoint, and end then?
        phase_since: when it said its phase.
        transfer: what it waits for from one other rank, or to be taken by it; "": nothing.
        transfer_since: when it began to.
        log: the file of the run's log, where this rank writes it; "": none.
    """

    pid: int = 0
    beats: int = 0
    beat: float = 0.0
    update: int = 0
    micro_step: int = 0
    timeout: float = 0.0
    phase: str = ""
    calls: tuple[PulseCall, ...] = ()
    note: dict[str, Any] = field(default_factory=dict)
    noted: float = 0.0
    lenience: float = 0.0
    saves_on_signal: bool = False
    phase_since: float = 0.0
    transfer: str = ""
    transfer_since: float = 0.0
    log: str = ""


class HeartbeatFile:
    """One rank's pulse, over a mapped file or over memory of the process's own.

    Args:
        path: the file that the agent made; None: memory that nobody else sees.
        is_writer: does this process write it? A reader maps it read-only.
    """

    def __init__(self, path: Path | None = None, *, is_writer: bool = True) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, SIZE)
        else:
            with open(path, "r+b" if is_writer else "rb") as file:
                access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
                self._memory = mmap.mmap(file.fileno(), SIZE, access=access)
        self.path = path
        self._number = 0
        self._sites: dict[str, bytes] = {}
        if is_writer:
            _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), 0, 0.0)

    # ---------------------------------------------------------------- the rank's side

    def beat(self, count: int) -> None:
        """Note that this process runs."""
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), count, time.monotonic())

    def note_progress(self, update: int, micro_step: int) -> None:
        """Note how far training has come: a store into memory."""
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, update, micro_step)

    def set_timeout(self, seconds: float) -> None:
        """Say how long the others may be late, where the program itself decides it."""
        _SECONDS.pack_into(self._memory, _TIMEOUT_AT, seconds)

    def set_lenience(self, seconds: float) -> None:
        """Say how much later than that all may be, while this process waits for what only a timeout ends; 0: no more."""
        _SECONDS.pack_into(self._memory, _LENIENCE_AT, seconds)

    def set_saves_on_signal(self, does_so: bool) -> None:
        """Say whether signals are answered by a checkpoint, so that the launcher gives this rank the time."""
        self._memory[_SAVES_AT] = does_so

    @property
    def is_told_to_end(self) -> bool:
        """Has the agent said that the run is over, so that its signal is not a request to save?"""
        return bool(self._memory[_IS_TOLD_AT])

    def enter(self, operation: str, site: str) -> int:
        """Note that a collective is entered; return its number, for `leave`."""
        self._number = number = self._number + 1
        encoded = self._sites.get(site)
        if encoded is None:
            encoded = self._sites[site] = site.encode(errors="replace")[-184:]
        at = _RING_AT + number % NUM_CALLS * _CALL.size
        _CALL.pack_into(self._memory, at, number, time.monotonic(), 0.0, operation.encode()[:32], encoded)
        _COUNT.pack_into(self._memory, _COUNT_AT, number)
        return number

    def leave(self, number: int) -> None:
        """Note that the collective of this number is over."""
        if self._number - number < NUM_CALLS:
            _SECONDS.pack_into(self._memory, _RING_AT + number % NUM_CALLS * _CALL.size + 16, time.monotonic())

    def set_phase(self, words: str) -> None:
        """Say what this process does; "" is its program."""
        _PHASE.write(self._memory, words)

    def set_transfer(self, words: str) -> None:
        """Say what this process waits for from one other rank; "" is nothing. It is not counted among collectives."""
        _TRANSFER.write(self._memory, words)

    def set_log(self, path: str) -> None:
        """Say where the run's log is that this process writes."""
        _LOG.write(self._memory, path)

    def set_note(self, note: dict[str, Any]) -> None:
        """Write what the heartbeat found; a note that is too long loses the outer half of its stack."""
        text = json.dumps(note, separators=(",", ":"))
        while len(text) > _NOTE.capacity and note.get("stack"):  # JSON is ASCII
            note = {**note, "stack": note["stack"][: len(note["stack"]) // 2]}
            text = json.dumps(note, separators=(",", ":"))
        _NOTE.write(self._memory, text)

    # ---------------------------------------------------------------- the reader's side

    def read(self) -> PulseReading:
        """What it says now; an empty reading where no rank has come yet."""
        magic, pid, beats, beat = _HEAD.unpack_from(self._memory, 0)
        if magic != _MAGIC:
            return PulseReading()
        update, micro_step = _PROGRESS.unpack_from(self._memory, _PROGRESS_AT)
        (timeout,) = _SECONDS.unpack_from(self._memory, _TIMEOUT_AT)
        (lenience,) = _SECONDS.unpack_from(self._memory, _LENIENCE_AT)
        phase, phase_since = _PHASE.read(self._memory)
        text, noted = _NOTE.read(self._memory)
        try:
            note = json.loads(text) if text else {}
        except ValueError:
            note = {}  # it was rewritten while being read; the next look finds it whole
        saves = bool(self._memory[_SAVES_AT])
        return PulseReading(
            pid,
            beats,
            beat,
            update,
            micro_step,
            timeout,
            phase,
            self._calls(),
            note,
            noted,
            lenience,
            saves,
            phase_since,
            *_TRANSFER.read(self._memory),
            _LOG.read(self._memory)[0],
        )

    def _calls(self) -> tuple[PulseCall, ...]:
        (count,) = _COUNT.unpack_from(self._memory, _COUNT_AT)
        found = []
        for number in range(max(1, count - NUM_CALLS + 1), count + 1):
            at = _RING_AT + number % NUM_CALLS * _CALL.size
            said, entered, left, operation, site = _CALL.unpack_from(self._memory, at)
            if said == number:  # else overwritten meanwhile
                found.append(PulseCall(number, _text(operation), _text(site), entered, left or None))
        return tuple(found)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _of_this_process() -> HeartbeatFile:
    return _claim(env.take(VARIABLE)) or HeartbeatFile()


def own() -> HeartbeatFile:
    """This process's pulse: the file that the agent made for it, else memory of its own."""
    return scope.own(_of_this_process)


def is_watched() -> bool:
    """Does an agent read this process's pulse?"""
    return own().path is not None


def create(path: Path) -> None:
    """Make the empty file of a rank."""
    with open(path, "wb") as file:
        file.truncate(SIZE)


def tell_to_end(path: Path) -> None:
    """Tell the rank with this pulse, before it gets a signal, that it is not to save."""
    with open(path, "r+b") as file:
        file.seek(_IS_TOLD_AT)
        file.write(b"\1")


def _claim(path: str | None) -> HeartbeatFile | None:
    """The file's pulse, unless another process has it or it is gone: a rank's children inherit the variable."""
    if not path or not os.path.exists(path) or HeartbeatFile(Path(path), is_writer=False).read().pid:
        return None
    return HeartbeatFile(Path(path))


if hasattr(os, "register_at_fork"):
    # A forked child (e.g. a data-loading worker) shares the mapping, but is not the rank.
    os.register_at_fork(after_in_child=lambda: scope.drop(_of_this_process))
