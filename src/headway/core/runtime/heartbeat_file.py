"""`HeartbeatFile`: a small memory-mapped file per rank that shows the launcher the rank's state.

The launcher's agent creates the file and passes its path in HEADWAY_PULSE. The rank writes to mapped memory without
a system call. The agent can read it while the rank is stopped, holds the interpreter lock, or is dead. Without an
agent, the heartbeat file is anonymous memory of the process. This module does not import torch.

Each text field in the file has two slots. The unused slot is written and then made current, so a writer that stops
halfway leaves the previous text readable.
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
"""Name of the environment variable that passes the path of the heartbeat file to a worker process."""

WAITING_FOR_PARTS = "waiting for the other ranks' parts of a checkpoint"
"""Phase of a rank that commits a checkpoint and waits for the other ranks' files. This wait is not a collective."""

NUM_CALLS = 64
"""Number of the latest collectives that the ring buffer in a heartbeat file holds."""

SIZE = 69632
"""Size of a heartbeat file in bytes."""

# Layout of the file. All numbers are stored in native byte order, because both processes are on one machine.
_MAGIC = b"HWPULSE1"
_HEAD = struct.Struct("=8sQQd")  # magic, pid, number of heartbeats, time of the last heartbeat
_PROGRESS = struct.Struct("=QQ")  # update, micro-step
_COUNT = struct.Struct("=Q")
_CALL = struct.Struct("=Qdd32s184s")  # number, entry time, exit time (0: still inside), operation, call site
_EXIT_TIME_OFFSET = struct.calcsize("=Qd")  # offset of the exit time in a record of _CALL
_SECONDS = struct.Struct("=d")
_SLOT = struct.Struct("=Id")  # length, time
_PROGRESS_OFFSET, _TIMEOUT_OFFSET, _EXTENSION_OFFSET, _COUNT_OFFSET, _RING_OFFSET = 64, 96, 104, 128, 36864
_RUN_OVER_OFFSET = 112  # whether the run is over; the only byte that the agent writes
_SAVES_OFFSET = 113  # whether the rank saves a checkpoint when it receives a signal


@dataclass(frozen=True)
class _TextField:
    """Text field of the file in which a rank records its state.

    The field consists of one byte with the index of the current slot, and two slots. A slot contains the length of the
    text, the time at which it was written, and the text.

    Attributes:
        offset: Position of the field in the file, in bytes.
        slot_bytes: Size of one slot in bytes.
    """

    offset: int
    slot_bytes: int

    def write(self, memory: mmap.mmap, text: str) -> None:
        """Write a text into the slot that is not current, and then make it current, so that a reader never sees half of a text.

        Args:
            memory: Memory of the file.
            text: Text. It is cut to `capacity` bytes.
        """
        slot = 1 - memory[self.offset] % 2
        start = self.offset + 1 + slot * self.slot_bytes
        encoded = text.encode(errors="replace")[: self.capacity]
        _SLOT.pack_into(memory, start, len(encoded), time.monotonic())
        memory[start + _SLOT.size : start + _SLOT.size + len(encoded)] = encoded
        memory[self.offset] = slot

    def read(self, memory: mmap.mmap) -> tuple[str, float]:
        """Return the text in the current slot, and the time on the monotonic clock at which it was written."""
        start = self.offset + 1 + memory[self.offset] % 2 * self.slot_bytes
        length, when = _SLOT.unpack_from(memory, start)
        text = memory[start + _SLOT.size : start + _SLOT.size + min(length, self.capacity)]
        return text.decode(errors="replace"), when

    @property
    def capacity(self) -> int:
        """Largest number of bytes of a text."""
        return self.slot_bytes - _SLOT.size


_PHASE, _TRANSFER, _NOTE = _TextField(192, 128), _TextField(512, 128), _TextField(1024, 17000)
_LOG = _TextField(_RING_OFFSET + NUM_CALLS * _CALL.size, 4200)
_RESUME_ADVICE = _TextField(_LOG.offset + 1 + 2 * _LOG.slot_bytes, 4200)
# The fields must not overlap.
assert _PHASE.offset + 1 + 2 * _PHASE.slot_bytes <= _TRANSFER.offset
assert _TRANSFER.offset + 1 + 2 * _TRANSFER.slot_bytes <= _NOTE.offset
assert _NOTE.offset + 1 + 2 * _NOTE.slot_bytes <= _RING_OFFSET
assert _RESUME_ADVICE.offset + 1 + 2 * _RESUME_ADVICE.slot_bytes <= SIZE


