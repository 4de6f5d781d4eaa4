"""The toy accelerator itself: torch accepts it as an accelerator, and its results equal those of the CPU."""

from pathlib import Path

from tests.accelerator.runs import needs_compiler, run_script

pytestmark = needs_compiler

_SCRIPT = """
import pytest, torch

assert str(torch.accelerator.current_accelerator(check_available=True)) == "toy"
assert torch.accelerator.device_count() == 2

def losses(device):
    torch.manual_seed(0)
    layers = torch.nn.Embedding(10, 16), torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.arange(10).to(device)
    found = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(rows), rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

assert losses("cpu") == losses("toy") == losses("toy:1")

with pytest.raises(RuntimeError, match="two devices, toy:0 and toy:1"):
    torch.ones(2, device="toy:0") + torch.ones(2, device="toy:1")
with pytest.raises(RuntimeError, match="same device"):
    torch.ones(2, device="toy:0") + torch.ones(2)

torch.manual_seed(5)
first = torch.rand(3, device="toy:1")
state = torch.toy.get_rng_state("toy:1")
second = torch.rand(3, device="toy:1")
torch.toy.set_rng_state(state, "toy:1")
assert torch.equal(torch.rand(3, device="toy:1"), second)
torch.manual_seed(5)
assert torch.equal(torch.rand(3, device="toy:1"), first)

torch.toy.forget_waits()
on_device = torch.ones(4).pin_memory().to("toy", non_blocking=True)
assert set(torch.toy.waits().values()) == {0}
on_device.sum().item(), on_device[on_device > 0], on_device.cpu(), torch.ones(4).to("toy")
torch.accelerator.current_stream().synchronize()
assert torch.toy.waits() == {"synchronize": 1, "scalar": 1, "to_host": 1, "from_host": 1, "shape": 1}
torch.toy.trap_waits()
with pytest.raises(RuntimeError, match="the host waits for the device"):
    on_device.sum().item()
torch.toy.trap_waits(False)

before = torch.accelerator.memory_allocated()
big = torch.empty(1 << 20, device="toy")
assert torch.accelerator.memory_allocated() == before + (4 << 20)
del big
assert torch.accelerator.memory_allocated() == before
with pytest.raises(torch.OutOfMemoryError, match="toy out of memory"):
    torch.empty(1 << 26, device="toy")
"""


def test_torch_accepts_the_toy_device_and_its_results_match_the_cpu(tmp_path: Path) -> None:
    run_script(tmp_path, _SCRIPT, TOY_MEMORY=str(1 << 27))
