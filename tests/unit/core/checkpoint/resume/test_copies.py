"""Test that copies of checkpoints, made by hand next to them, are not removed, resumed or overwritten."""

import shutil
from pathlib import Path

import pytest

from headway.errors import CheckpointError
from tests.unit.core.checkpoint.resume.test_methods import _run_in_empty_folder, build, list_names, train_epoch  # noqa: F401  (the fixture moves to a folder of its own)

HERE = Path("run/checkpoints")


def copy_checkpoint(name, of):
    shutil.copytree(HERE / of, HERE / name)


def test_rotation_keeps_copies():
    accelerator, *_ = build(total_limit=1)
    accelerator.save_state()
    copy_checkpoint("best_model", "checkpoint_0")
    copy_checkpoint("paper_2024", "checkpoint_0")
    for _ in range(3):
        accelerator.save_state()
    assert list_names() == ["best_model", "checkpoint_3", "latest", "paper_2024"]


def test_numbered_copy_disturbs_no_save_and_is_not_resumed():
    accelerator, *objects = build()
    train_epoch(accelerator, *objects, num=1)
    accelerator.save_state()
    copy_checkpoint("paper_2024", "checkpoint_0")
    train_epoch(accelerator, *objects, num=1)
    assert accelerator.save_state().name == "checkpoint_1"
    again, *_ = build()
    restored = again.resume("latest")
    assert restored.folder.name == "checkpoint_1"
    assert restored.about["num_updates"] == 2
    assert again.save_state().name == "checkpoint_2"
    back, *_ = build()
    assert back.resume(HERE / "paper_2024").about["num_updates"] == 1  # a copy can be resumed by its path


def test_copy_with_the_name_of_the_next_checkpoint_is_not_overwritten():
    accelerator, *_ = build()
    accelerator.save_state()
    copy_checkpoint("checkpoint_1", "checkpoint_0")
    with pytest.raises(CheckpointError, match="checkpoint_1 is a copy of checkpoint_0, but has the name that the next"):
        accelerator.save_state()


def test_copy_is_not_the_best_checkpoint():
    accelerator, *_ = build(total_limit=1, keep_best="max")
    accelerator.save_state(metric=0.9)
    copy_checkpoint("best_model", "checkpoint_0")
    for metric in (0.1, 0.2):
        accelerator.save_state(metric=metric)
    assert list_names() == ["best_model", "checkpoint_0", "checkpoint_2", "latest"]


def test_folder_with_only_copies_is_an_error():
    accelerator, *_ = build()
    accelerator.save_state().rename(HERE / "kept")
    again, *_ = build()
    with pytest.raises(CheckpointError, match=r"only copies \(kept was saved as checkpoint_0\)"):
        again.resume("latest")


def save_with_own_name(name):
    accelerator, *objects = build(automatic_checkpoint_naming=False)
    train_epoch(accelerator, *objects, num=1)
    return accelerator.save_state(HERE / name)


def test_checkpoint_without_a_number_blocks_no_new_run():
    save_with_own_name("final")
    accelerator, *objects = build()
    train_epoch(accelerator, *objects, num=1)
    assert accelerator.save_state().name == "checkpoint_0"
    again, *_ = build()
    assert again.resume("latest").folder.name == "checkpoint_0"


def test_rotation_keeps_checkpoints_that_the_script_named():
    for name in ("final", "step_1"):
        save_with_own_name(name)
    accelerator, *_ = build(total_limit=1)
    accelerator.resume(HERE / "final")  # continues the run that saved `final`
    for _ in range(3):
        accelerator.save_state()
    assert list_names() == ["checkpoint_4", "final", "latest", "step_1"]
