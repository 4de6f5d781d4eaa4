"""Test dispatching models: placement, refused maps, and results equal to the whole model."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headway import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from headway.core.weights.export import save_weights
from headway.core.weights.locations import is_mapped
from headway.errors import CheckpointError, ConfigError, DeviceMapError


def build_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)).eval()
    model[2].weight = model[0].weight
    return model


def build_meta_model():
    with init_empty_weights():
        return build_model()


INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
MAPS = [
    {"": "cpu"},
    {"": "disk"},
    {"0": "cpu", "1": "disk", "2": "disk"},
    {"0": "disk", "1.0": "cpu", "1.1": "disk", "2": "cpu"},
]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_model_in_memory_is_dispatched_twice(tmp_path, device_map):
    whole, model = build_model(), build_model()
    for _ in range(2):
        assert dispatch_model(model, device_map, offload_dir=tmp_path / "offload") is model
        assert model.hf_device_map == device_map
        assert torch.equal(model(INPUTS), whole(INPUTS))
        assert model[2].weight is model[0].weight
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_only_modules_on_disk_get_hooks(tmp_path):
    model = dispatch_model(build_model(), {"0": "cpu", "1": "disk", "2": "cpu"}, offload_dir=tmp_path)
    assert not model[0]._forward_pre_hooks
    assert model[1][0]._forward_pre_hooks
    assert load_file(tmp_path / "offloaded.safetensors").keys() == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}
    assert is_mapped(model[1][0].weight)
    assert not dispatch_model(build_model(), {"": "cpu"})._forward_pre_hooks
    assert dispatch_model(build_model(), {"": "cpu"}, force_hooks=True)(INPUTS) is not None


def test_folder_of_another_model_is_refused(tmp_path):
    disk_offload(build_model(0), tmp_path)
    again = disk_offload(build_model(0), tmp_path)
    assert torch.equal(again(INPUTS), build_model(0)(INPUTS))
    other = build_model(1)
    with pytest.raises(ConfigError, match=r"weights of another model.*values of 0\.weight differ"):
        disk_offload(other, tmp_path)
    assert torch.equal(other(INPUTS), build_model(1)(INPUTS))
    with pytest.raises(ConfigError, match="another model"):
        disk_offload(nn.Linear(2, 2), tmp_path)
    # A model without values, with the same names and shapes, gets those of the folder.
    assert torch.equal(disk_offload(build_meta_model(), tmp_path)[0].weight, build_model(0)[0].weight)


def test_model_without_values_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tensors have no values: 0\.weight"):
        dispatch_model(build_meta_model(), {"": "cpu"})
    with pytest.raises(ConfigError, match="have no values"):
        disk_offload(build_meta_model(), tmp_path)
    with pytest.raises(ConfigError, match="give an offload folder"):
        dispatch_model(build_model(), {"": "disk"})
    with pytest.raises(DeviceMapError, match="accelerator"):
        dispatch_model(build_model(), {"": 7})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        disk_offload(build_model(), tmp_path / "file")


def test_offloaded_values_come_from_a_state_dict_or_an_index(tmp_path):
    whole = build_model()
    model = cpu_offload(build_meta_model(), state_dict=whole.state_dict())
    assert torch.equal(model[0](INPUTS), whole[0](INPUTS))
    save_file({f"x.{name}": t.clone() for name, t in whole.state_dict().items()}, tmp_path / "x.safetensors")
    index = {
        name: {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": f"x.{name}", "dtype": "float32"}
        for name in whole.state_dict()
    }
    model = dispatch_model(build_meta_model(), {"": "disk"}, offload_index=index)
    assert torch.equal(model[0](INPUTS), whole[0](INPUTS))
    assert is_mapped(model[0].weight)


def test_values_of_a_state_dict_must_fit_the_model():
    state = build_model().state_dict()
    name = "0.weight"
    with pytest.raises(CheckpointError, match=f"{name} is .3. torch.float32 in the state dict"):
        cpu_offload(build_meta_model(), state_dict={**state, name: torch.ones(3)})
    model = cpu_offload(build_meta_model(), state_dict={key: value.half() for key, value in state.items()})
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


def test_refused_device_map_leaves_the_model_dispatched(tmp_path):
    model = disk_offload(build_model(), tmp_path)
    with pytest.raises(DeviceMapError):
        dispatch_model(model, {"no such part": "cpu"})
    assert model.hf_device_map == {"": "disk"}
    assert model[0]._forward_pre_hooks


def test_saving_an_offloaded_model_saves_its_values(tmp_path):
    whole = build_model()
    save_weights(whole.state_dict().items(), tmp_path / "a", "60B")
    model = load_checkpoint_and_dispatch(build_meta_model(), tmp_path / "a", {"0": "cpu", "1": "disk", "2": "disk"})
    model(INPUTS)
    save_weights(model.state_dict().items(), tmp_path / "b", "1GB")
    other = build_meta_model()
    load_checkpoint_in_model(other, tmp_path / "b", strict=True)
    assert torch.equal(other(INPUTS), whole(INPUTS))
    # also over the files that it uses
    save_weights(model.state_dict().items(), tmp_path / "a", "60B")
    assert torch.equal(model(INPUTS), whole(INPUTS))


def test_adapter_is_trained_on_weights_in_files(tmp_path):
    results = []
    for device_map in (None, {"": "disk"}):
        model = build_model().requires_grad_(False)
        if device_map:
            disk_offload(model, tmp_path)
        torch.manual_seed(5)
        adapter = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(adapter.parameters(), lr=0.1)
        for _ in range(3):
            model(adapter(INPUTS)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(adapter.weight.detach())
    assert torch.equal(*results)


def test_incomplete_write_is_an_error_and_replaces_nothing(tmp_path, monkeypatch):
    from headway.core.weights.parallel_writer import ParallelWriter
    from headway.errors import CheckpointError

    save_weights([("a", torch.zeros(2))], tmp_path, "1GB")

    real = ParallelWriter.write

    def write_damaged(writer, path, specs, values, *args, on_written):
        def change(file):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            on_written(file)

        return real(writer, path, specs, values, *args, on_written=change)

    monkeypatch.setattr(ParallelWriter, "write", write_damaged)
    with pytest.raises(CheckpointError, match="does not contain what was written"):
        save_weights([("a", torch.ones(2))], tmp_path, "1GB")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0.0, 0.0]
