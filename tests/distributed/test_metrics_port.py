"""`headway launch --metrics_port`: what Prometheus reads while two real processes train, wait for each other, and save."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from headway.core.runtime.heartbeat_file import HeartbeatFile, HeartbeatReading, RecordedCall, create_file
from headway.launch.agent.log_tail import LogTail
from headway.launch.agent.metrics import MetricsServer, RunMetrics, find_awaited
from tests.distributed.ranks import free_port

SCRIPT = """
import sys, time, torch
from pathlib import Path
from headway import Accelerator
folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, project_dir=folder, on_non_finite="skip")
accelerator.init_trackers("run")
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for update in range(5):
    x = torch.full((1, 2), float("nan") if update == 2 else 1.0)
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train/loss": 0.5 + update, "tokens_per_second": 1000.0})
accelerator.save_state(folder / "saved")
if accelerator.process_index == 1:
    while not (folder / "go").exists():
        time.sleep(0.05)
accelerator.wait_for_everyone()
"""


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


LINE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? (-?[0-9.e+-]+|NaN|[+-]Inf)$')


def parse_metrics(text: str) -> dict[str, float]:
    """Return the metrics by name and labels. Fail if a line is not in Prometheus's text format."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(LINE.match(line) for line in lines), lines
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(kinds)) == len(kinds)
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.slow
def test_metrics_of_a_run_of_two_processes(tmp_path):
    script, port = tmp_path / "train.py", free_port()
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "headway", "launch", "-n", "2", "--cpu", "--metrics-port", str(port), str(script)]
    before = time.time()
    run = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        found: dict[str, float] = {}
        deadline = time.monotonic() + 180
        while found.get("headway_awaited_rank", -1) < 0:
            assert time.monotonic() < deadline, found
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.3)
            try:
                found = parse_metrics(fetch(port, "/metrics")[1])
            except (urllib.error.URLError, ConnectionError):
                continue
        assert found["headway_awaited_rank"] == 1
        assert found['headway_collective_seconds{rank="0"}'] > 1
        assert found["headway_ranks"] == 2
        assert found["headway_restarts"] == 0
        assert found['headway_updates{rank="0"}'] >= 3
        assert found["headway_loss"] == found['headway_logged{name="train/loss"}'] == 4.5
        assert found["headway_tokens_per_second"] == 1000
        assert found["headway_skipped_updates"] == 1
        assert found['headway_events{event="checkpoint"}'] == 1
        assert before < found["headway_last_commit_timestamp_seconds"] < time.time()
        assert found["headway_last_commit_update"] == 4
        assert found['headway_resident_memory_bytes{rank="1"}'] > 1e7
        assert fetch(port, "/healthz") == (200, "ok\n")
        assert fetch(port, "/")[0] == 404
        (tmp_path / "go").touch()
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 0, stderr
    finally:
        run.kill()
        run.wait()


def test_taken_metrics_port_is_an_error_before_the_script_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['WORLD_SIZE'])")
    server = MetricsServer(0, RunMetrics(dict, lambda: 0))
    try:
        command = [sys.executable, "-m", "headway", "launch", "-n", "1", "--cpu", "--metrics_port"]
        result = subprocess.run([*command, str(server.port), str(script)], capture_output=True, text=True, timeout=120)
        assert result.returncode == 1
        assert f"headway: --metrics_port {server.port}: Address already in use; give a free port" in result.stderr
    finally:
        server.stop_server()
    result = subprocess.run([*command, str(server.port), str(script)], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


# ---------------------------------------------------------------- components


def make_reading(*calls: tuple[int, float, float | None], beat: float = 100.0) -> HeartbeatReading:
    return HeartbeatReading(
        pid=1, last_beat=beat, calls=tuple(RecordedCall(n, "all_reduce", "", at, left) for n, at, left in calls)
    )


def test_rank_that_the_others_wait_for_is_found():
    inside, outside = make_reading((7, 90.0, None)), make_reading((6, 80.0, 81.0))
    assert find_awaited({0: inside, 1: outside}, 100.0) == 1
    assert find_awaited({0: outside, 1: inside}, 100.0) == 0
    assert find_awaited({0: inside, 1: outside}, 90.5) is None  # it has not waited long enough
    assert find_awaited({0: inside, 1: inside}, 100.0) is None  # the awaited rank is on another machine
    assert find_awaited({0: inside, 1: make_reading((6, 85.0, None))}, 100.0) == 1  # rank 1 is in an earlier collective
    assert find_awaited({}, 100.0) is None


def test_run_without_progress_is_unhealthy(tmp_path, monkeypatch):
    path = tmp_path / "pulse"
    create_file(path)
    metrics = RunMetrics(lambda: {3: path, 4: tmp_path / "none"}, lambda: 2)
    assert metrics.find_trouble() == ""  # no rank has started
    file = HeartbeatFile(path)
    file.record_beat(1)
    file.note_progress(12, 1)
    assert metrics.find_trouble() == ""
    assert parse_metrics(metrics.format_metrics())['headway_updates{rank="3"}'] == 12
    assert parse_metrics(metrics.format_metrics())["headway_restarts"] == 2
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert metrics.find_trouble() == "no rank on this machine has run for 60 s"
    file.record_beat(2)
    file.enter_collective("all_reduce", "train.py:1")
    monkeypatch.setattr(time, "monotonic", lambda: now + 61 + 121)
    file.record_beat(3)
    assert metrics.find_trouble() == "121 s in a collective"
    file.leave_collective(1)
    assert metrics.find_trouble() == ""


def make_log_line(**content: object) -> str:
    return json.dumps({"kind": "values", "time": 5.0, "step": 1} | content) + "\n"


def test_log_is_read_from_pieces_of_any_length(tmp_path):
    path, tail = tmp_path / "log.jsonl", LogTail()
    tail.read_new_lines(str(path))
    assert tail.values == {}
    text = (
        make_log_line(values={"loss": 1.5, "note": "words", "rate": "nan"})
        + "torn {\n"
        + make_log_line(kind="event", event="checkpoint")
    )
    text += make_log_line(kind="event", event="non_finite", details={"action": "none"}) + make_log_line(
        values={"loss": 0.5}
    )
    for end in range(0, len(text) + 1, 7):
        path.write_text(text[:end])
        tail.read_new_lines(str(path))
    path.write_text(text)
    tail.read_new_lines(str(path))
    assert tail.values["loss"] == 0.5
    assert set(tail.values) == {"loss", "rate"}
    assert tail.commit == (5.0, 1)
    assert tail.num_skipped == 0
    assert tail.events == {"checkpoint": 1, "non_finite": 1}
    path.write_text(make_log_line(values={"other": 2}))  # the log of another run
    tail.read_new_lines(str(path))
    assert tail.values == {"other": 2}
    assert tail.commit is None
    new = tmp_path / "new.jsonl"
    new.write_text(make_log_line(values={"longer": 3}) * 2)
    new.replace(path)  # a longer log of another run replaces the file
    tail.read_new_lines(str(path))
    assert tail.values == {"longer": 3}


def test_labels_are_escaped(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(make_log_line(values={'a "b"\\\n': 1, "inf": "inf"}))
    path = tmp_path / "pulse"
    create_file(path)
    HeartbeatFile(path).set_log(str(log))
    text = RunMetrics(lambda: {0: path}, lambda: 0).format_metrics()
    assert 'headway_logged{name="a \\"b\\"\\\\\\n"} 1\n' in text
    assert 'headway_logged{name="inf"} +Inf\n' in text


def test_metrics_module_does_not_import_torch():
    code = "import sys, headway.launch.agent.metrics; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
