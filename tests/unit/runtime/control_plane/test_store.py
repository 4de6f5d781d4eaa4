"""A store in which others write, too."""

import json
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from headway.common.untrusted import Seal, UnsealedCounter
from headway.errors import ConfigError, ControlPlaneError
from headway.runtime.control_plane.control import Control
from headway.runtime.control_plane.store import SealedStore, StoreAddress, StoreLink, serve


@pytest.fixture
def bare():
    return HashStore()


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(bare, said):
    return SealedStore(bare, "control", Seal(b"secret of this run", UnsealedCounter(said.append)))


def test_values_come_back(store):
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


def test_what_others_write_is_as_if_it_was_not_there(bare, store, said):
    bare.set("notice", "\x1b[31mthe run is over")
    assert store.find("notice") is None
    assert store.find("notice") is None
    assert len(said) == 1
    assert "the value of 'notice' in the control store" in said[0]
    store.set("notice", b"of this run")
    assert store.find("notice") == b"of this run"
    bare.set("moved", bare.get("notice"))  # what proves itself elsewhere does not here
    assert store.find("moved") is None


def test_where_a_value_is_needed_a_strange_one_is_an_error(bare, store):
    bare.set("a", "1")
    for ask in (lambda: store.get("a"), lambda: store.multi_get(["a"]), lambda: store.set_once("a", b"2")):
        with pytest.raises(
            ControlPlaneError, match="'a' in the control store was not written by this run: another prog"
        ):
            ask()


@pytest.fixture
def plane():
    server = serve("127.0.0.1")
    link = StoreLink(StoreAddress("127.0.0.1", server.port, "attempt", key="00ff"), timedelta(seconds=10), server)
    return Control(0, 2, link, timedelta(seconds=10)), server


def test_a_flag_that_others_take_off_the_count_is_missed(plane):
    control, server = plane
    # One who reaches the port has the other rank arrive, and takes off the mark that a value is not zero.
    server.add("attempt/arrived", 1 - (1 << 32))
    with pytest.raises(ControlPlaneError, match="vote 1 of rank 0 was not counted: another program"):
        control.vote([1.0], "any")


def test_a_result_that_others_write_is_no_result(plane):
    control, server = plane
    server.set("attempt/result/1", b"\1" + bytes(7) + b"\0\1\0" + bytes(8))
    with pytest.raises(ControlPlaneError, match="'result/1' in the control attempt store was not written by this run"):
        control.vote([1.0], "any")


def test_an_address_that_is_none():
    good = {"host": "h", "port": 1, "attempt": "", "key": ""}
    wrong = ({"key": "no hex"}, {"port": "x"}, {"host": 3}, {"port": 99_999}, {"hub_port": -1}, {"more": 1})
    for text in ("", "[" * 100_000, "{}", "[]", "3", *(json.dumps({**good, **each}) for each in wrong)):
        with pytest.raises(ConfigError, match=r"is no address of this Headway's control plane.*HEADWAY_CONTROL: unset"):
            StoreAddress.decode(text)
    assert "00ff" not in repr(StoreAddress("h", 1, "a", key="00ff"))
