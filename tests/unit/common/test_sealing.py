"""Messages are accepted only with a valid HMAC; sources of the secret."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.common.sealing import PROOF_SIZE, Seal, UnsealedCounter, read_secret
from headway.errors import ConfigError


def of(secret: bytes) -> Seal:
    return Seal(secret, UnsealedCounter(lambda text: None))


@given(st.binary(max_size=40), st.text(max_size=20), st.binary(max_size=200))
def test_what_was_closed_opens_at_its_place_only(secret, place, content):
    seal = of(secret)
    closed = seal.seal_message(place, content)
    assert seal.open_message(place, closed) == content
    assert seal.open_message(f"{place} ", closed) is None
    assert of(secret + b"!").open_message(place, closed) is None
    assert b"\n" not in closed[:PROOF_SIZE]


@given(st.binary(max_size=100))
def test_what_anybody_else_writes_does_not(data):
    assert of(b"a secret of ours").open_message("here", data) is None


def test_a_changed_byte_does_not_open():
    seal = of(b"secret")
    closed = seal.seal_message("here", b"content")
    for index in range(len(closed)):
        changed = closed[:index] + bytes([closed[index] ^ 1]) + closed[index + 1 :]
        assert seal.open_message("here", changed) is None


def test_each_salt_derives_a_different_secret():
    assert of(b"a").derive("1") == of(b"a").derive("1")
    assert len({of(b"a").derive("1"), of(b"a").derive("2"), of(b"b").derive("1"), of(b"").derive("1")}) == 4


def test_strangers_are_counted_and_said_once():
    said = []
    strangers = UnsealedCounter(said.append)
    assert strangers.describe_total() == ""
    for _ in range(3):
        strangers.count_message("a line from \x1b[2Jnowhere")
    assert said == [
        "a line from \\x1b[2Jnowhere was not sent by a process of this run, so it is dropped, "
        "as all others like it will be (docs/security.md)"
    ]
    assert strangers.describe_total() == "3 lines, values and connections of others were dropped in all"


def test_a_secret_is_a_variable_or_a_file(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWAY_SECRET", raising=False)
    assert read_secret() == b""
    monkeypatch.setenv("HEADWAY_SECRET", "0123456789abcdef\n")
    assert read_secret() == b"0123456789abcdef"
    (tmp_path / "secret").write_text("fedcba9876543210 of the file\n")
    assert read_secret(str(tmp_path / "secret")) == b"fedcba9876543210 of the file"


def test_what_cannot_be_a_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="the secret of HEADWAY_SECRET has 7 bytes and must have at least 16") as told:
        read_secret()
    assert "hunter2" not in str(told.value)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="has 0 bytes"):
        read_secret(str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--secret: .*pipe is a pipe, not a regular file"):
        read_secret(str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match=r"--secret: .*none cannot be read: No such file"):
        read_secret(str(tmp_path / "none"))
