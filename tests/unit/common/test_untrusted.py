"""Test untrusted input: escaped text, bounded reads of regular files, and JSON that cannot harm the process."""

import os
from pathlib import Path

import pytest

from headway.common.untrusted import (
    escape_json,
    escape_text,
    open_regular_file,
    parse_json,
    parse_whole_number,
    read_regular_file,
    shorten_repr,
)
from headway.errors import CheckpointError, ConfigError


def test_text_keeps_letters_and_escapes_control_characters():
    assert escape_text("über 漢字 😀 a b") == "über 漢字 😀 a b"
    assert escape_text("\x1b[2J\a\r\n") == "\\x1b[2J\\x07\\r\\n"
    assert escape_text("\u202eevil\ud800\u200b") == "\\u202eevil\\ud800\\u200b"


def test_regular_file_and_link_to_one_are_read(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("f")
    for name in ("f", "link"):
        assert read_regular_file(tmp_path / name, 3) == b"abc"
        with open_regular_file(tmp_path / name) as file:
            assert file.read() == b"abc"
    with pytest.raises(CheckpointError, match="is too long: 3 bytes, where 2 are the most"):
        read_regular_file(tmp_path / "f", 2)


def test_pipes_folders_devices_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (("pipe", "is a pipe"), (".", "is a folder"), ("none", "No such file"), ("loop", "symbolic link"),
                       ("n" * 300, "too long"), ("a\0b", "null (byte|character)"), ("/dev/zero", "is a device")):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            open_regular_file(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a file that says it has no bytes")
def test_file_longer_than_its_reported_size_is_refused():
    with pytest.raises(CheckpointError, match="is too long"):
        read_regular_file(Path("/proc/self/maps"), 10)


def test_json_values_are_escaped_and_keep_line_breaks():
    assert escape_json("a\tb\n\x1b[2Jc\r") == "a\tb\n\\x1b[2Jc\\r"
    assert escape_json({"\a": ["\x1b", 1, None, {"b": True}]}) == {"\\x07": ["\\x1b", 1, None, {"b": True}]}


def test_long_values_are_truncated_in_messages():
    assert shorten_repr("x\x1b") == "'x\\x1b'"
    assert shorten_repr([1] * 1000) == "[" + "1, " * 33 + "... (3000 characters)"
    assert shorten_repr(1 << 20_000) == "a number of 20001 bits"
    assert shorten_repr([1 << 20_000]) == "a value too large to print"


def test_only_short_ascii_digits_make_a_whole_number():
    assert [parse_whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    assert {parse_whole_number(text) for text in ("", "-1", "1.0", "²", "٣", " 1", "9" * 19, "9" * 5000)} == {None}


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 5000, "", "nothing", b"\xff"])
def test_invalid_json_raises_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_caller_chooses_the_error_class(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        read_regular_file(tmp_path, 1, ConfigError)
