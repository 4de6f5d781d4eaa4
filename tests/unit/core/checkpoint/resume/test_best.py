"""Test which checkpoint is the best one, and how a run resumes from it."""

import logging
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import EarlyStopping, ProjectConfiguration
from headway.errors import CheckpointError, ConfigError
from tests.unit.core.checkpoint.resume.test_methods import build, train_epoch


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save_several(metrics, **project):
    """Train one epoch before each save. Return the Accelerator, its model and the weights at each save."""
    accelerator, model, optimizer, loader = build(**project)
    weights = []
    for metric in metrics:
        train_epoch(accelerator, model, optimizer, loader)
        accelerator.save_state(metric=metric)
        weights.append(model.weight.detach().clone())
    return accelerator, model, weights


@pytest.mark.parametrize(("keep", "expected"), [("max", 1), ("min", 2)])
def test_best_checkpoint_has_the_best_metric(keep, expected):
    accelerator, model, weights = save_several([0.5, 0.9, 0.1, None, float("nan"), 0.9, 0.1], keep_best=keep)
    assert accelerator.best_checkpoint.name == f"checkpoint_{expected}"
    assert accelerator.resume("best").folder == accelerator.best_checkpoint
    assert torch.equal(model.weight, weights[expected])
    assert accelerator.save_state(metric=0.3).name == "checkpoint_7"
    again, model, *_ = build(keep_best=keep)
    assert again.best_checkpoint.name == f"checkpoint_{expected}"
    assert again.resume("best").folder.name == f"checkpoint_{expected}"
    assert torch.equal(model.weight, weights[expected])


def test_rotation_keeps_the_best_checkpoint():
    accelerator, model, weights = save_several([0.3, 0.1, 0.2, 0.4], keep_best="min", total_limit=1)
    accelerator.resume("best")
    assert torch.equal(model.weight, weights[1])


def list_numbers(project_dir="run"):
    """Return the numbers of the checkpoints that exist."""
    folders = [path for path in Path(project_dir, "checkpoints").iterdir() if path.is_dir()]
    return sorted(int(path.name.removeprefix("checkpoint_")) for path in folders)


@given(
    metrics=st.lists(st.one_of(st.none(), st.integers(0, 4).map(float)), min_size=1, max_size=9),
    limit=st.integers(1, 3),
    num_best=st.integers(1, 4),
    keep=st.sampled_from(["min", "max"]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rotation_keeps_the_newest_and_the_best_checkpoints(tmp_path, metrics, limit, num_best, keep):
    """Of equal metrics, the earlier one is better."""
    folder = tempfile.mkdtemp(dir=tmp_path)
    save_several(metrics, project_dir=folder, keep_best=keep, num_best=num_best, total_limit=limit)
    sign = 1 if keep == "min" else -1
    ranked = sorted((sign * metric, number) for number, metric in enumerate(metrics) if metric is not None)
    newest = range(max(0, len(metrics) - limit), len(metrics))
    assert list_numbers(folder) == sorted({*newest, *(number for _, number in ranked[:num_best])})


def test_rotation_keeps_one_checkpoint_per_interval_of_updates_also_after_a_resume():
    """Each epoch has six updates, so saves follow 6, 12, ... updates. The first ones at or after 20 and 40 are kept."""
    save_several([None] * 5, keep_every=20, total_limit=1)
    assert list_numbers() == [3, 4]  # 24 updates, and the newest one
    accelerator, model, optimizer, loader = build(keep_every=20, total_limit=2)
    accelerator.resume("latest")
    for _ in accelerator.epochs(9):
        train_epoch(accelerator, model, optimizer, loader)
        accelerator.save_state()
    assert list_numbers() == [3, 6, 7, 8]  # 24 and 42 updates, and the two newest ones


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_best": 0, "keep_best": "min"}, "num_best=0; give the number of best checkpoints"),
        ({"num_best": 2}, "num_best=2 needs keep_best"),
        ({"keep_every": 0}, "keep_every=0; give a number of updates"),
        ({"keep_every": True}, "keep_every=True; give a number of updates"),
        (
            {"keep_every": 5, "automatic_checkpoint_naming": False},
            "keep_every=5 needs automatic_checkpoint_naming=True",
        ),
    ],
)
def test_impossible_numbers_of_kept_checkpoints_are_errors(values, message):
    with pytest.raises(ConfigError, match=message):
        ProjectConfiguration("run", **{"automatic_checkpoint_naming": True, **values})


