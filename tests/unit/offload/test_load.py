"""Test loading weights: names are checked first, a load is all or nothing, and mapped files never change."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headway import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from headway.core.weights.locations import is_mapped
from headway.errors import CheckpointError, ConfigError, DeviceMapError, UnsupportedError


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))) * self.scale


def save_net(folder, model=None, **changes):
    torch.manual_seed(1)
    model = model or Net().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    state |= changes
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    return model


def build_empty_net(width=4):
    with init_empty_weights():
        return Net(width).eval()


IDS = torch.tensor([0, 3, 5])


def test_empty_model_uses_the_file_as_its_memory(tmp_path):
    whole, model = save_net(tmp_path), build_empty_net()
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model(IDS), whole(IDS))
    assert all(is_mapped(parameter) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(model.embed.weight, nn.Parameter)


def test_training_changes_memory_and_never_the_file(tmp_path):
    whole, model = save_net(tmp_path), build_empty_net()
    content = (tmp_path / "model.safetensors").read_bytes()
    load_checkpoint_in_model(model, tmp_path)
    for each in (whole, model):
        optimizer = torch.optim.AdamW(each.train().parameters(), lr=0.1)
        for _ in range(3):
            each(IDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        each.eval()
    assert torch.equal(model(IDS), whole(IDS))
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert torch.equal(load_empty_net(tmp_path).embed.weight, load_file(tmp_path / "model.safetensors")["embed.weight"])


def load_empty_net(folder):
    model = build_empty_net()
    load_checkpoint_in_model(model, folder)
    return model


def test_model_with_values_keeps_its_parameters(tmp_path):
    whole, model = save_net(tmp_path), Net().eval()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_checkpoint_in_model(model, tmp_path)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert torch.equal(model(IDS), whole(IDS))
    model(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(model(IDS), whole(IDS))


def test_dtypes_are_converted(tmp_path):
    whole, model = save_net(tmp_path), build_empty_net()
    load_checkpoint_in_model(model, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["embed"])
    assert model.embed.weight.dtype == torch.float32
    assert model.body[0].weight.dtype == torch.bfloat16
    assert model.body[1].num_batches_tracked.dtype == torch.int64
    assert torch.equal(model.body[0].weight, whole.body[0].weight.to(torch.bfloat16))
    half = build_empty_net().half()
    load_checkpoint_in_model(half, tmp_path)
    assert half.body[0].weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="estimates only"):
        load_checkpoint_in_model(model, tmp_path, dtype="int4")
    with pytest.raises(UnsupportedError, match="offload_8bit_bnb"):
        load_checkpoint_in_model(model, tmp_path, offload_8bit_bnb=True)


def assert_refused(model, folder, words, **more):
    before = {name: (id(tensor), tensor.device) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(CheckpointError, match=words) as exc_info:
        load_checkpoint_in_model(model, folder, **more)
    assert {name: (id(t), t.device) for name, t in model.state_dict(keep_vars=True).items()} == before
    return str(exc_info.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_complex_values_are_not_loaded_into_a_real_tensor(tmp_path, dtype):
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(2, dtype=dtype))
    save_file({"table": torch.tensor([1 + 2j, 3])}, tmp_path / "model.safetensors")
    assert "Mismatched (1): table: [2] complex64 in the checkpoint" in assert_refused(
        model, tmp_path, "nothing was loaded"
    )


def test_everything_that_does_not_fit_is_reported_at_once_and_nothing_is_loaded(tmp_path):
    save_net(
        tmp_path, **{"body.0.weight": None, "body.0.wieght": torch.zeros(4, 4), "body.2.weight": torch.zeros(4, 5)}
    )
    told = assert_refused(build_empty_net(), tmp_path, "nothing was loaded")
    assert r"Missing from the checkpoint (1): body.0.weight (nearest: body.0.wieght)" in told
    assert "Mismatched (1): body.2.weight: [4, 5] float32 in the checkpoint, [4, 4] float32 in the model" in told
    assert "Without a place in the model (1): body.0.wieght (nearest: body.0.weight)" in told
    # The same with a device map, and for a model with values, so that no value stays by accident.
    assert_refused(build_empty_net(), tmp_path, "body.0.weight", device_map={"": "cpu"})
    assert_refused(Net(), tmp_path, "body.0.weight")


def test_strict_refuses_missing_and_unknown_tensors(tmp_path):
    save_net(tmp_path, **{"body.1.running_mean": None, "other": torch.zeros(1)})
    for device_map in (None, {"": "cpu"}):
        model = build_empty_net()
        load_checkpoint_in_model(model, tmp_path, device_map=device_map)
        assert torch.equal(model.body[1].running_mean, torch.zeros(4))
        told = assert_refused(build_empty_net(), tmp_path, "nothing was loaded", device_map=device_map, strict=True)
        assert "body.1.running_mean" in told
        assert "other" in told


def test_buffers_that_no_checkpoint_contains_are_reported(tmp_path):
    save_net(tmp_path)
    with torch.device("meta"):
        model = Net()
    assert "init_empty_weights()" in assert_refused(model, tmp_path, "scale")


def test_tied_weight_may_be_stored_under_either_name_or_in_the_metadata(tmp_path):
    whole = save_net(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["head.weight"] = state.pop("embed.weight")
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_empty_net(tmp_path)(IDS), whole(IDS))
    save_file(state, tmp_path / "model.safetensors", metadata={"embed.weight": "head.weight", "format": "pt"})
    apart = Net().eval()
    apart.head.weight = nn.Parameter(torch.zeros(6, 4))
    load_checkpoint_in_model(apart, tmp_path)
    assert torch.equal(apart(IDS), whole(IDS))


@pytest.mark.parametrize("device_map", [None, {"": "disk"}])
@pytest.mark.parametrize("is_pickled", [False, True])
def test_untied_model_gets_separate_memory_for_a_tied_weight(tmp_path, is_pickled, device_map):
    whole = Net().eval()
    if is_pickled:
        torch.save(whole.state_dict(), tmp_path / "model.bin")
    else:
        state = save_net(tmp_path, whole).state_dict()
        state.pop("head.weight")
        metadata = {"head.weight": "embed.weight", "format": "pt"}
        save_file(state, tmp_path / "model.safetensors", metadata=metadata)
    apart = Net().eval()
    apart.head.weight = nn.Parameter(torch.zeros(6, 4))
    load_checkpoint_in_model(apart, tmp_path, device_map)
    assert torch.equal(apart.head.weight, whole.head.weight)
    assert is_mapped(apart.head.weight)
    with torch.no_grad():
        apart.embed.weight.add_(1)
    assert torch.equal(apart.head.weight, whole.head.weight)


def test_device_maps_are_checked_before_anything_moves(tmp_path):
    save_net(tmp_path)
    model = build_empty_net()
    with pytest.raises(DeviceMapError, match=r"body\.0"):
        load_checkpoint_in_model(model, tmp_path, device_map={"embed": "cpu"})
    with pytest.raises(ConfigError, match="meta"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": "meta"})
    assert model.embed.weight.is_meta


def test_disk_uses_the_checkpoint_itself_and_the_folder_only_for_conversions(tmp_path):
    whole, folder = save_net(tmp_path), tmp_path / "offload"
    model = build_empty_net()
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, folder)
    assert not folder.exists()
    assert all(is_mapped(parameter) for parameter in model.parameters())
    with pytest.raises(ConfigError, match="give offload_folder="):
        load_checkpoint_in_model(build_empty_net(), tmp_path, {"": "disk"}, dtype=torch.float16)
    half = build_empty_net()
    load_checkpoint_in_model(half, tmp_path, {"": "disk"}, folder, dtype=torch.float16)
    assert all(is_mapped(parameter) for parameter in half.parameters())
    assert torch.equal(half.embed.weight, whole.embed.weight.half())
    first = (folder / "offloaded.safetensors").stat().st_mtime_ns
    load_checkpoint_in_model(build_empty_net(), tmp_path, {"": "disk"}, folder, dtype=torch.float16)
    assert (folder / "offloaded.safetensors").stat().st_mtime_ns == first
    other = tmp_path / "other"
    other.mkdir()
    save_net(other, Net())
    with pytest.raises(ConfigError, match="weights of another model"):
        load_checkpoint_in_model(build_empty_net(), other, {"": "disk"}, folder, dtype=torch.float16)


def test_damaged_shards_leave_the_model_unchanged(tmp_path):
    whole = save_net(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    for number, part in enumerate((names[:4], names[4:])):
        save_file({name: state[name] for name in part}, tmp_path / f"m-{number}.safetensors")
    weight_map = {name: f"m-{int(name in names[4:])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_empty_net(tmp_path)(IDS), whole(IDS))
    shard = tmp_path / "m-1.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert "m-1.safetensors" in assert_refused(build_empty_net(), tmp_path, "truncated: 1 bytes")
    shard.write_bytes(pickle.dumps({}))
    assert "m-1.safetensors" in assert_refused(build_empty_net(), tmp_path, "no safetensors file")


def test_recurrent_layers_use_the_loaded_weights(tmp_path):
    torch.manual_seed(0)
    whole = nn.LSTM(3, 5)
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.LSTM(3, 5)
    load_checkpoint_in_model(model, tmp_path)
    inputs = torch.randn(2, 1, 3)
    assert torch.equal(model(inputs)[0], whole(inputs)[0])
