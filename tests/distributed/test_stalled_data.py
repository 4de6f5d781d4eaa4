"""Storage that stalls for one rank: the other rank waits longer than its collectives' timeout, until a limit ends the run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.slow_server import Fault, Handler, SlowServer
from tests.distributed.stalled_data_ranks import COUNT, train_alone, train_while_one_waits


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SlowServer]:
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"value": number / COUNT}) for number in range(COUNT)]
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines))
    with SlowServer(tmp_path / "data") as running:
        yield running


def stall(go: Path, seconds: float) -> Fault:
    """Return a fault that answers 503 for some seconds, starting with the first data request after `go` exists."""
    began: list[float] = []

    def fault(handler: Handler, number: int) -> bool:
        if not handler.is_for_data or not go.exists():
            return False
        began.append(time.monotonic())
        if time.monotonic() - began[0] > seconds:
            return False
        handler.answer(503, headers={"Retry-After": "1"})
        return True

    return fault


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_rank_waits_longer_than_a_collective_would(server: SlowServer, tmp_path: Path, num_workers: int) -> None:
    expected = train_alone(f"{server.url}/a.jsonl", str(tmp_path / "alone"))
    server.fault = stall(tmp_path / "go", 8.0)
    found = run_ranks(train_while_one_waits, 2, f"{server.url}/a.jsonl", str(tmp_path), num_workers)
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_run_ends_after_the_limit_and_names_shard_and_error(
    server: SlowServer, tmp_path: Path, num_workers: int
) -> None:
    server.fault = stall(tmp_path / "go", 1e6)
    command = [
        sys.executable,
        "-m",
        "headway",
        "launch",
        "-n",
        "2",
        "--cpu",
        "-m",
        "tests.distributed.stalled_data_ranks",
    ]
    result = subprocess.run(
        [*command, f"{server.url}/a.jsonl", str(tmp_path), str(num_workers)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],  # another test may have changed this process's folder
    )
    assert result.returncode
    assert "the end of training" not in result.stdout
    assert f"of the shard {server.url}/a.jsonl failed" in result.stderr
    assert "HTTP 503 Service Unavailable" in result.stderr
    assert "rank 1" in result.stderr
