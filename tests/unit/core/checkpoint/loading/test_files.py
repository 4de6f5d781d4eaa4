"""Test the files of a checkpoint: how they are written, committed, listed, rotated, read back, and checked for damage."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, safe_open

from headway.core.checkpoint.format.chunks import TensorChunk as Chunk
from headway.core.checkpoint.format.entries import TensorEntry, WrittenFile
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.format.tensors import write_shards
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.core.checkpoint.state import CollectedState
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES
from tests.unit.core.checkpoint.reading import read_tensors
from tests.unit.core.checkpoint.saved import TENSORS, save


def test_saved_checkpoint_is_read_back(tmp_path):
    written = save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    found = verify_checkpoint(folder)
    assert found == written
    assert (found.aliases, found.state, found.about) == (written.aliases, {"clock": [1]}, {"num_updates": 7})
    read = dict(read_tensors(folder, found))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name].view(torch.uint8) if name.endswith("f8") else read[name],
                           tensor.view(torch.uint8) if name.endswith("f8") else tensor), name  # fmt: skip
    assert (tmp_path / "latest").read_text() == "checkpoint_1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_safetensors_reads_the_weights(tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "checkpoint_1" / "model-00000.safetensors")
    assert torch.equal(weights["model/0/a"], TENSORS["model/0/a"])
    with safe_open(tmp_path / "checkpoint_1" / "model-00000.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("harm", ["truncate", "flip", "grow", "remove", "swap"])
def test_damaged_files_are_named(tmp_path, harm):
    save(tmp_path)
    path = tmp_path / "checkpoint_1" / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
    changed = {"truncate": data[:-1], "flip": data, "grow": data + b"\0", "swap": bytes(len(data))}
    path.unlink() if harm == "remove" else path.write_bytes(changed[harm])
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors"):
        verify_checkpoint(tmp_path / "checkpoint_1")


SMALL = Manifest({"a": TensorEntry((4, 2), "float32", (Chunk((0, 0), (2, 2), "f", "a"), Chunk((2, 0), (2, 2), "f", "b")))},
                 {"f": WrittenFile("f", 40, ("0" * 32,))}, {"t": "a"}, {"x": [1]}, {"y": 2})  # fmt: skip


def test_chunks_are_joined(tmp_path):
    whole = torch.arange(8.0).reshape(4, 2)
    [written] = write_shards(tmp_path, {"f": [("a", whole[:2]), ("b", whole[2:])]})
    found = replace(SMALL, files={"f": written})
    assert torch.equal(dict(read_tensors(tmp_path, found))["a"], whole)


def test_mutated_weights_file_is_refused(tmp_path):
    save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    manifest = read_manifest(folder)
    path = folder / "model-00000.safetensors"
    right = path.read_bytes()

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.integers(0, len(right) - 1), st.integers(0, 255), st.integers(0, 30))
    def fuzz(place, value, cut):
        path.write_bytes(right[:place] + bytes([value]) + right[place + 1 :][: len(right) - cut])
        try:
            verify_checkpoint(folder, manifest)
        except CheckpointError:
            return
        assert path.read_bytes() == right

    fuzz()


LARGE = {
    "model/0/w": torch.randn(3, 2_000_003), "optimizer/0/w/exp_avg": torch.randn(5_000_017), "optimizer/0/w/step": torch.tensor(3.0),
    "optimizer/0/w/flags": torch.randn(1001) > 0, "optimizer/0/w/odd": torch.randn(77).double(),
    "optimizer/0/w/none": torch.zeros(0, 4),
    "custom/0/c": torch.randn(9).to(torch.complex64), "custom/0/t": torch.arange(35.0).reshape(5, 7).t(),
}  # fmt: skip


@pytest.mark.parametrize("is_verified", [True, False])
def test_state_is_read_into_separate_memory(tmp_path, is_verified):
    save(tmp_path, content=CollectedState(LARGE))
    folder = tmp_path / "checkpoint_1"
    manifest = read_manifest(folder)
    assert len(manifest.files["optimizer-00000.safetensors"].digests) == 2
    assert len(manifest.files["model-00000.safetensors"].digests) == 2
    read, owned = read_state(folder, manifest, is_verified)
    assert list(read) == list(manifest.tensors)
    assert owned == {name for name in LARGE if not name.startswith("model/")}
    for name, tensor in LARGE.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name], tensor), name
    for name in owned:
        read[name].zero_()  # neither a view of a file nor of another tensor
    assert torch.equal(read_state(folder, manifest, True)[0]["optimizer/0/w/exp_avg"], LARGE["optimizer/0/w/exp_avg"])


@pytest.mark.parametrize("place", [3, 200, 17_000_000, -1])
def test_flipped_byte_is_detected_and_its_piece_is_named(tmp_path, place):
    save(tmp_path, content=CollectedState(LARGE))
    folder = tmp_path / "checkpoint_1"
    manifest = read_manifest(folder)
    path = folder / "optimizer-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optimizer-00000\.safetensors is damaged"):
        verify_checkpoint(folder, manifest)
    with pytest.raises(CheckpointError, match=r"optimizer-00000\.safetensors is damaged"):
        read_state(folder, manifest, True)
    if place > 2**24:
        with pytest.raises(CheckpointError, match="its bytes 16,777,216 to "):
            verify_checkpoint(folder, manifest)


def test_mutated_header_is_refused_or_reads_equal_shapes(tmp_path):
    save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    manifest = read_manifest(folder)
    path = folder / "optimizer-00000.safetensors"
    right = path.read_bytes()

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.integers(0, len(right) - 49), st.integers(0, 255), st.booleans())
    def fuzz(place, value, is_verified):
        path.write_bytes(right[:place] + bytes([value]) + right[place + 1 :])
        try:
            read, _ = read_state(folder, manifest, is_verified)
        except CheckpointError:
            return
        assert not is_verified or path.read_bytes() == right
        assert read["optimizer/0/a/exp_avg"].shape == TENSORS["optimizer/0/a/exp_avg"].shape

    fuzz()
