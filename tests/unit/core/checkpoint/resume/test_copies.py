"""Copies of checkpoints that a person makes beside them: left alone, in nobody's way, and not what a resume takes."""

import shutil
from pathlib import Path

import pytest

from headway.errors import CheckpointError
from tests.unit.core.checkpoint.resume.test_methods import _folder, build, learn, names  # noqa: F401  (the fixture moves to a folder of its own)

HERE = Path("run/checkpoints")


def copy(name, of):
    shutil.copytree(HERE / of, HERE / name)


def test_rotation_leaves_copies_alone():
    accelerator, *_ = build(total_limit=1)
    accelerator.save_state()
    copy("best_model", "checkpoint_0")
    copy("paper_2024", "checkpoint_0")
    for _ in range(3):
        accelerator.save_state()
    assert names() == ["best_model", "checkpoint_3", "latest", "paper_2024"]


def test_a_numbered_copy_disturbs_no_save_and_is_not_resumed():
    accelerator, *objects = build()
    learn(accelerator, *objects, num=1)
    accelerator.save_state()
    copy("paper_2024", "checkpoint_0")
    learn(accelerator, *objects, num=1)
    assert accelerator.save_state().name == "checkpoint_1"
    again, *_ = build()
    restored = again.resume("latest")
    assert restored.folder.name == "checkpoint_1"
    assert restored.about["num_updates"] == 2
    assert again.save_state().name == "checkpoint_2"
    back, *_ = build()
    assert back.resume(HERE / "paper_2024").about["num_updates"] == 1  # by its name it is


def test_a_copy_with_the_name_of_the_next_checkpoint_is_not_overwritten():
    accelerator, *_ = build()
    accelerator.save_state()
    copy("checkpoint_1", "checkpoint_0")
    with pytest.raises(CheckpointError, match="checkpoint_1 is a copy of checkpoint_0, but has the name that the next"):
        accelerator.save_state()


def test_a_copy_is_not_the_best_one():
    accelerator, *_ = build(total_limit=1, keep_best="max")
    accelerator.save_state(metric=0.9)
    copy("best_model", "checkpoint_0")
    for metric in (0.1, 0.2):
        accelerator.save_state(metric=metric)
    assert names() == ["best_model", "checkpoint_0", "checkpoint_2", "latest"]


def test_a_folder_with_copies_only_is_an_error():
    accelerator, *_ = build()
    accelerator.save_state().rename(HERE / "kept")
    again, *_ = build()
    with pytest.raises(CheckpointError, match=r"only copies \(kept was saved as checkpoint_0\)"):
        again.resume("latest")
