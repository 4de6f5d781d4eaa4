"""Test atomic file writes: a file is written completely or not at all."""

import os
import threading

import pytest

from headway.common.atomic import open_replacement, write_text


def test_reader_sees_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "f"
    write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    with open_replacement(path) as staged:
        staged.write_text("new")
        assert path.read_text() == "é"
        assert staged.parent == path.parent
        assert staged.name.startswith(".")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_failure_keeps_the_old_file_and_removes_the_temporary_one(tmp_path, error):
    path = tmp_path / "f"
    write_text(path, "old")

    def fail():
        with open_replacement(path) as staged:
            staged.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_missing_folder_raises_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "no" / "f", "x")


def test_concurrent_writers_use_separate_temporary_files(tmp_path):
    path, failed = tmp_path / "f", []
    barrier = threading.Barrier(8)

    def write(number):
        try:
            for _ in range(20):
                barrier.wait()
                write_text(path, f"{number}" * 5000, has_other_writers=True)
                text = path.read_text()
                if len(text) != 5000 or len(set(text)) != 1:
                    failed.append(text)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert os.listdir(tmp_path) == ["f"]
