"""Test storage devices: the device on which each tensor of a model stays according to its device map."""

import pytest
import torch
from torch import nn

from headway.errors import DeviceMapError
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.storage_devices import (
    CPU,
    DISK,
    Placement,
    get_storage_device,
    make_placement,
    resolve_compute_device,
)

MPS = torch.device("mps")


def build_model() -> nn.Module:
    return nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)})


def test_buffers_of_offloaded_modules_stay_where_they_run():
    settled = make_placement(build_model(), DeviceMap({"a": "disk", "b": "cpu", "c": "disk"}))
    assert settled.main == CPU
    buffers = ("a.running_mean", "a.running_var", "a.num_batches_tracked")
    assert {settled.storage_devices[name] for name in buffers} == {CPU}
    assert (settled.storage_devices["a.weight"], settled.storage_devices["b.weight"]) == (DISK, CPU)
    kept = make_placement(build_model(), DeviceMap({"": "disk"}), offload_buffers=True)
    assert {kept.storage_devices[name] for name in buffers} == {DISK}


def test_tied_tensor_has_one_storage_device():
    tied = build_model()
    tied["c"].weight = tied["b"].weight
    settled = make_placement(tied, DeviceMap({"a": "cpu", "b": "disk", "c": "cpu"}))
    assert settled.storage_devices["b.weight"] == settled.storage_devices["c.weight"] == DISK


def test_devices_that_compute():
    settled = Placement(DeviceMap({"a": "disk", "b": "mps", "c": "cpu"}), MPS, {})
    assert settled.list_devices() == {MPS}
    assert [settled.get_run_device(name) for name in "abc"] == [MPS] * 3
    assert Placement(DeviceMap({"": "disk"}), CPU, {}).list_devices() == set()


def test_device_that_cannot_compute_is_refused():
    for absent in ("disk", 99, "cuda:99"):
        with pytest.raises(DeviceMapError, match=r"^main_device=.* cannot run the model: this machine has"):
            make_placement(build_model(), DeviceMap({"": "cpu"}), absent)
    assert resolve_compute_device("cpu", "main_device") == get_storage_device("cpu") == CPU


@pytest.mark.parametrize("given", ["meta", {"": "meta"}])
def test_meta_is_no_storage_device(given):
    with pytest.raises(DeviceMapError, match="'meta' devices have no values; give 'cpu', 'disk' or an accelerator"):
        resolve_device_map(build_model(), given)
