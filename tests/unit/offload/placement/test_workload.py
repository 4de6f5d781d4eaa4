"""Test declared workloads: caches and activations are counted, and space is left for them."""

import pytest
import torch
from torch import nn

from headway import Workload, compute_module_sizes, infer_auto_device_map, init_empty_weights
from headway.errors import ConfigError, DeviceMapError
from headway.offload.placement.workload import measure_demands
from tests.unit.offload.placement.models import MODELS, build_model

INPUTS = {"vit": {"pixel_values": torch.empty(2, 3, 32, 32)}}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_can_be_measured(name):
    with init_empty_weights():
        model = build_model(name)
    found = infer_auto_device_map(
        model, {0: "1GB"}, model._no_split_modules, workload=Workload(2, 64, inputs=INPUTS.get(name))
    )
    row = found.plan.row(0)
    assert row.activations > 0
    assert all(parameter.is_meta for parameter in model.parameters())
    # Keys and values of four layers. Each layer of T5's decoder also keeps those of the encoder's output.
    cache = {"mixtral": 2 * 4 * 2 * 64 * 32 * 4, "t5": 2 * 2 * 4 * 2 * 64 * 64 * 4, "vit": 0}
    assert row.cache == cache.get(name, 2 * 4 * 2 * 64 * 64 * 4)
    # Logits are returned to the caller, and part of the peak.
    outputs = {"vit": 2 * 17 * 64 * 4 + 2 * 64 * 4, "t5": 2 * 64 * 100 * 4 + 2 * 64 * 64 * 4}
    assert row.activations >= outputs.get(name, 2 * 64 * 100 * 4)


def test_cache_grows_with_the_workload_and_can_be_disabled():
    with init_empty_weights():
        model = build_model("llama")
    names = [f"model.layers.{i}" for i in range(4)]

    def measure_cache(**options):
        found = measure_demands(model, [*names, "lm_head"], Workload(**options))
        return [found[name][0] for name in names]

    one = measure_cache(batch_size=1, num_tokens=16)
    assert one == [2 * 16 * 64 * 4] * 4
    assert measure_cache(batch_size=3, num_tokens=16) == [3 * size for size in one]
    assert measure_cache(batch_size=1, num_tokens=32, dtype="bfloat16") == one
    assert sum(measure_cache(batch_size=1, num_tokens=16, use_cache=False)) == 0
    loaded = infer_auto_device_map(
        model, {0: "1GB"}, model._no_split_modules, dtype="bfloat16", workload=Workload(1, 16)
    )
    assert loaded.plan.row(0).cache == sum(one) // 2


def test_plan_leaves_space_for_the_memory_of_a_real_forward():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.linear(x) + (x * 2)

    model = nn.Sequential(*(Stage() for _ in range(4)))
    inputs = {"input": torch.empty(100, 8)}
    needs = measure_demands(model, ["0", "1", "2", "3"], Workload(inputs=inputs))
    row = 100 * 8 * 4
    # x, linear(x), x * 2 and their sum. The x of the first stage belongs to the caller.
    assert [needs[name][1] for name in "012"] == [3 * row, 4 * row, 4 * row]
    size = compute_module_sizes(model)["0"]
    fits = infer_auto_device_map(model, {0: 2 * size, 1: 2 * size})
    assert list(fits.values()) == [0, 0, 1, 1]
    full = infer_auto_device_map(
        model, {0: 2 * size + 4 * row, 1: 2 * size + 4 * row}, "Stage", workload=Workload(inputs=inputs)
    )
    assert list(full.values()) == [0, 0, 1, 1]
    assert full.plan.headroom(0) == full.plan.headroom(1) == 0
    with pytest.raises(DeviceMapError):
        infer_auto_device_map(model, {"cpu": 4 * size}, "Stage", workload=Workload(inputs=inputs))


def test_modes_are_restored():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].eval()
    measure_demands(model, ["0", "1"], Workload(inputs={"input": torch.ones(1, 2)}))
    assert (model.training, model[0].training, model[1].training) == (True, False, True)
    assert not model[0]._forward_hooks
    assert not model[0].weight.is_meta


def test_model_that_cannot_be_measured_is_reported():
    class Reads(nn.Module):
        def forward(self, input_ids):
            return input_ids.nonzero()

    with pytest.raises(DeviceMapError, match="Reads does not run on the meta device with input_ids"):
        measure_demands(Reads(), [""], Workload(1, 2))
    with pytest.raises(ConfigError, match="batch_size=0"):
        Workload(batch_size=0)
