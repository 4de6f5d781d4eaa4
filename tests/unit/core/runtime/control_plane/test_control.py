"""Test the control plane of one process, and its functions that need no other rank."""

import subprocess
import sys
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime import heartbeat_file, process
from headway.core.runtime.control_plane import control
from headway.core.runtime.control_plane.roll_call import check_in, describe_missing, list_present, name_ranks
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import StoreAddress, wait_for_keys
from headway.errors import ConfigError, ControlPlaneError

NUMBERS = st.lists(st.floats(allow_nan=False), max_size=8)


@given(NUMBERS)
def test_vote_of_one_process_returns_its_values(values):
    plane = control.current()
    assert (plane.rank, plane.world_size) == (0, 1)
    for op in ("min", "max", "sum"):
        assert plane.vote(values, op) == values
    assert plane.vote(values, "any") == [float(value != 0) for value in values]


def test_unknown_operation_is_refused():
    with pytest.raises(ConfigError, match=r"vote\(op='mean'\) is unknown; allowed: any, min, max, sum"):
        control.current().vote([1.0], "mean")


def test_one_process_can_get_the_values_it_sets():
    plane = control.current()
    assert not plane.has_key("key")
    plane.set("key", b"\0\xff")
    assert plane.has_key("key")
    assert plane.get("key", timedelta(seconds=1)) == b"\0\xff"
    plane.delete("key")
    with pytest.raises(ControlPlaneError, match=r"no rank has set .key. on the control plane within 0.01 s"):
        plane.get("key", timedelta(seconds=0.01))


def test_new_runtime_has_a_new_control_plane():
    first = control.current()
    assert control.current() is first
    process.reset()
    assert control.current() is not first


@pytest.mark.slow
def test_abort_ends_the_process_with_its_reason():
    code = "from headway.core.runtime.control_plane import control; control.current().abort('the disk is full')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "headway: rank 0 of 1 (host " in result.stderr
    assert result.stderr.endswith("ended the run: the disk is full\n")


@given(st.integers(0, 2**63), st.integers(0, 2**31))
def test_progress_is_read_back(update, micro_step):
    control.note_progress(update, micro_step)
    reading = heartbeat_file.get_own_file().read()
    assert (reading.update, reading.micro_step) == (update, micro_step)


@given(st.text(max_size=30), st.integers(1, 65535), st.text(max_size=30))
def test_address_is_encoded_and_decoded(host, port, attempt):
    address = StoreAddress(host, port, attempt, key="00ff")
    assert StoreAddress.decode(address.encode()) == address


def test_roll_call_names_numbers_and_ranks():
    text = describe_missing(4, [1, 3], "so far")
    assert "4 processes were asked for and 2 have come so far: missing ranks 1, 3" in text
    assert name_ranks([7]) == "rank 7"
    assert name_ranks(list(range(100))).endswith("19 and 80 more")


def test_two_processes_with_the_same_rank_are_reported():
    store = SealedStore(HashStore(), "roll call", Seal(b"", UnsealedCounter(print)))
    with pytest.raises(RuntimeError, match="2 processes were asked for and 1 has come"):
        check_in(store, 0, 2, timedelta(seconds=0.05))
    assert list_present(store, 2) == [0]
    with pytest.raises(RuntimeError, match=r"more processes than the 2 .* rank 0 was started twice \(pid \d+ on "):
        check_in(store, 0, 2, timedelta(seconds=0.05))
    assert not wait_for_keys(store, ["never"], timedelta(seconds=0.05))


def test_timeout_comes_from_the_argument_before_the_environment(monkeypatch):
    assert process.start(cpu=True).timeout == timedelta(seconds=600)
    process.reset()
    monkeypatch.setenv("HEADWAY_TIMEOUT", "42")
    assert process.start(cpu=True).timeout == timedelta(seconds=42)
    process.reset()
    assert process.start(cpu=True, timeout=timedelta(seconds=7)).timeout == timedelta(seconds=7)
    process.reset()
    monkeypatch.setenv("HEADWAY_TIMEOUT", "0")  # 0 means no timeout
    assert process.start(cpu=True).timeout > timedelta(days=300)
