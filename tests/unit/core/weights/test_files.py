"""Test how weight files are opened: which files are found, and errors that name the file."""

import json
import os
import pickle
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headway.core.weights.files import open_checkpoint
from headway.core.weights.safetensors_format import DTYPES
from headway.errors import CheckpointError

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.tensor([1, 2, 3]), "b": torch.tensor(True)}


def save_sharded(folder, suffix="safetensors", save=save_file):
    """Save each tensor of `STATE` in a separate file, and return the path of the index."""
    weight_map = {}
    for number, (name, tensor) in enumerate(STATE.items()):
        file = f"model-{number}.{suffix}"
        save({name: tensor}, folder / file)
        weight_map[name] = file
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def read_values(checkpoint):
    return {name: stored.tensor() for name, stored in checkpoint.tensors.items()}


def are_equal(found, expected=STATE):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_file_index_and_folder_of_both_formats_are_opened(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    assert are_equal(read_values(open_checkpoint(tmp_path / "model.safetensors")))
    assert are_equal(read_values(open_checkpoint(str(tmp_path))))
    for kind, save in (("safetensors", save_file), ("bin", torch.save)):
        folder = tmp_path / kind
        folder.mkdir()
        assert are_equal(read_values(open_checkpoint(save_sharded(folder, kind, save))))
        assert are_equal(read_values(open_checkpoint(folder)))
        assert all(stored.is_mapped for stored in open_checkpoint(folder).tensors.values())


def test_every_dtype_is_read_like_by_safetensors(tmp_path):
    state = {}
    for name, dtype in DTYPES.items():
        if name in ("F8_E8M0",):
            continue
        state[name] = torch.arange(8, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    save_file(state, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    for name, found in read_values(open_checkpoint(tmp_path)).items():
        assert found.dtype == expected[name].dtype
        assert torch.equal(found.view(torch.uint8), expected[name].view(torch.uint8))


def test_safetensors_are_preferred_and_ambiguous_folders_are_refused(tmp_path):
    torch.save({"old": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_sharded(tmp_path)
    assert are_equal(read_values(open_checkpoint(tmp_path)))
    save_file({"stale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="more than one checkpoint"):
        open_checkpoint(tmp_path)


def test_unaligned_tensor_is_copied(tmp_path):
    header = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    data = b"\7" + torch.tensor([1.5, 2.5]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    found = open_checkpoint(tmp_path).tensors["a"]
    assert not found.is_mapped
    assert found.tensor().tolist() == [1.5, 2.5]


def write_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "damaged"),
        (b"[1]", b"", "damaged"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "truncated: 4 bytes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1234", "3 bytes longer"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678", "does not fit its shape"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, b"12345678", "does not fit its shape"),
        ({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, b"12345678", "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
          "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "overlap"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]}}, b"123", "holes"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
         b"", "twice"),
    ],
)  # fmt: skip
def test_damaged_header_is_named(tmp_path, header, data, words):
    path = tmp_path / "model.safetensors"
    write_header(path, header, data)
    with pytest.raises(CheckpointError, match=words) as exc_info:
        open_checkpoint(path)
    assert str(path) in str(exc_info.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_file_is_an_error_or_is_read_like_by_safetensors(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("files")
    path = folder / "model.safetensors"
    save_file(STATE, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = read_values(open_checkpoint(path))
    except CheckpointError:
        return
    expected = load_file(path)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name].view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8))


class Malicious:
    """Object whose unpickling creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_that_would_execute_code_is_refused(tmp_path):
    for name, protocol in (("zip", None), ("legacy", False)):
        path, proof = tmp_path / f"{name}.bin", tmp_path / f"{name}-ran"
        if protocol is None:
            torch.save({"a": Malicious(str(proof))}, path)
        else:
            path.write_bytes(pickle.dumps({"a": Malicious(str(proof))}))
        with pytest.raises(CheckpointError, match="was not executed") as exc_info:
            open_checkpoint(path)
        assert str(path) in str(exc_info.value)
        assert not proof.exists()


def test_other_invalid_pickles_are_refused(tmp_path):
    torch.save([torch.zeros(1)], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="not a dict of names"):
        open_checkpoint(tmp_path / "list.bin")
    with zipfile.ZipFile(tmp_path / "zip.bin", "w") as file:
        file.writestr("other", "content")
    with pytest.raises(CheckpointError, match=r"zip\.bin"):
        open_checkpoint(tmp_path / "zip.bin")
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    old = open_checkpoint(tmp_path / "old.bin")
    assert are_equal(read_values(old))
    assert not any(stored.is_mapped for stored in old.tensors.values())


def test_invalid_indexes_are_refused(tmp_path):
    index = save_sharded(tmp_path)
    (tmp_path / "model-1.safetensors").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing: model-1\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "away").rename(tmp_path / "model-1.safetensors")
    content = json.loads(index.read_text())
    for changed, words in (
        (
            {"weight_map": {**content["weight_map"], "b": "model-0.safetensors"}},
            r"not in the shard that it names: b \(in model-0",
        ),
        ({"weight_map": {"b": "../model-0.safetensors"}}, "outside"),
        ({"weight_map": {"b": 1}}, "no file names"),
        ({}, "no index"),
    ):
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(index)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="no index"):
        open_checkpoint(index)


def test_missing_paths_raise_errors_and_other_names_are_downloaded_from_the_hub(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="contains no weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere" / "model.safetensors")
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"are read from \.safetensors"):
        open_checkpoint(tmp_path / "model.txt")

    import huggingface_hub

    # A test cannot reach the Hub, so check the requests to it.
    save_file(STATE, tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert are_equal(read_values(open_checkpoint("owner/name")))
    assert asked == [(("owner/name",), {"allow_patterns": ["*.safetensors", "*.safetensors.index.json"]})]

    def raise_offline(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", raise_offline)
    with pytest.raises(CheckpointError, match="could not be downloaded from the Hub: offline"):
        open_checkpoint("owner/name")


@pytest.mark.parametrize("text", [
    "[" * 2000, '{"weight_map": ' * 2000, "9" * 5000, '{"weight_map": {"b": ".."}}', '{"weight_map": {"b": "."}}',
    '{"weight_map": {"b": "\\u0000"}}', '{"weight_map": {"b": "\\ud800"}}', '{"weight_map": []}',
])  # fmt: skip
def test_hostile_indexes_are_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    for source in (index, tmp_path):
        with pytest.raises(CheckpointError):
            open_checkpoint(source)


def test_shard_with_a_name_that_is_too_long_is_missing(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "n" * 300}}))
    with pytest.raises(CheckpointError, match="1 of 1 shards are missing"):
        open_checkpoint(index)


def test_anything_but_a_regular_file_is_not_opened(tmp_path):
    for name in ("model.safetensors.index.json", "model.safetensors", "model.bin"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_checkpoint(tmp_path / name)
        (tmp_path / name).unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**62, 8], [1] * 65])
def test_shapes_that_torch_cannot_create_are_refused(tmp_path, shape):
    size = 0 if 0 in shape else 4
    write_header(
        tmp_path / "a.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}, bytes(size)
    )
    with pytest.raises(CheckpointError, match="a shape that cannot be"):
        open_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "state", [{"a": torch.ones(2, 2).to_sparse()}, {"a": torch.ones(2, device="meta")}, {1: torch.ones(2)}]
)
def test_pickle_of_other_objects_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"not a plain tensor|not a dict of names"):
        open_checkpoint(tmp_path)


@given(shape=st.lists(st.integers(0, 5), max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_box_of_a_tensor_is_read_alone(tmp_path_factory, shape, data):
    folder = tmp_path_factory.mktemp("box")
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    save_file({"x": whole}, folder / "model.safetensors")
    torch.save({"x": whole}, folder / "model.bin")
    begins = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape)]
    expected = whole[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes))]
    for file in ("model.safetensors", "model.bin"):
        stored = open_checkpoint(folder / file).tensors["x"]
        for room in (
            torch.empty(sizes),
            torch.empty(sizes, dtype=torch.float64),
            torch.empty(sizes[::-1]).permute(tuple(range(len(sizes)))[::-1]),
        ):
            stored.fill(room, begins)
            assert torch.equal(room.float(), expected)


def test_file_that_became_shorter_is_an_error_when_a_box_is_read(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path).tensors["a.weight"]
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="became shorter"):
        stored.fill(torch.empty(2, 3), (0, 0))
