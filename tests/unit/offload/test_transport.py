"""Test weights in pinned memory. Ordinary memory replaces it, because pinning needs an accelerator."""

import copy

import pytest
import torch
from torch import nn

from headway.offload import pinning
from headway.offload.execution import Execution
from headway.offload.pinning import pin_tensors
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.homes import Placement
from headway.offload.transport import RingTransport
from tests.unit.offload.simulated import SimulatedLane
from tests.unit.offload.test_stream import CPU, INPUTS, ReusedBlocks

LIMIT = 1 << 40


def allocate_ordinary(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_pinned_tensors_keep_identity_and_values():
    model = ReusedBlocks().to(torch.bfloat16)
    model.register_buffer("count", torch.tensor(7))
    homes = [*model.parameters(), *model.buffers()]
    before, whole = [(id(home), home.detach().clone()) for home in homes], sum(home.nbytes for home in set(homes))
    assert pin_tensors([*homes, homes[0]], LIMIT, allocate_ordinary) == whole
    for home, (key, value) in zip(homes, before, strict=True):
        assert id(home) == key
        assert torch.equal(home, value)
    assert len({home.untyped_storage().data_ptr() for home in homes}) < len(homes)


def test_tensors_that_cannot_move_stay():
    base = torch.randn(4, 4)
    kept = [nn.Parameter(base), nn.Parameter(base[2:]), nn.Parameter(torch.randn(4, 6).t()), torch.zeros(0)]
    at = [home.data_ptr() for home in kept]
    assert pin_tensors(kept, LIMIT, allocate_ordinary) == 0
    assert [home.data_ptr() for home in kept] == at


def test_limit_holds_and_the_first_tensors_are_pinned():
    homes = [torch.randn(64) for _ in range(10)]
    assert pin_tensors(homes, 1100, allocate_ordinary) == 4 * 256
    assert pin_tensors([torch.randn(64)], 100, allocate_ordinary) == 0


def test_failure_to_pin_causes_one_warning(caplog):
    homes = [torch.randn(2048) for _ in range(5)]
    given = iter([allocate_ordinary, None])

    def allocate(num_bytes):
        if (make := next(given)) is None:
            raise RuntimeError("CUDA error: invalid argument")
        return make(num_bytes)

    assert pin_tensors(homes, LIMIT, allocate) == 4 * 2048 * 4
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        "only 32.0 KiB of 40.0 KiB of offloaded weights could be pinned (CUDA error: invalid argument)" in caplog.text
    )


def test_tensors_in_memory_are_pinned_and_those_on_disk_are_not(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = dict(model.named_parameters())
    homes = {name: CPU if name.startswith("0") else "disk" for name in names}
    lane = SimulatedLane()
    asked = []
    monkeypatch.setattr(
        pinning, "measure_available_memory", lambda: asked.append(1) or 1 << 30
    )  # the result must not depend on the machine
    Execution(model, Placement(DeviceMap({"0": "cpu", "1": "disk"}), CPU, homes), [], [], RingTransport(lane))
    assert asked
    assert {name: lane.is_pinned(tensor) for name, tensor in names.items()} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False
    }  # fmt: skip
    assert torch.equal(copy.deepcopy(model)(INPUTS), model(INPUTS))


@pytest.mark.parametrize(("num_local", "wanted"), [("1", 100 + 24), ("4", 25 + 24)])
def test_limit_is_half_of_the_memory_for_this_process(monkeypatch, num_local, wanted):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_local)
    monkeypatch.setattr(pinning, "measure_available_memory", lambda: 100 * 64)
    assert pinning.compute_pin_limit([torch.zeros(24, 16)]) == wanted * 64 // 2
