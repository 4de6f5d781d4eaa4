"""Test that a process which another launcher has started avoids direct transfers between GPUs if they fail."""

import logging

import pytest

from headway.core.runtime import peer_access


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.setattr(peer_access, "describe_broken_transfers", lambda: "GeForce RTX 4090 with driver 535.54.03")
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "0")  # so that the fixture removes what the test sets
        monkeypatch.delenv(name)


def read_variables():
    import os

    return os.environ.get("NCCL_P2P_DISABLE"), os.environ.get("NCCL_IB_DISABLE")


@pytest.mark.filterwarnings("default::headway.errors.HeadwayWarning")
def test_variables_are_set_and_named(broken, caplog):
    with caplog.at_level(logging.WARNING):
        peer_access.avoid_broken_transfers()
    assert read_variables() == ("1", "1")
    assert "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set" in caplog.text


def test_variables_of_the_user_are_kept(broken, monkeypatch, caplog):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    peer_access.avoid_broken_transfers()
    assert read_variables() == ("0", "0")
    assert not caplog.text


def test_other_machines_are_left_unchanged(broken, monkeypatch, caplog):
    monkeypatch.setattr(peer_access, "describe_broken_transfers", lambda: "")
    peer_access.avoid_broken_transfers()
    assert read_variables() == (None, None)
    assert not caplog.text
