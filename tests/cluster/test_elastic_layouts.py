"""Machines die during a run with a sharded model: it continues on the remaining ones, in a layout that fits their number.

`HEADWAY_LAYOUTS="fsdp hsdp=2" pytest tests/cluster/test_elastic_layouts.py` tries other layouts.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, find_obstacle, network
from tests.cluster.test_elastic import SLACK, parse_records, wait_for
from tests.distributed.ranks import free_port

LAYOUTS = os.environ.get("HEADWAY_LAYOUTS", "fsdp+tp=2").split()
BECOMES = {"fsdp+tp=2": "fsdp=3 (3 shards)", "hsdp=2": "fsdp=3 (3 shards)"}
NUM_UPDATES = 16
KILLS = {5: 3, 11: 2}
"""{update number: index of the machine that is killed at this update, which is also the number of machines that remain}."""

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, TensorParallelOptions, set_seed

def tell(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

set_seed(0)
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, global_batch_size=12,
                          kwargs_handlers=[TensorParallelOptions(plan={"*.up": "colwise", "*.down": "rowwise"})])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), Block(), Block(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
x = torch.randn(48, 4)
data = TensorDataset(torch.arange(48), x, x.sum(1, keepdim=True))
torch.manual_seed(1)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(2)
loader = accelerator.prepare(DataLoader(data, batch_size=3, shuffle=True))
accelerator.resume("latest")
mesh = accelerator.torch_device_mesh
sizes = {} if mesh is None else {axis: mesh[axis].size() for axis in mesh.mesh_dim_names if mesh[axis].size() > 1}
tell(begun=accelerator.num_updates, world=accelerator.num_processes, layout=sizes)
for epoch in accelerator.epochs(4):
    seen, losses = [], []
    for index, inputs, targets in loader:
        with accelerator.accumulate(model):
            each = (model(inputs) - targets).square().mean(1)
            accelerator.backward(each.mean())
            optimizer.step()
            optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(index).tolist()
        losses += accelerator.gather_for_metrics(each.detach()).tolist()
        if accelerator.sync_gradients:
            if accelerator.is_main_process:
                tell(update=accelerator.num_updates, seen=seen, loss=sum(losses) / len(losses))
            seen, losses = [], []
            if accelerator.num_updates % 4 == 0:
                accelerator.save_state()
            mark = f"killed {accelerator.num_updates}"
            while mark[7:] in sys.argv[1:] and not Path(mark).exists():
                time.sleep(0.05)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    reason = find_obstacle()
    if reason:
        pytest.skip(reason)
    with network(4) as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, dict]:
    """Return the records of an uninterrupted run on one process, keyed by update number."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.py").write_text(PROGRAM)
    result = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=SLACK)
    assert result.returncode == 0, result.stderr
    return {entry["update"]: entry for entry in parse_records(result.stdout) if "update" in entry}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_model_continues_on_the_remaining_machines(layout, hosts, whole, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = f"headway launch -n 4 --cpu --num_machines 4 --min_machines 2 --max_restarts 2 --strategy {layout}"
    where = f"--machine_timeout 5 --main_process_ip {hosts[0].address} --main_process_port {free_port()}"
    waits = " ".join(map(str, KILLS))

    def said(host: int = 0) -> str:
        return (tmp_path / f"{hosts[host].name}.txt").read_text()

    launchers = [host.start(f"exec {words} {where} --machine_rank {rank} train.py {waits}", tmp_path)
                 for rank, host in enumerate(hosts)]  # fmt: skip
    if layout in BECOMES:
        notice = (
            f"with 3 of 4 machines: layout {layout} of 4 ranks does not fit 3: the run continues with {BECOMES[layout]}"
        )
        wait_for(lambda: notice in said(), said)
    for update, left in KILLS.items():
        wait_for(lambda update=update: any(entry.get("update") == update for entry in parse_records(said())), said)
        hosts[left].send(signal.SIGKILL)
        (tmp_path / f"killed {update}").touch()
    assert [launcher.wait(2 * SLACK) for launcher in launchers[:2]] == [0, 0], said()
    begun = [entry for entry in parse_records(said()) if "begun" in entry]
    assert [(entry["world"], entry["begun"]) for entry in begun] == [(4, 0), (3, 4), (2, 8)], begun
    layouts = [entry["layout"] for entry in begun]
    assert layouts == {
        "fsdp+tp=2": [{"shard": 2, "tp": 2}, {"shard": 3}, {"tp": 2}],
        "hsdp=2": [{"replicate": 2, "shard": 2}, {"shard": 3}, {"shard": 2}],
        "fsdp": [{"shard": 4}, {"shard": 3}, {"shard": 2}],
    }.get(layout, layouts)
    updates = {entry["update"]: entry for entry in parse_records(said()) if "update" in entry}
    assert sorted(updates) == sorted(whole) == list(range(1, NUM_UPDATES + 1))
    for number, entry in whole.items():
        assert sorted(updates[number]["seen"]) == sorted(entry["seen"]), number
        assert updates[number]["loss"] == pytest.approx(entry["loss"], rel=1e-5, abs=1e-6), number
    print(json.dumps({"largest": max(abs(updates[n]["loss"] - whole[n]["loss"]) / whole[n]["loss"] for n in whole)}))
