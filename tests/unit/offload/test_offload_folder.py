"""Test offload folders: exchange with Accelerate, folders of other models, truncated files and invalid names."""

import importlib.util
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from headway import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    dispatch_model,
    extract_submodules_state_dict,
    init_empty_weights,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from headway.core.weights.locations import is_mapped
from headway.errors import CheckpointError, ConfigError
from tests.unit.offload.placement.models import Chain, build_model

needs_peer = pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="the peer is not installed")

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.bias": torch.randn(3).bfloat16(),
    "half": torch.randn(4, 1).half(),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "small": torch.randn(8).to(torch.float8_e4m3fn),
    "ints": torch.arange(5, dtype=torch.uint8),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "wide": torch.randn(2, 2, dtype=torch.float64),
}


def are_same(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def test_written_tensors_are_mapped(tmp_path):
    offload_state_dict(tmp_path / "new", TENSORS)
    loaded = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loaded) == list(TENSORS)
    assert len(loaded) == len(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].shape == tensor.shape
        assert are_same(loaded[name], tensor), name
    assert not list((tmp_path / "new").glob(".*"))


@needs_peer
def test_accelerate_reads_headways_folder(tmp_path):
    from accelerate.utils import OffloadedWeightsLoader as TheirLoader

    offload_state_dict(tmp_path, TENSORS)
    theirs = TheirLoader(save_folder=str(tmp_path))
    for name, tensor in TENSORS.items():
        assert theirs[name].shape == tensor.shape
        assert are_same(theirs[name], tensor), name


@needs_peer
def test_headway_reads_accelerates_folder(tmp_path):
    from accelerate.utils import offload_state_dict as their_offload

    their_offload(str(tmp_path), TENSORS)
    ours = OffloadedWeightsLoader(save_folder=tmp_path)
    for name, tensor in TENSORS.items():
        assert ours[name].shape == tensor.shape
        assert are_same(ours[name], tensor), name


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
)
def test_any_shape_is_restored(tmp_path_factory, shape, dtype):
    folder = tmp_path_factory.mktemp("dat")
    tensor = torch.randint(-9, 9, shape).to(dtype)
    index = offload_weight(tensor, "w", folder, {})
    found = load_offloaded_weight(folder / "w.dat", index["w"])
    assert found.shape == tensor.shape
    assert are_same(found, tensor)


def test_write_to_a_mapped_tensor_never_reaches_the_file(tmp_path):
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    OffloadedWeightsLoader(save_folder=tmp_path)["w"].fill_(5.0)
    assert OffloadedWeightsLoader(save_folder=tmp_path)["w"].tolist() == [1.0] * 4


def test_folder_of_another_model_is_refused_and_a_part_is_added(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    offload_state_dict(tmp_path, {"b": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"already contains another a: .*\[2\].*, not \[3\]"):
        offload_state_dict(tmp_path, {"c": torch.ones(1), "a": torch.ones(3)})
    assert list(read_offload_index(tmp_path)) == ["a", "b"]
    assert not (tmp_path / "c.dat").exists()
    save_offload_index(None, tmp_path)
    save_offload_index({}, tmp_path / "nowhere")


def test_nothing_is_written_if_a_tensor_has_no_values(tmp_path):
    with pytest.raises(ConfigError, match="b is on the meta device and has no values"):
        offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.ones(2, device="meta")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"\0" * 7, b"\0" * 9])
def test_missing_or_truncated_file_is_named(tmp_path, content):
    offload_state_dict(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "w.dat").unlink()
    if content is not None:
        (tmp_path / "w.dat").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.dat is (missing|7 bytes|9 bytes); its entry has \[2\]"):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]


@pytest.mark.parametrize(
    "entry",
    [{"dtype": "load", "shape": [2]}, {"dtype": "float32"}, {"dtype": "float32", "shape": [-2]}, {"shape": [2]}],
)
def test_invalid_index_entry_is_refused(tmp_path, entry):
    (tmp_path / "w.dat").write_bytes(b"\0" * 8)
    with pytest.raises(CheckpointError, match="needs a dtype of torch and a shape"):
        load_offloaded_weight(tmp_path / "w.dat", entry)


