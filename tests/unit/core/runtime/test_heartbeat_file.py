"""Test the heartbeat file of a rank: values, collectives, notes, advice, and its single writer."""

import mmap
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.runtime import heartbeat_file


@pytest.fixture
def path(tmp_path):
    """Path of an empty heartbeat file."""
    found = tmp_path / "rank0.pulse"
    heartbeat_file.create_file(found)
    return found


def test_written_values_are_read(path):
    reader = heartbeat_file.HeartbeatFile(path, is_writer=False)
    assert reader.read() == heartbeat_file.HeartbeatReading()
    writer = heartbeat_file.HeartbeatFile(path)
    writer.record_beat(3)
    writer.note_progress(7, 2)
    writer.set_phase("saving a checkpoint")
    writer.set_note({"stack": [["train.py", 3, "main"]]})
    first, second = writer.enter_collective("gather", "train.py:3"), writer.enter_collective("barrier", "train.py:4")
    writer.leave_collective(first)
    found = reader.read()
    assert (found.pid, found.num_beats, found.update, found.micro_step) == (os.getpid(), 3, 7, 2)
    assert found.phase == "saving a checkpoint"
    assert found.note == {"stack": [["train.py", 3, "main"]]}
    assert [(call.number, call.operation, call.site) for call in found.calls] == [
        (first, "gather", "train.py:3"),
        (second, "barrier", "train.py:4"),
    ]
    assert found.calls[0].exit_time >= found.calls[0].entry_time
    assert found.calls[1].exit_time is None


@given(num_calls=st.integers(0, 3 * heartbeat_file.NUM_CALLS), late=st.integers(0, 2 * heartbeat_file.NUM_CALLS))
@settings(max_examples=30, deadline=None)
def test_ring_keeps_the_latest_collectives(num_calls, late):
    own = heartbeat_file.HeartbeatFile()
    numbers = [own.enter_collective("gather", f"train.py:{index}") for index in range(num_calls)]
    own.leave_collective(max(0, num_calls - late))  # a number no longer in the ring must not change another entry
    kept = own.read().calls
    assert [call.number for call in kept] == numbers[-heartbeat_file.NUM_CALLS :]
    assert [call.site for call in kept] == [f"train.py:{number - 1}" for number in numbers[-heartbeat_file.NUM_CALLS :]]
    assert all(call.exit_time is None or call.number == num_calls - late for call in kept)


@given(st.lists(st.tuples(st.text(max_size=300), st.integers(0, 10**6), st.text(max_size=80)), max_size=400), st.text())
@settings(max_examples=50, deadline=None)
def test_long_note_loses_only_its_outer_frames(stack, phase):
    own = heartbeat_file.HeartbeatFile()
    own.set_note({"stack": [list(frame) for frame in stack], "live": True})
    own.set_phase(phase)
    kept = own.read().note
    assert kept["live"] is True
    assert kept["stack"] == [list(frame) for frame in stack[: len(kept["stack"])]]
    assert len(kept["stack"]) == len(stack) or len(stack) > 20


def test_advice_on_how_to_continue_is_read_with_its_time(path):
    writer, reader = heartbeat_file.HeartbeatFile(path), heartbeat_file.HeartbeatFile(path, is_writer=False)
    assert reader.read().resume_advice == ""
    writer.set_log("runs/log.jsonl")
    for text in ("the first", "the second" * 1000):
        before = time.monotonic()
        writer.set_resume_advice(text)
        read = reader.read()
        assert text.startswith(read.resume_advice)
        assert len(read.resume_advice) > 4000 or read.resume_advice == text
        assert before <= read.resume_advice_since <= time.monotonic()
    assert reader.read().log == "runs/log.jsonl"


def test_half_written_note_keeps_the_previous_one_readable(path):
    """A writer that is killed between two stores never writes to the slot in use."""
    writer, reader = heartbeat_file.HeartbeatFile(path), heartbeat_file.HeartbeatFile(path, is_writer=False)
    writer.set_note({"stack": [["a.py", 1, "old"]]})
    current = writer._memory[heartbeat_file._NOTE.offset] % 2
    start = heartbeat_file._NOTE.offset + 1 + (1 - current) * heartbeat_file._NOTE.slot_bytes
    writer._memory[start : start + 200] = b"\xff" * 200
    assert reader.read().note == {"stack": [["a.py", 1, "old"]]}


CLAIM = """
import os, sys
from headway.core.runtime import heartbeat_file
print(heartbeat_file.get_own_file().path is not None, os.environ.get("HEADWAY_PULSE"))
if len(sys.argv) > 1:
    sys.exit()
import subprocess
os.environ["HEADWAY_PULSE"] = {path!r}  # as a child that was started before would have it
sys.stdout.flush()
subprocess.run([sys.executable, __file__, "child"])
child = os.fork()
if child == 0:
    print(heartbeat_file.get_own_file().path is not None)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_only_the_rank_itself_writes(path, tmp_path):
    script = tmp_path / "claim.py"
    script.write_text(CLAIM.format(path=str(path)))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60,
                         env={**os.environ, "HEADWAY_PULSE": str(path)})  # fmt: skip
    assert result.stdout.split("\n") == ["True None", "False None", "False", ""], result.stderr


def test_file_has_a_fixed_size(path):
    assert path.stat().st_size == heartbeat_file.SIZE
    assert heartbeat_file.SIZE % mmap.PAGESIZE == 0
