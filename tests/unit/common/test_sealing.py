"""Test sealed messages, which are accepted only with a valid HMAC, and the sources of the secret."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.common.sealing import MAC_SIZE, Seal, UnsealedCounter, read_secret
from headway.errors import ConfigError


def make_seal(secret: bytes) -> Seal:
    return Seal(secret, UnsealedCounter(lambda text: None))


@given(st.binary(max_size=40), st.text(max_size=20), st.binary(max_size=200))
def test_sealed_message_opens_only_with_its_place_and_secret(secret, place, content):
    seal = make_seal(secret)
    closed = seal.seal_message(place, content)
    assert seal.open_message(place, closed) == content
    assert seal.open_message(f"{place} ", closed) is None
    assert make_seal(secret + b"!").open_message(place, closed) is None
    assert b"\n" not in closed[:MAC_SIZE]


@given(st.binary(max_size=100))
def test_data_without_a_seal_is_rejected(data):
    assert make_seal(b"a secret of ours").open_message("here", data) is None


def test_message_with_any_changed_byte_is_rejected():
    seal = make_seal(b"secret")
    closed = seal.seal_message("here", b"content")
    for index in range(len(closed)):
        changed = closed[:index] + bytes([closed[index] ^ 1]) + closed[index + 1 :]
        assert seal.open_message("here", changed) is None


def test_each_salt_derives_a_different_secret():
    assert make_seal(b"a").derive_secret("1") == make_seal(b"a").derive_secret("1")
    assert (
        len(
            {
                make_seal(b"a").derive_secret("1"),
                make_seal(b"a").derive_secret("2"),
                make_seal(b"b").derive_secret("1"),
                make_seal(b"").derive_secret("1"),
            }
        )
        == 4
    )


def test_unsealed_messages_are_counted_and_reported_once():
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


def test_secret_is_read_from_a_variable_or_a_file(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWAY_SECRET", raising=False)
    assert read_secret() == b""
    monkeypatch.setenv("HEADWAY_SECRET", "0123456789abcdef\n")
    assert read_secret() == b"0123456789abcdef"
    (tmp_path / "secret").write_text("fedcba9876543210 of the file\n")
    assert read_secret(str(tmp_path / "secret")) == b"fedcba9876543210 of the file"


def test_invalid_secret_is_refused_without_showing_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_SECRET", "hunter2")
    with pytest.raises(
        ConfigError, match="the secret of HEADWAY_SECRET has 7 bytes and must have at least 16"
    ) as exc_info:
        read_secret()
    assert "hunter2" not in str(exc_info.value)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="has 0 bytes"):
        read_secret(str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--secret: .*pipe is a pipe, not a regular file"):
        read_secret(str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match=r"--secret: .*none cannot be read: No such file"):
        read_secret(str(tmp_path / "none"))