def test_invalid_index_and_names_outside_the_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read as an offload index"):
        read_offload_index(tmp_path)
    (tmp_path / "index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="gives no entry for each name"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ConfigError, match="not a name of a tensor"):
        offload_weight(torch.ones(1), "../w", tmp_path)
    index = {"../w": {"dtype": "float32", "shape": [1]}}
    with pytest.raises(ConfigError, match="not a name of a tensor"):
        OffloadedWeightsLoader(save_folder=tmp_path, index=index)["../w"]
    with pytest.raises(ConfigError, match="meta device"):
        offload_weight(torch.ones(1, device="meta"), "w", tmp_path)
    with pytest.raises(ConfigError, match="got no weights"):
        OffloadedWeightsLoader()
    with pytest.raises(ConfigError, match="no save_folder was given"):
        OffloadedWeightsLoader(index=index)["../w"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"w": ' * 100_000, '{"w": {"shape": [' + "9" * 5000 + "]}}"])
def test_deeply_nested_index_is_one_error(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as an offload index"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_index_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(CheckpointError, match="is a pipe, not a regular file"):
        OffloadedWeightsLoader(save_folder=tmp_path)


@pytest.mark.parametrize("shape", [[10**4000, 10**4000], [0, 10**100], [1] * 100_000 + [2**60], [2**40, 2**40]])
def test_impossible_shape_is_one_short_error(tmp_path, shape):
    (tmp_path / "w.dat").write_bytes(b"")
    with pytest.raises(CheckpointError, match="needs a dtype of torch and a shape") as exc_info:
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": shape})
    assert len(str(exc_info.value)) < 500


def test_index_names_no_model_of_the_hub(tmp_path):
    index = {"a": {"safetensors_file": "owner/name", "weight_name": "x"}}
    with pytest.raises(CheckpointError, match="owner/name, which the offload index names for a, is no file"):
        OffloadedWeightsLoader(save_folder=tmp_path, index=index)["a"]


def test_memory_takes_precedence_over_files_and_safetensors_are_mapped(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    save_file({"inner": torch.full((2,), 3.0)}, tmp_path / "more.safetensors")
    index = {
        **read_offload_index(tmp_path),
        "c": {"safetensors_file": str(tmp_path / "more.safetensors"), "weight_name": "inner"},
        "d": {"safetensors_file": str(tmp_path / "more.safetensors"), "weight_name": "inner", "dtype": "bfloat16"},
        "e": {"safetensors_file": str(tmp_path / "more.safetensors")},
    }
    loaded = OffloadedWeightsLoader({"a": torch.zeros(2)}, tmp_path, index)
    assert list(loaded) == ["a", "b", "c", "d", "e"]
    assert loaded["a"].tolist() == [0.0, 0.0]
    assert loaded["c"].tolist() == [3.0, 3.0]
    assert loaded["d"].dtype == torch.bfloat16
    assert [loaded.is_mapped(name, loaded[name].dtype) for name in "abcd"] == [False, True, True, False]
    with pytest.raises(CheckpointError, match="contains no tensor 'e'"):
        loaded["e"]
    with pytest.raises(KeyError):
        loaded["f"]


def test_prefixes_select_names_of_one_submodule():
    names = ["h.1.a", "h.1.b", "h.10.a", "h.1", "x"]
    state = dict.fromkeys(names, 0)
    prefixed = PrefixedDataset(state, "h.1.")
    assert (list(prefixed), len(prefixed), dict(prefixed)) == (["a", "b"], 2, {"a": 0, "b": 0})
    assert "b" in prefixed
    assert "x" not in prefixed
    assert list(extract_submodules_state_dict(state, ["h.1"])) == ["h.1.a", "h.1.b", "h.1"]
    assert list(extract_submodules_state_dict(state, ["x", "h.10"])) == ["h.10.a", "x"]


def test_load_offloaded_weights_fills_a_meta_model(tmp_path):
    model = Chain(2)
    offload_state_dict(tmp_path, model.state_dict())
    with init_empty_weights():
        empty = Chain(2)
    load_offloaded_weights(empty, read_offload_index(tmp_path), tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor)
    assert empty.head.weight is empty.embedding.weight
    assert is_mapped(empty.blocks[0].up.weight)
    load_offloaded_weights(empty, None, None)
    wider = Chain(2, width=8)
    before = wider.head.weight.clone()
    with pytest.raises(CheckpointError, match="give the weights of this model"):
        load_offloaded_weights(wider, read_offload_index(tmp_path), tmp_path)
    assert torch.equal(wider.head.weight, before)
    with pytest.raises(CheckpointError, match=r"Linear has no embedding\.weight"):
        load_offloaded_weights(nn.Linear(2, 2), read_offload_index(tmp_path), tmp_path)


@needs_peer
def test_model_offloaded_by_accelerate_runs_from_its_folder(tmp_path):
    """Accelerate's disk_offload writes the folder, and Headway uses its files in place."""
    from accelerate import disk_offload

    torch.manual_seed(0)
    model = build_model("llama").eval()
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disk_offload(model, str(tmp_path), "cpu")
    with init_empty_weights(include_buffers=False):
        ours = build_model("llama").eval()
    dispatch_model(ours, {"": "disk"}, offload_dir=tmp_path, offload_index=read_offload_index(tmp_path))
    assert torch.equal(ours(ids).logits, expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    assert not (tmp_path / "offloaded.safetensors").exists()


def test_another_floating_type_is_converted(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(2, 2).half(), "bias": torch.ones(2).half()})
    with init_empty_weights():
        model = nn.Linear(2, 2)
    dispatch_model(model, {"": "cpu"}, offload_dir=tmp_path, offload_index=read_offload_index(tmp_path))
    assert model.weight.dtype == torch.float32
    assert not is_mapped(model.weight)
    index = json.loads((tmp_path / "index.json").read_text())
    index["bias"]["dtype"] = "int16"
    with pytest.raises(CheckpointError, match="bias is"):
        load_offloaded_weights(model, index, tmp_path)
