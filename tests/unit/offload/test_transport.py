"""Test weights in pinned memory. Ordinary memory replaces it, because pinning needs an accelerator."""

import copy

import pytest
import torch
from torch import nn

from headway.offload import pinning
from headway.offload.execution import Execution
from headway.offload.pinning import pin_tensors
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.storage_devices import Placement
from headway.offload.transport import RingTransport
from tests.unit.offload.simulated import SimulatedLane
from tests.unit.offload.test_stream import CPU, INPUTS, ReusedBlocks

LIMIT = 1 << 40


def allocate_ordinary(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_pinned_tensors_keep_identity_and_values():
    model = ReusedBlocks().to(torch.bfloat16)
    model.register_buffer("count", torch.tensor(7))
    tensors = [*model.parameters(), *model.buffers()]
    before, whole = (
        [(id(tensor), tensor.detach().clone()) for tensor in tensors],
        sum(tensor.nbytes for tensor in set(tensors)),
    )
    assert pin_tensors([*tensors, tensors[0]], LIMIT, allocate_ordinary) == whole
    for tensor, (key, value) in zip(tensors, before, strict=True):
        assert id(tensor) == key
        assert torch.equal(tensor, value)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)


def test_tensors_that_cannot_move_stay():
    base = torch.randn(4, 4)
    kept = [nn.Parameter(base), nn.Parameter(base[2:]), nn.Parameter(torch.randn(4, 6).t()), torch.zeros(0)]
    at = [tensor.data_ptr() for tensor in kept]
    assert pin_tensors(kept, LIMIT, allocate_ordinary) == 0
    assert [tensor.data_ptr() for tensor in kept] == at


def test_limit_holds_and_the_first_tensors_are_pinned():
    tensors = [torch.randn(64) for _ in range(10)]
    assert pin_tensors(tensors, 1100, allocate_ordinary) == 4 * 256
    assert pin_tensors([torch.randn(64)], 100, allocate_ordinary) == 0


def test_failure_to_pin_causes_one_warning(caplog):
    tensors = [torch.randn(2048) for _ in range(5)]
    given = iter([allocate_ordinary, None])

    def allocate(num_bytes):
        if (make := next(given)) is None:
            raise RuntimeError("CUDA error: invalid argument")
        return make(num_bytes)

    assert pin_tensors(tensors, LIMIT, allocate) == 4 * 2048 * 4
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        "only 32.0 KiB of 40.0 KiB of offloaded weights could be pinned (CUDA error: invalid argument)" in caplog.text
    )


def test_tensors_in_memory_are_pinned_and_those_on_disk_are_not(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = dict(model.named_parameters())
    storage_devices = {name: CPU if name.startswith("0") else "disk" for name in names}
    lane = SimulatedLane()
    asked = []
    monkeypatch.setattr(
        pinning, "measure_available_memory", lambda: asked.append(1) or 1 << 30
    )  # the result must not depend on the machine
    Execution(model, Placement(DeviceMap({"0": "cpu", "1": "disk"}), CPU, storage_devices), [], [], RingTransport(lane))
    assert asked
    assert {name: lane.is_pinned(tensor) for name, tensor in names.items()} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False
    }  # fmt: skip
    assert torch.equal(copy.deepcopy(model)(INPUTS), model(INPUTS))


@pytest.mark.parametrize(("num_local", "expected"), [("1", 100 + 24), ("4", 25 + 24)])
def test_limit_is_half_of_the_memory_for_this_process(monkeypatch, num_local, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_local)
    monkeypatch.setattr(pinning, "measure_available_memory", lambda: 100 * 64)
    assert pinning.compute_pin_limit([torch.zeros(24, 16)]) == expected * 64 // 2
