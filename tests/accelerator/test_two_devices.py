"""One process that dispatches a model over two toy devices by memory budgets, and to main memory when they are full."""

from pathlib import Path

from tests.accelerator.runs import needs_compiler, run_script

pytestmark = needs_compiler

_MODEL = """
import torch
from torch import nn
from headway import Accelerator, dispatch_model, infer_auto_device_map, load_checkpoint_and_dispatch, init_empty_weights
from headway import cpu_offload, get_max_memory
from headway.errors import DeviceMapError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x

torch.manual_seed(0)
model = Net().eval()
rows = torch.randn(3, 64)
with torch.no_grad():
    expected = model(rows)
block = sum(p.nbytes for p in model.blocks[0].parameters())
"""


def test_model_is_dispatched_over_both_devices_by_budgets(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        _MODEL
        + """
from safetensors.torch import save_file
save_file(model.state_dict(), "model.safetensors")
budgets = {0: int(3.5 * block), "toy:1": int(2.5 * block), "cpu": "1GiB"}
with init_empty_weights():
    empty = Net()
placed = load_checkpoint_and_dispatch(empty, "model.safetensors", device_map="auto", max_memory=budgets).eval()
places = [str(each.weight.device) for each in placed.blocks]
assert set(places) == {"toy:0", "toy:1", "cpu"}, places
assert places == sorted(places, key=["toy:0", "toy:1", "cpu"].index), places
torch.toy.forget_waits()
with torch.no_grad():
    found = placed(rows)
assert str(found.device) == "cpu", found.device  # beside the inputs
assert torch.equal(found, expected)

whole = {str(p.device) for p in dispatch_model(Net(), {"": 1}).parameters()}
assert whole == {"toy:1"}
offloaded = cpu_offload(model)
with torch.no_grad():
    assert torch.equal(offloaded(rows).cpu(), expected)
""",
    )


def test_budgets_are_the_free_memory_of_each_device(tmp_path: Path) -> None:
    script = (
        _MODEL
        + """
found = get_max_memory()
print({name: size for name, size in found.items() if name != "cpu"}, "cpu" in found)
try:
    dispatch_model(model, {"": "toy:2"})
except DeviceMapError as error:
    print(error)
"""
    )
    output = run_script(tmp_path, script, TOY_MEMORY=str(1 << 20))
    assert "{0: 1048576, 1: 1048576} True" in output
    assert "the device map uses accelerator 2; this machine has toy 0 to 1" in output
    output = run_script(tmp_path, script, TOY_PLAIN="1", TOY_WITHOUT="mem_get_info")
    assert "{} True" in output
    assert "toy devices do not report how much memory is free, so no part of a model is placed on them" in output
