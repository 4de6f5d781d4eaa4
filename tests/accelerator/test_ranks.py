"""Two launched ranks, each with its own toy device, which the launcher finds through the installed entry point."""

import json
from pathlib import Path

from tests.accelerator.runs import needs_compiler, run

pytestmark = needs_compiler

_LOOP = """
import json
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, DistributedDataParallelKwargs, set_seed

accelerator = Accelerator()
device = accelerator.device
set_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(4, (32,))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for inputs, targets in loader:
    assert inputs.device == device
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss).mean().item())
assert {parameter.device for parameter in model.parameters()} == {device}
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
both = accelerator.gather(weights[None])
assert both.device == device and torch.equal(both[0], both[1])
devices = accelerator.collectives.gather_objects(str(device))
accelerator.save_state("saved")
accelerator.load_state("saved")
if accelerator.is_main_process:
    print(json.dumps([losses, devices]))
accelerator.end_training()
"""


def _launch_loop(folder: Path, *flags: str, **more: str) -> tuple[list[float], list[str]]:
    (folder / "loop.py").write_text(_LOOP)
    output = run(folder, "-m", "headway", "launch", *flags, "loop.py", **more)
    losses, devices = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    return losses, devices


def test_launch_uses_both_devices_and_matches_two_cpu_ranks(tmp_path: Path) -> None:
    losses, devices = _launch_loop(tmp_path)
    assert devices == ["toy:0", "toy:1"]
    on_cpu, devices = _launch_loop(tmp_path, "-n", "2", "--cpu")
    assert devices == ["cpu", "cpu"]
    assert losses == on_cpu


def test_missing_process_group_backend_is_explained(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(_LOOP)
    output = run(tmp_path, "-m", "headway", "launch", "loop.py", code=1, TOY_WITHOUT="group")
    assert "UnsupportedError: torch.distributed has no default backend for tensors on toy devices" in output
    assert "InitProcessGroupKwargs(backend='cpu:gloo,toy:<backend>')" in output


def test_more_ranks_than_devices_are_refused(tmp_path: Path) -> None:
    output = run(tmp_path, "-m", "headway", "launch", "-n", "3", "-m", "json.tool", code=2)
    assert "3 processes per machine" in output
    assert "has 2 (toy)" in output


def test_gpu_ids_are_refused_if_the_visibility_variable_is_unknown(tmp_path: Path) -> None:
    output = run(tmp_path, "-m", "headway", "launch", "--gpu_ids", "1", "-m", "json.tool", code=2)
    assert "does not know which variable hides toy devices from a process" in output


def test_env_and_doctor_list_the_toy_devices(tmp_path: Path) -> None:
    assert "2 x toy (0, 1)" in run(tmp_path, "-m", "headway", "env")
    output = run(tmp_path, "-m", "headway", "doctor")
    assert "2 x toy (0, 1)" in output
    assert "all-reduce" in output


def test_selfcheck_passes_on_the_toy_device(tmp_path: Path) -> None:
    output = run(tmp_path, "-m", "headway", "test")
    assert "2 processes, toy, precision no" in output
