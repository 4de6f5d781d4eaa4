"""Ray Train starts the workers: real workers, a real kill, and checkpoints in Ray's storage."""

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
pytestmark = pytest.mark.timeout(900)  # Ray starts two workers seven times


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run ray_runs.py in a new process, and return {name of a run: lines, metrics and checkpoints of its last start}.

    The lines contain those of earlier starts with the same name.
    """
    folder = tmp_path_factory.mktemp("ray")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "RANK", "WORLD_"))}
    more = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_runs.py")), str(folder)],
        cwd=folder, env={**kept, **more}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {run["name"]: run for run in found}


def read_losses(run, rank):
    return {line["update"]: line["loss"] for line in run["lines"][rank] if "update" in line}


def read_first_updates(run, rank=0):
    return [line["begun"] for line in run["lines"][rank] if "begun" in line]


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_killed_worker_repeats_updates_since_the_last_checkpoint(results):
    """FSDP runs on two workers. Each loss after the kill is exactly equal to that of a run without a kill."""
    whole, killed = results["whole"], results["killed"]
    assert read_first_updates(whole) == [0]
    assert read_first_updates(killed) == read_first_updates(killed, 1) == [0, 4]
    for rank in (0, 1):
        assert len(read_losses(whole, rank)) == 18
        assert read_losses(killed, rank) == read_losses(whole, rank)
    assert [line["update"] for line in killed["lines"][1] if "update" in line][:8] == [1, 2, 3, 4, 5, 6, 7, 5]
    assert killed["metrics"] == whole["metrics"]
    assert killed["metrics"]["updates"] == 16
    assert killed["metrics"]["loss"] == pytest.approx(float.fromhex(read_losses(whole, 0)[16]))
    assert killed["checkpoint"].endswith("headway/checkpoints/checkpoint_3")
    assert killed["kept"] == ["checkpoint_2", "checkpoint_3", "latest"]  # Ray deletes the others


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_script_for_accelerate_runs_unchanged(results):
    """The script has a temporary folder on each rank, loads what Ray returns, and does not use the adapter."""
    assert read_first_updates(results["script"]) == [0, 6]
    for rank in (0, 1):
        expected = read_losses(results["whole"], rank)
        assert read_losses(results["script"], rank) == {update: expected[update] for update in range(1, 13)}


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
def test_run_resumes_from_storage_on_another_file_system(results):
    """Ray uploads the reported checkpoints, and a run continues from a checkpoint that Ray downloads."""
    assert read_first_updates(results["distant"]) == [0, 4]
    assert sorted(read_losses(results["distant"], 0)) == list(range(1, 13))
    assert results["distant"]["metrics"]["updates"] == 12


def test_adapter_outside_of_ray_is_an_error():
    expected = ConfigError if HAS_RAY else OptionalDependencyMissing
    with pytest.raises(expected, match="TorchTrainer" if HAS_RAY else r"pip install 'ray\[train\]'"):
        adapter.project()
    with pytest.raises(ConfigError, match="CheckpointConfig"):
        adapter.project(total_limit=2)
