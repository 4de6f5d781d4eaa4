"""Homes: where each tensor of a model stays by its device map."""

import pytest
import torch
from torch import nn

from headway.errors import DeviceMapError
from headway.offload.placement.device_map import (
    CPU,
    DISK,
    DeviceMap,
    Placement,
    compute_device,
    home_of,
    resolve_device_map,
    settle,
)

MPS = torch.device("mps")


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)})


def test_buffers_of_offloaded_parts_stay_where_they_run():
    settled = settle(model(), DeviceMap({"a": "disk", "b": "cpu", "c": "disk"}))
    assert settled.main == CPU
    buffers = ("a.running_mean", "a.running_var", "a.num_batches_tracked")
    assert {settled.homes[name] for name in buffers} == {CPU}
    assert (settled.homes["a.weight"], settled.homes["b.weight"]) == (DISK, CPU)
    kept = settle(model(), DeviceMap({"": "disk"}), offload_buffers=True)
    assert {kept.homes[name] for name in buffers} == {DISK}


def test_a_tied_tensor_has_one_home():
    tied = model()
    tied["c"].weight = tied["b"].weight
    settled = settle(tied, DeviceMap({"a": "cpu", "b": "disk", "c": "cpu"}))
    assert settled.homes["b.weight"] == settled.homes["c.weight"] == DISK


def test_the_devices_that_compute():
    settled = Placement(DeviceMap({"a": "disk", "b": "mps", "c": "cpu"}), MPS, {})
    assert settled.devices() == {MPS}
    assert [settled.runs_on(name) for name in "abc"] == [MPS] * 3
    assert Placement(DeviceMap({"": "disk"}), CPU, {}).devices() == set()


def test_what_cannot_compute_here_is_refused():
    for absent in ("disk", 99, "cuda:99"):
        with pytest.raises(DeviceMapError, match=r"^main_device=.* cannot compute here: this machine has"):
            settle(model(), DeviceMap({"": "cpu"}), absent)
    assert compute_device("cpu", "main_device") == home_of("cpu") == CPU


@pytest.mark.parametrize("given", ["meta", {"": "meta"}])
def test_meta_is_no_home(given):
    with pytest.raises(DeviceMapError, match="'meta' holds no values; give 'cpu', 'disk' or an accelerator"):
        resolve_device_map(model(), given)
