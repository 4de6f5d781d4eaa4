import os
from pathlib import Path

import pytest

from headway.errors import CheckpointError
from headway.untrusted import open_regular, printable, read_regular


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