@dataclass(frozen=True)
class RecordedCall:
    """A collective as recorded in the ring buffer of a rank's heartbeat file. Times are in seconds on the monotonic clock.

    Attributes:
        number: Number of the collective in this process.
        operation: Kind of the collective.
        site: Line of user code that called the collective.
        entry_time: Time at which the process entered the collective.
        exit_time: Time at which the process left it; None if the process is still inside.
    """

    number: int
    operation: str
    site: str
    entry_time: float
    exit_time: float | None


@dataclass(frozen=True)
class HeartbeatReading:
    """State of a rank as read from its heartbeat file at one moment. All times are on this machine's monotonic clock.

    Attributes:
        pid: Process ID of the writer; 0 if no rank has opened the file yet.
        num_beats: Number of heartbeats so far.
        last_beat: Time of the last heartbeat; 0.0 before the first.
        update: Number of updates that training has completed.
        micro_step: Number of micro-batches started in the current accumulation window.
        timeout: Seconds that a rank may keep the others waiting, as set by this rank's program; 0.0 if not set.
        timeout_extension: Seconds that all ranks currently add to their timeout, at this rank's request.
        phase: Activity of the process: "" (it runs the user's script), "ended", or a text such as "saving a
            checkpoint".
        phase_since: Time at which the phase was set.
        transfer: Description of a transfer with one other rank that this rank waits for; "" if there is none.
        transfer_since: Time at which the transfer was set.
        calls: Collectives in the ring buffer, oldest first.
        note: Latest note of the heartbeat, as a dict. "stack": [file, line, function] of each frame of the main thread,
            innermost first. "still": time since which the stack is unchanged. "torch": current collectives of torch's
            backends, as in `flight_recorder.CurrentCollective`; None while they advance. "live": whether a signal makes
            the rank write its stacks.
        note_time: Time at which the note was written; 0.0 if there is none.
        saves_on_signal: Whether this rank saves a checkpoint and then ends when it receives a signal.
        log: Path of the run log that this rank writes; "" if there is none.
        resume_advice: Advice on how to continue the run from its last checkpoint; "" if the program saves none.
        resume_advice_since: Time at which the advice was set.
    """

    pid: int = 0
    num_beats: int = 0
    last_beat: float = 0.0
    update: int = 0
    micro_step: int = 0
    timeout: float = 0.0
    timeout_extension: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    transfer: str = ""
    transfer_since: float = 0.0
    calls: tuple[RecordedCall, ...] = ()
    note: dict[str, Any] = field(default_factory=dict)
    note_time: float = 0.0
    saves_on_signal: bool = False
    log: str = ""
    resume_advice: str = ""
    resume_advice_since: float = 0.0


