"""Test exported weights: one file or shards, no stale files, tied tensors once, and readable by other libraries."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from headway import Accelerator
from headway.core.weights.export import plan_shards, save_object, save_weights, split_ties
from headway.errors import ConfigError


class Tied(nn.Module):
    """Model whose output layer shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 6, bias=False)
        self.outer.weight = self.inner.weight


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_single_file_is_read_by_safetensors(tmp_path):
    model, twin = Tied(), Tied()
    Accelerator(cpu=True).save_model(model, tmp_path / "new" / "folder")
    assert list_names(tmp_path / "new" / "folder") == ["model.safetensors"]
    missing, unexpected = safetensors.torch.load_model(twin, tmp_path / "new" / "folder" / "model.safetensors")
    assert (missing, unexpected) == (set(), []) or (not missing and not unexpected)
    for one, other in zip(model.parameters(), twin.parameters()):
        assert torch.equal(one, other)
    assert twin.outer.weight is twin.inner.weight


def test_shards_contain_each_tensor_once(tmp_path):
    model = Tied()
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="100B")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"inner.weight", "middle.weight", "middle.bias"}
    assert index["metadata"]["total_size"] == 4 * (24 + 16 + 4)
    state = model.state_dict()
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / file)[name], state[name])
    assert all(len(safetensors.torch.load_file(tmp_path / file)) for file in set(index["weight_map"].values()))


def test_save_removes_files_of_earlier_saves(tmp_path):
    """Accelerate leaves stale shards, which loaders prefer to newer files."""
    acc, model = Accelerator(cpu=True), nn.Linear(8, 8)
    single, sharded = ["model.safetensors"], None
    for size, safe in [
        ("10GB", True),
        (100, True),
        ("10GB", True),
        (1, True),
        (200, True),
        ("1GB", False),
        (100, True),
    ]:
        nn.init.normal_(model.weight)
        acc.save_model(model, tmp_path, max_shard_size=size, safe_serialization=safe)
        found = list_names(tmp_path)
        if not safe:
            assert found == ["pytorch_model.bin"]
            assert torch.equal(torch.load(tmp_path / found[0])["weight"], model.weight)
        elif size in ("10GB", "1GB"):
            assert found == single
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            sharded = sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
            assert found == sharded


def test_files_of_others_are_kept(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.safetensors").write_text("")
    Accelerator(cpu=True).save_model(nn.Linear(2, 2), tmp_path)
    assert list_names(tmp_path) == ["config.json", "model.safetensors", "notes.safetensors"]


def test_tied_tensors_have_the_same_memory_and_layout():
    base = torch.arange(6.0)
    kept, tied = split_ties({"a": base, "b": base, "c": base[:3], "d": base.clone(), "e": base.reshape(2, 3)}.items())
    assert list(kept) == ["a", "c", "d", "e"]
    assert tied == {"b": "a"}


def test_views_and_strided_tensors_are_written_by_value(tmp_path):
    base = torch.arange(6.0)
    save_weights({"whole": base, "part": base[:3], "strided": base[::2], "empty": base[:0]}.items(), tmp_path, "1GB")
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert read["part"].tolist() == [0, 1, 2]
    assert read["strided"].tolist() == [0, 2, 4]
    assert read["empty"].shape == (0,)


def test_shards_are_planned_in_order():
    assert plan_shards({"a": 5, "b": 5, "c": 1}, 10) == [["a", "b"], ["c"]]
    assert plan_shards({"a": 50, "b": 1, "c": 9, "d": 1}, 10) == [["a"], ["b", "c"], ["d"]]
    assert plan_shards({"a": 5, "large": 50, "b": 5}, 10) == [["large"], ["a", "b"]]
    assert plan_shards({}, 10) == [[]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(0, 25))
@example([6, 6, 2, 6, 2, 2], 10)
@example([5, 50, 5, 0, 50, 11, 10], 10)
def test_shards_equal_those_of_huggingface_hub(sizes, max_shard_size):
    hub = pytest.importorskip("huggingface_hub", reason="compares with huggingface_hub's splitter")
    tensors = {f"layers.{i}.weight": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    # On meta, because the hub's function treats all tensors of 0 bytes as the same memory.
    tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
    expected = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    found = plan_shards({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_size)
    assert found == list(expected.filename_to_tensors.values())


def test_files_and_index_equal_those_of_huggingface_hub(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="compares with huggingface_hub's files")
    sizes = (3, 40, 7, 2, 2, 9, 60, 1, 4)
    state = {f"layers.{i}.weight": torch.rand(size, 5).bfloat16() for i, size in enumerate(sizes)}
    expected = hub.split_torch_state_dict_into_shards(state, max_shard_size="0.1KB")
    save_weights(state.items(), tmp_path, "0.1KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]
    (tmp_path / "hub").mkdir()
    hub.save_torch_state_dict(state, tmp_path / "hub", max_shard_size="0.1KB")
    for name in set(expected.filename_to_tensors):
        assert list(safetensors.torch.load_file(tmp_path / name)) == list(
            safetensors.torch.load_file(tmp_path / "hub" / name)
        )


def test_save_writes_objects_and_tensors(tmp_path):
    acc, model = Accelerator(cpu=True), Tied()
    acc.save({"a": 1}, tmp_path / "object.pt")
    assert torch.load(tmp_path / "object.pt") == {"a": 1}
    acc.save(model.state_dict(), tmp_path / "tensors.safetensors", safe_serialization=True)
    read = safetensors.torch.load_file(tmp_path / "tensors.safetensors")
    assert torch.equal(read["inner.weight"], model.inner.weight)
    assert list_names(tmp_path) == ["object.pt", "tensors.safetensors"]
    with pytest.raises(ConfigError, match="int"):
        acc.save(3, tmp_path / "x", safe_serialization=True)


def test_failed_write_keeps_the_earlier_file(tmp_path):
    save_object({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(Exception, match=r"pickle|local object"):
        save_object(lambda: None, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == {"a": 1}


@pytest.mark.parametrize("safe", [True, False])
def test_path_of_a_file_is_refused_as_a_folder(tmp_path, safe):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Accelerator(cpu=True).save_model(nn.Linear(1, 1), tmp_path / "file", safe_serialization=safe)


def test_log_level_info_does_not_log_each_file(tmp_path):
    code = "import sys, torch; from headway.core.weights.export import save_weights as save; "
    code += "save([('a', torch.ones(1))], sys.argv[1], 9)"
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True,
                          env={**os.environ, "HEADWAY_LOG_LEVEL": "info"})  # fmt: skip
    assert list_names(tmp_path) == ["model.safetensors"]
    assert "writing" not in result.stderr
