"""Ray Train starts the workers: real workers, a real kill, checkpoints in its storage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.common.optional import is_available
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.integrations import ray as adapter

HAS_RAY = is_available("ray") and is_available("pyarrow")
NO_RAY = "Ray is not installed: pip install 'ray[train]' (200 MB)"
pytestmark = pytest.mark.timeout(900)  # Ray starts seven times two workers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each run told; of one that was started twice, the second time."""
    folder = tmp_path_factory.mktemp("ray")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "RANK", "WORLD_"))}
    more = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_runs.py")), str(folder)],
        cwd=folder, env={**kept, **more}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {run["name"]: run for run in found}


def losses(run, rank):
    return {line["update"]: line["loss"] for line in run["lines"][rank] if "update" in line}


def begun(run, rank=0):
    return [line["begun"] for line in run["lines"][rank] if "begun" in line]


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_a_killed_worker_costs_the_updates_since_the_last_checkpoint(runs):
    """FSDP over two workers; each loss of the run that was killed is that of the run that was not, bit for bit."""
    whole, killed = runs["whole"], runs["killed"]
    assert begun(whole) == [0]
    assert begun(killed) == begun(killed, 1) == [0, 4]
    for rank in (0, 1):
        assert len(losses(whole, rank)) == 18
        assert losses(killed, rank) == losses(whole, rank)
    assert [line["update"] for line in killed["lines"][1] if "update" in line][:8] == [1, 2, 3, 4, 5, 6, 7, 5]
    assert killed["metrics"] == whole["metrics"]
    assert killed["metrics"]["updates"] == 16
    assert killed["metrics"]["loss"] == pytest.approx(float.fromhex(losses(whole, 0)[16]))
    assert killed["checkpoint"].endswith("headway/checkpoints/checkpoint_3")
    assert killed["kept"] == ["checkpoint_2", "checkpoint_3", "latest"]  # Ray deletes the others


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_a_script_for_accelerate_runs_unchanged(runs):
    """A temporary folder on each rank, load_state from what Ray hands out, and no line of the adapter."""
    assert begun(runs["script"]) == [0, 6]
    for rank in (0, 1):
        wanted = losses(runs["whole"], rank)
        assert losses(runs["script"], rank) == {update: wanted[update] for update in range(1, 13)}


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_storage_that_is_no_folder(runs):
    """Ray uploads what is reported, and a run goes on from what it gives back."""
    assert begun(runs["distant"]) == [0, 4]
    assert sorted(losses(runs["distant"], 0)) == list(range(1, 13))
    assert runs["distant"]["metrics"]["updates"] == 12


def test_outside_of_ray_the_error_says_where_it_works():
    wanted = ConfigError if HAS_RAY else OptionalDependencyMissing
    with pytest.raises(wanted, match="TorchTrainer" if HAS_RAY else r"pip install 'ray\[train\]'"):
        adapter.project()
    with pytest.raises(ConfigError, match="CheckpointConfig"):
        adapter.project(total_limit=2)
