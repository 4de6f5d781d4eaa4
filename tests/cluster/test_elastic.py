"""A machine dies or loses its link: the run continues from the last checkpoint with the same global batch size."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, find_obstacle, network
from tests.distributed.ranks import free_port

SLACK = 120
"""Timeout in seconds. It only detects hangs, so it is long enough for a busy machine."""

NUM_UPDATES = 24

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed

def tell(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()

set_seed(0)
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
x = torch.randn(48, 4)
data = TensorDataset(torch.arange(48), x, x.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=3, shuffle=True))
accelerator.resume("latest")
tell(begun=accelerator.num_updates, world=accelerator.num_processes, steps=accelerator.gradient_accumulation_steps)
for epoch in accelerator.epochs(3):
    seen, losses = [], []
    for index, inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(index).tolist()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            if accelerator.is_main_process:
                tell(update=accelerator.num_updates, seen=seen, loss=sum(losses) / len(losses))
            seen, losses = [], []
            if accelerator.num_updates % 3 == 0:
                accelerator.save_state()
            # Waits at update 7 until machine 1 is killed, and at update 16 until another machine has replaced it.
            mark = {7: "killed", 16: "joined"}.get(accelerator.num_updates)
            while mark and len(sys.argv) > 2 and not Path(mark).exists():
                time.sleep(0.05)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
if accelerator.is_main_process:
    tell(weights=weights)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    reason = find_obstacle()
    if reason:
        pytest.skip(reason)
    with network(2) as made:
        yield made


def parse_records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run_reference(folder: Path) -> list[dict]:
    """Run the script without interruption in one process with the same global batch size, and return its JSON records."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "train.py", "2"], cwd=folder, capture_output=True, text=True, timeout=SLACK
    )
    assert result.returncode == 0, result.stderr
    return parse_records(result.stdout)


def wait_for(is_so, said) -> None:
    deadline = time.monotonic() + SLACK
    while not is_so():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def test_dead_machine_is_replaced_during_the_run(hosts: Sequence[Host], tmp_path: Path) -> None:
    whole = run_reference(tmp_path / "whole")
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    words = "headway launch -n 2 --cpu --num_machines 2 --min_machines 1 --max_restarts 1 --machine_timeout 5"
    where = f"--main_process_ip {hosts[0].address} --main_process_port {free_port()}"
    commands = [f"exec {words} {where} --machine_rank {rank} train.py 1 waits" for rank in range(2)]

    def said() -> list[str]:
        return [(folder / f"{host.name}.txt").read_text() for host in hosts]

    def entries() -> list[dict]:
        return [entry for text in said() for entry in parse_records(text)]

    launchers = [host.start(command, folder) for host, command in zip(hosts, commands)]
    wait_for(lambda: any(entry.get("update") == 7 for entry in entries()), said)
    before = entries()
    hosts[1].send(signal.SIGKILL)
    (folder / "killed").touch()
    # The other machine continues alone with the same global batch size.
    wait_for(lambda: {"begun": 6, "world": 1, "steps": 2} in entries(), said)
    alone = hosts[0]
    assert "; rank " in said()[0]
    assert "was on it" in said()[0]
    assert "headway: 1 of 2 machines take part: 1 processes" in said()[0]
    wait_for(lambda: [entry.get("update") for entry in parse_records(said()[0])].count(16), said)
    launchers[1] = hosts[1].start(commands[1], folder)
    (folder / "joined").touch() if False else None
    wait_for(lambda: {"begun": 15, "world": 2, "steps": 1} in parse_records(said()[1]), said)
    (folder / "joined").touch()
    assert [launcher.wait(SLACK) for launcher in launchers] == [0, 0], said()
    assert alone.wait_for_processes() == []
    updates = {entry["update"]: entry for entry in [*before, *entries()] if "update" in entry}
    expected = {entry["update"]: entry for entry in whole if "update" in entry}
    assert sorted(updates) == sorted(expected) == list(range(1, NUM_UPDATES + 1))
    for number, entry in expected.items():
        assert sorted(updates[number]["seen"]) == sorted(entry["seen"]), number
        assert updates[number]["loss"] == pytest.approx(entry["loss"], rel=1e-4), number
    weights = next(entry["weights"] for entry in entries() if "weights" in entry)
    assert weights == pytest.approx(next(entry["weights"] for entry in whole if "weights" in entry), rel=1e-4, abs=1e-6)


def test_broken_link_loses_only_updates_after_the_last_checkpoint(hosts: Sequence[Host], tmp_path: Path) -> None:
    whole = run_reference(tmp_path / "whole")
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    words = f"headway launch -n 2 --cpu --num_machines 2 --machine_timeout 5 --main_process_ip {hosts[0].address}"

    def begin() -> list[subprocess.Popen[bytes]]:
        port = free_port()
        line = f"exec {words} --main_process_port {port}"
        return [host.start(f"{line} --machine_rank {rank} train.py 1 waits", folder) for rank, host in enumerate(hosts)]

    def said() -> str:
        return "\n".join((folder / f"{host.name}.txt").read_text() for host in hosts)

    launchers = begin()
    wait_for(lambda: any(entry.get("update") == 7 for entry in parse_records(said())), said)
    before = parse_records(said())
    hosts[1].set_link("down")
    assert all(launcher.wait(SLACK) for launcher in launchers), said()
    hosts[1].set_link("up")
    (folder / "killed").touch()
    (folder / "joined").touch()
    assert [launcher.wait(SLACK) for launcher in begin()] == [0, 0], said()
    after = parse_records(said())
    assert after.count({"begun": 6, "world": 2, "steps": 1}) == 2
    updates = {entry["update"]: entry for entry in [*before, *after] if "update" in entry}
    expected = {entry["update"]: entry for entry in whole if "update" in entry}
    assert sorted(updates) == sorted(expected)
    assert all(sorted(updates[number]["seen"]) == sorted(entry["seen"]) for number, entry in expected.items())
    weights = next(entry["weights"] for entry in after if "weights" in entry)
    assert weights == pytest.approx(next(entry["weights"] for entry in whole if "weights" in entry), rel=1e-4, abs=1e-6)
