"""Test folders of checkpoints: the run in them, rotation, leftovers, and files of others."""

import pytest

from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import MANIFEST
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.saved import save


@pytest.mark.parametrize(("about", "run"), [({"run": "abc"}, "abc"), ({}, None), ({"run": None}, None)])
def test_run_id_is_read_from_a_checkpoint(tmp_path, about, run):
    save(tmp_path, about=about)
    assert folders.read_run_id(tmp_path / "checkpoint_1") == run
    assert folders.read_run_id(tmp_path / "missing") is None


def test_checkpoint_renamed_during_a_killed_commit_is_found_and_kept(tmp_path):
    save(tmp_path)
    (tmp_path / "checkpoint_1").rename(tmp_path / ".replaced-checkpoint_1")
    assert folders.find_store(tmp_path / "checkpoint_1").find_folder().name == ".replaced-checkpoint_1"
    folders.find_store(tmp_path).remove_leftovers()
    assert folders.find_store(tmp_path / "checkpoint_1").find_folder().name == ".replaced-checkpoint_1"
    save(tmp_path, nonce="1" * 16)
    folders.find_store(tmp_path).remove_leftovers()
    assert not (tmp_path / ".replaced-checkpoint_1").exists()


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="contains files, but no checkpoint"):
        save(tmp_path)
    assert (tmp_path / "checkpoint_1" / "thesis.tex").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        save(tmp_path, final=tmp_path / "file")


def test_rotation_keeps_the_highest_numbers_and_protected_checkpoints(tmp_path):
    for number in (1, 2, 9, 10, 11):
        save(tmp_path, final=tmp_path / f"checkpoint_{number}", nonce=f"{number:016x}")
    (tmp_path / "notes").mkdir()
    folders.remove_old_checkpoints(tmp_path, 2, [tmp_path / "checkpoint_1"])
    assert [path.name for path in folders.list_committed(tmp_path)] == [
        "checkpoint_11",
        "checkpoint_10",
        "checkpoint_1",
    ]
    assert (tmp_path / "notes").exists()


def test_sweep_removes_only_leftovers(tmp_path):
    save(tmp_path)
    for name in (
        ".staging-checkpoint_1-0123456789abcdef",
        ".removing-checkpoint_0",
        ".staging-checkpoint_1-x-0123456789abcdef",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".hidden").mkdir()
    assert [path.name for path in folders.find_store(tmp_path).remove_leftovers("checkpoint_1")] == [
        ".staging-checkpoint_1-0123456789abcdef"
    ]
    folders.find_store(tmp_path).remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "checkpoint_1", "latest"]


def test_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    save(tmp_path)
    (tmp_path / "checkpoint_1" / MANIFEST).unlink()
    assert folders.list_committed(tmp_path) == []
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        folders.find_store(tmp_path / "checkpoint_1").find_folder()