class HeartbeatFile:
    """Record of the state of one rank, in a memory-mapped file or in anonymous memory.

    Args:
        path: File that the agent created. Default: None, for memory that no other process sees.
        is_writer: Whether this process writes the file. A reader maps the file read-only.
    """

    def __init__(self, path: Path | None = None, *, is_writer: bool = True) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, SIZE)
        else:
            with open(path, "r+b" if is_writer else "rb") as file:
                access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
                self._memory = mmap.mmap(file.fileno(), SIZE, access=access)
        self.path = path
        self._num_entered = 0
        self._encoded_sites: dict[str, bytes] = {}
        if is_writer:
            _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), 0, 0.0)

    # ---------------------------------------------------------------- writing, by the rank

    def record_beat(self, count: int) -> None:
        """Record that this process is running.

        Args:
            count: Number of heartbeats so far.
        """
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), count, time.monotonic())

    def note_progress(self, update: int, micro_step: int) -> None:
        """Record the progress of training. This only writes to mapped memory, without a system call.

        Args:
            update: Number of completed updates.
            micro_step: Number of micro-batches started in the current accumulation window.
        """
        _PROGRESS.pack_into(self._memory, _PROGRESS_OFFSET, update, micro_step)

    def set_timeout(self, seconds: float) -> None:
        """Record the run's timeout: how many seconds a rank may keep the others waiting in a collective.

        The script or the launcher sets this timeout. The hang watch reads it.
        """
        _SECONDS.pack_into(self._memory, _TIMEOUT_OFFSET, seconds)

    def set_timeout_extension(self, seconds: float) -> None:
        """Record by how many seconds the hang watch must extend the timeout of all ranks.

        A rank requests this before a long wait, for example for data from remote storage.

        Args:
            seconds: Additional seconds; 0 for none.
        """
        _SECONDS.pack_into(self._memory, _EXTENSION_OFFSET, seconds)

    def set_saves_on_signal(self, saves_on_signal: bool) -> None:
        """Record whether this rank saves a checkpoint and then ends when it receives a signal.

        If it does, the launcher gives it time to save.
        """
        self._memory[_SAVES_OFFSET] = saves_on_signal

    @property
    def is_run_over(self) -> bool:
        """Whether the agent has marked the run as over. A signal then ends this rank and does not request a checkpoint."""
        return bool(self._memory[_RUN_OVER_OFFSET])

    def enter_collective(self, operation: str, site: str) -> int:
        """Record that this process enters a collective, and return the number to pass to `leave_collective`.

        Args:
            operation: Kind of the collective.
            site: Line of user code that called the collective.
        """
        self._num_entered += 1
        number = self._num_entered
        encoded = self._encoded_sites.get(site)
        if encoded is None:
            # Keep the end of a long path, which contains the file name and the line.
            encoded = self._encoded_sites[site] = site.encode(errors="replace")[-184:]
        _CALL.pack_into(
            self._memory, _find_record(number), number, time.monotonic(), 0.0, operation.encode()[:32], encoded
        )
        _COUNT.pack_into(self._memory, _COUNT_OFFSET, number)
        return number

    def leave_collective(self, number: int) -> None:
        """Record that this process has left a collective, unless the ring buffer no longer holds the collective.

        Args:
            number: Number of the collective, as returned by `enter_collective`.
        """
        if self._num_entered - number < NUM_CALLS:
            _SECONDS.pack_into(self._memory, _find_record(number) + _EXIT_TIME_OFFSET, time.monotonic())

    def set_phase(self, description: str) -> None:
        """Record what this process is doing, as text such as "saving a checkpoint".

        Args:
            description: Description of the activity; "" while the process runs the user's script.
        """
        _PHASE.write(self._memory, description)

    def set_transfer(self, description: str) -> None:
        """Record that this process waits for a transfer between itself and one other rank.

        Such a transfer does not count as a collective.

        Args:
            description: Description of the transfer; "" if the process waits for none.
        """
        _TRANSFER.write(self._memory, description)

    def set_log(self, path: str) -> None:
        """Record the path of the run log that this process writes."""
        _LOG.write(self._memory, path)

    def set_resume_advice(self, text: str) -> None:
        """Record advice for the user on how to continue the run from its last checkpoint, should it be stopped now."""
        _RESUME_ADVICE.write(self._memory, text)

    def set_note(self, note: dict[str, Any]) -> None:
        """Write the heartbeat's note: the stack of the main thread and the collectives of torch's backends.

        While the note is too long, the outer half of the stack is dropped.

        Args:
            note: Dict with the keys that `HeartbeatReading.note` describes, such as "stack" and "torch".
        """
        text = json.dumps(note, separators=(",", ":"))
        while len(text) > _NOTE.capacity and note.get("stack"):  # JSON is ASCII
            note = {**note, "stack": note["stack"][: len(note["stack"]) // 2]}
            text = json.dumps(note, separators=(",", ":"))
        _NOTE.write(self._memory, text)

    # ---------------------------------------------------------------- reading, by the agent

    def read(self) -> HeartbeatReading:
        """Return the current contents of the file, with defaults in all fields if no rank has opened it yet."""
        magic, pid, num_beats, last_beat = _HEAD.unpack_from(self._memory, 0)
        if magic != _MAGIC:
            return HeartbeatReading()
        update, micro_step = _PROGRESS.unpack_from(self._memory, _PROGRESS_OFFSET)
        (timeout,) = _SECONDS.unpack_from(self._memory, _TIMEOUT_OFFSET)
        (timeout_extension,) = _SECONDS.unpack_from(self._memory, _EXTENSION_OFFSET)
        phase, phase_since = _PHASE.read(self._memory)
        transfer, transfer_since = _TRANSFER.read(self._memory)
        log, _ = _LOG.read(self._memory)
        resume_advice, resume_advice_since = _RESUME_ADVICE.read(self._memory)
        text, note_time = _NOTE.read(self._memory)
        try:
            note = json.loads(text) if text else {}
        except ValueError:
            note = {}  # it was overwritten during the read; the next read finds it complete
        return HeartbeatReading(
            pid=pid,
            num_beats=num_beats,
            last_beat=last_beat,
            update=update,
            micro_step=micro_step,
            timeout=timeout,
            timeout_extension=timeout_extension,
            phase=phase,
            phase_since=phase_since,
            transfer=transfer,
            transfer_since=transfer_since,
            calls=self._read_calls(),
            note=note,
            note_time=note_time,
            saves_on_signal=bool(self._memory[_SAVES_OFFSET]),
            log=log,
            resume_advice=resume_advice,
            resume_advice_since=resume_advice_since,
        )

    def _read_calls(self) -> tuple[RecordedCall, ...]:
        """Return the latest recorded collectives, oldest first. Entries that are being overwritten are left out."""
        (count,) = _COUNT.unpack_from(self._memory, _COUNT_OFFSET)
        calls = []
        for number in range(max(1, count - NUM_CALLS + 1), count + 1):
            stored_number, entry_time, exit_time, operation, site = _CALL.unpack_from(
                self._memory, _find_record(number)
            )
            if stored_number == number:  # otherwise the record has been overwritten
                calls.append(
                    RecordedCall(number, _decode_text(operation), _decode_text(site), entry_time, exit_time or None)
                )
        return tuple(calls)


def _find_record(number: int) -> int:
    """Return the offset in the file of the record of a collective, in the ring buffer."""
    return _RING_OFFSET + number % NUM_CALLS * _CALL.size


def _decode_text(padded: bytes) -> str:
    """Return a text field of the file without its padding."""
    return padded.rstrip(b"\0").decode(errors="replace")


def _open_own_file() -> HeartbeatFile:
    return _claim_file(env.remove_variable(VARIABLE)) or HeartbeatFile()


def get_own_file() -> HeartbeatFile:
    """Return this process's heartbeat file: the file that the agent created for it, or anonymous memory if there is none."""
    return scope.get_or_create(_open_own_file)


def is_watched() -> bool:
    """Whether a launcher's agent reads the file in which this process records its state."""
    return get_own_file().path is not None


def create_file(path: Path) -> None:
    """Create the empty heartbeat file of a rank."""
    with open(path, "wb") as file:
        file.truncate(SIZE)


def read_file(path: Path) -> HeartbeatReading:
    """Return the current contents of a rank's heartbeat file. The file does not change."""
    return HeartbeatFile(path, is_writer=False).read()


def mark_run_over(path: Path) -> None:
    """Mark the run as over in the file in which a rank records its state. No signal is sent.

    The agent does so before it sends a signal to the rank, so that the rank does not save a checkpoint.

    Args:
        path: Heartbeat file of the rank.
    """
    with open(path, "r+b") as file:
        file.seek(_RUN_OVER_OFFSET)
        file.write(b"\1")


def _claim_file(path: str | None) -> HeartbeatFile | None:
    """Open the heartbeat file for this process, or return None if the file is gone or belongs to another process.

    Child processes of a rank can inherit the environment variable, so the file might belong to the parent of this
    process.

    Args:
        path: Path of the file; None or "" if there is none, which also gives None.
    """
    if not path or not os.path.exists(path):
        return None
    is_claimed = read_file(Path(path)).pid != 0
    return None if is_claimed else HeartbeatFile(Path(path))


if hasattr(os, "register_at_fork"):
    # A forked child (e.g. a data-loading worker) shares the mapping, but is not the rank.
    os.register_at_fork(after_in_child=lambda: scope.drop(_open_own_file))