def test_background_save_can_be_the_best():
    accelerator, model, optimizer, loader = build(keep_best="max")
    accelerator.save_state(metric=0.5)
    train_epoch(accelerator, model, optimizer, loader)
    folder = accelerator.save_state(metric=0.7, blocking=False)
    assert accelerator.resume("best").folder == folder


def test_copied_and_damaged_checkpoints_are_skipped(caplog):
    accelerator, model, weights = save_several([0.5, 0.9, 0.7], keep_best="max")
    best = accelerator.best_checkpoint
    shutil.copytree(best, best.parent / "zz_9")
    assert accelerator.best_checkpoint == best
    for path in best.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    with caplog.at_level(logging.WARNING, "headway"):
        assert accelerator.resume("best").folder.name == "checkpoint_2"
    assert "skipping a checkpoint" in caplog.text
    assert torch.equal(model.weight, weights[2])


def test_other_runs_count_only_until_this_run_has_saved():
    _, _, _ = save_several([0.9], keep_best="max")
    other, *_ = build(keep_best="max", iteration=1)
    assert other.best_checkpoint.name == "checkpoint_0"
    other.save_state(metric=0.2)
    assert other.best_checkpoint.name == "checkpoint_1"
    assert other.resume("best").folder.name == "checkpoint_1"


def test_without_a_checkpoint_nothing_is_resumed(caplog):
    accelerator, model, optimizer, loader = build(keep_best="max")
    assert accelerator.best_checkpoint is None
    with caplog.at_level(logging.WARNING, "headway"):
        assert accelerator.resume("best") is None
        assert caplog.text == ""
        train_epoch(accelerator, model, optimizer, loader)
        assert accelerator.resume("best") is None
    assert 'resume("best") found no checkpoint' in caplog.text


def test_missing_metric_or_keep_best_is_an_error():
    accelerator, *_ = save_several([None], keep_best="max")
    assert accelerator.best_checkpoint is None
    with pytest.raises(CheckpointError, match=r"save_state\(metric=value\)"):
        accelerator.resume("best")
    for project in ({}, {"keep_best": "max", "automatic_checkpoint_naming": False}):
        accelerator, *_ = build(project_dir="other", **project)
        with pytest.raises(ConfigError, match="keep_best='min'"):
            accelerator.resume("best")
        with pytest.raises(ConfigError, match="keep_best='min'"):
            _ = accelerator.best_checkpoint


def test_early_stopping_is_resumed_and_a_stopped_run_stays_stopped():
    def train(num_epochs):
        accelerator, model, optimizer, loader = build(keep_best="min")
        stopping = EarlyStopping(patience=2)
        accelerator.register_for_checkpointing(stopping)
        accelerator.resume()
        seen = []
        for epoch in accelerator.epochs(num_epochs):
            if stopping.should_stop:
                break
            train_epoch(accelerator, model, optimizer, loader)
            stopping.update([3.0, 1.0, 2.0, 1.5, 0.5][epoch])
            accelerator.save_state(metric=[3.0, 1.0, 2.0, 1.5, 0.5][epoch])
            seen.append(epoch)
        return seen, accelerator.best_checkpoint.name

    assert train(3) == ([0, 1, 2], "checkpoint_1")
    assert train(10) == ([3], "checkpoint_1")
    assert train(10) == ([], "checkpoint_1")
