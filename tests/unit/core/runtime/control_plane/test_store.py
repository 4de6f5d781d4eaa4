"""Test the sealed store, into which other programs can also write, and the control plane on top of it."""

import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime.control_plane.control import Control
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import RANK_0, StoreAddress, StoreLink, start_store
from headway.errors import ConfigError, ControlPlaneError


@pytest.fixture
def bare():
    """Store without a seal, into which any program can write."""
    return HashStore()


@pytest.fixture
def reports():
    """List of messages about unsealed values."""
    return []


@pytest.fixture
def store(bare, reports):
    return SealedStore(bare, "control", Seal(b"secret of this run", UnsealedCounter(reports.append)))


def test_values_are_read_as_written(store):
    assert store.find("a") is None
    store.set("a", b"\0\xff\n")
    assert store.find("a") == store.get("a") == b"\0\xff\n"
    assert store.multi_get(["a", "a"]) == [b"\0\xff\n"] * 2
    assert store.set_once("b", b"first") == store.set_once("b", b"second") == b"first"
    assert store.check(["a", "b"])
    assert store.add("n", 2) == 2
    store.reset("n")
    assert store.add("n", 3) == 3
    store.delete_key("a")
    assert not store.check(["a"])


def test_values_of_other_programs_are_ignored(bare, store, reports):
    bare.set("notice", "\x1b[31mthe run is over")
    assert store.find("notice") is None
    assert store.find("notice") is None
    assert len(reports) == 1
    assert "the value of 'notice' in the control store" in reports[0]
    store.set("notice", b"of this run")
    assert store.find("notice") == b"of this run"
    bare.set("moved", bare.get("notice"))  # a seal is valid for one key only
    assert store.find("moved") is None


def test_foreign_value_is_an_error_if_a_value_is_required(bare, store):
    bare.set("a", "1")
    for ask in (lambda: store.get("a"), lambda: store.multi_get(["a"]), lambda: store.set_once("a", b"2")):
        with pytest.raises(
            ControlPlaneError, match="'a' in the control store was not written by this run: another prog"
        ):
            ask()


@pytest.fixture
def plane():
    """Return the control plane of rank 0 of 2, and its store."""
    server = start_store("127.0.0.1")
    link = StoreLink(StoreAddress("127.0.0.1", server.port, "attempt", key="00ff"), timedelta(seconds=10), server)
    return Control(0, 2, link, timedelta(seconds=10)), server


def test_rank_that_ends_after_rank_0_does_not_wait_for_its_store():
    server = start_store("127.0.0.1")
    address = StoreAddress("127.0.0.1", server.port, "attempt", key="00ff", hosted_by=RANK_0)
    del server
    link = StoreLink(address, timedelta(minutes=10))
    ending = threading.Thread(target=link.close, args=(1, 2), daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()


def test_flag_removed_by_another_program_is_detected(plane):
    control, server = plane
    # A program that reaches the port pretends that the other rank has arrived, and removes a flag from the count.
    server.add("attempt/arrived", 1 - (1 << 32))
    with pytest.raises(ControlPlaneError, match="vote 1 of rank 0 was not counted: another program"):
        control.vote([1.0], "any")


def test_result_written_by_another_program_is_refused(plane):
    control, server = plane
    server.set("attempt/result/1", b"\1" + bytes(7) + b"\0\1\0" + bytes(8))
    with pytest.raises(ControlPlaneError, match="'result/1' in the control attempt store was not written by this run"):
        control.vote([1.0], "any")


def test_invalid_address_is_refused():
    good = {"host": "h", "port": 1, "attempt": "", "key": ""}
    wrong = ({"key": "no hex"}, {"port": "x"}, {"host": 3}, {"port": 99_999}, {"hub_port": -1}, {"more": 1})
    for text in ("", "[" * 100_000, "{}", "[]", "3", *(json.dumps({**good, **each}) for each in wrong)):
        with pytest.raises(
            ConfigError, match=r"is not the address of a control plane of this Headway.*HEADWAY_CONTROL, so unset"
        ):
            StoreAddress.decode(text)
    assert "00ff" not in repr(StoreAddress("h", 1, "a", key="00ff"))
