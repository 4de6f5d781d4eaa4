import os
from pathlib import Path

import pytest

from headway.common.untrusted import open_regular, parse_json, plain, printable, read_regular, shown, whole_number
from headway.errors import CheckpointError, ConfigError


def test_text_keeps_its_letters_and_loses_its_powers():
    assert printable("über 漢字 😀 a b") == "über 漢字 😀 a b"
    assert printable("\x1b[2J\a\r\n") == "\\x1b[2J\\x07\\r\\n"
    assert printable("\u202eevil\ud800\u200b") == "\\u202eevil\\ud800\\u200b"


def test_a_regular_file_and_a_link_to_one(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("f")
    for name in ("f", "link"):
        assert read_regular(tmp_path / name, 3) == b"abc"
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"
    with pytest.raises(CheckpointError, match="is too long: 3 bytes, where 2 are the most"):
        read_regular(tmp_path / "f", 2)


def test_nothing_else(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (("pipe", "is a pipe"), (".", "is a folder"), ("none", "No such file"), ("loop", "symbolic link"),
                       ("n" * 300, "too long"), ("a\0b", "null byte"), ("/dev/zero", "is a device")):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            open_regular(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a file that says it has no bytes")
def test_a_file_that_is_longer_than_it_says():
    with pytest.raises(CheckpointError, match="is too long"):
        read_regular(Path("/proc/self/maps"), 10)


def test_text_of_several_lines_keeps_them():
    assert plain("a\tb\n\x1b[2Jc\r") == "a\tb\n\\x1b[2Jc\\r"
    assert plain({"\a": ["\x1b", 1, None, {"b": True}]}) == {"\\x07": ["\\x1b", 1, None, {"b": True}]}


def test_values_are_shown_cut():
    assert shown("x\x1b") == "'x\\x1b'"
    assert shown([1] * 1000) == "[" + "1, " * 33 + "... (3000 characters)"
    assert shown(1 << 20_000) == "a number of 20001 bits"
    assert shown([1 << 20_000]) == "a value too large to print"


def test_digits_make_a_number_that_something_may_have():
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    assert {whole_number(text) for text in ("", "-1", "1.0", "²", "٣", " 1", "9" * 19, "9" * 5000)} == {None}


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 5000, "", "nothing", b"\xff"])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_the_kind_of_refusal_is_the_callers(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        read_regular(tmp_path, 1, ConfigError)
