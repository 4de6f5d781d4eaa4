"""Test checkpoint folders that are made to do harm: no endless reads, and no work or memory beyond what the files justify."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from headway import Accelerator
from headway.core.checkpoint import folders
from headway.core.checkpoint.format import manifest
from headway.core.checkpoint.format.chunks import TensorChunk as Chunk
from headway.core.checkpoint.format.entries import TensorEntry, WrittenFile
from headway.core.checkpoint.format.foreign import explain_path, find_foreign_checkpoint, list_checkpoint_names
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, _compute_digest, read_manifest
from headway.core.checkpoint.format.tensors import hash_file, write_shards
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.reading import read_tensors
from tests.unit.core.checkpoint.saved import TENSORS, make_job, save


@pytest.fixture(autouse=True)
def _time_limit():
    """Fail a test after 60 s. Waiting for a pipe would never end, and quadratic work would take minutes."""

    def raise_on_alarm(*_):
        raise AssertionError("the test did not end within 60 s")

    before = signal.signal(signal.SIGALRM, raise_on_alarm)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replace_with(path, kind):
    if path.exists():
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["model-00000.safetensors", "optimizer-00000.safetensors", MANIFEST])
def test_anything_but_a_regular_file_is_never_read(tmp_path, name, kind):
    save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    found = read_manifest(folder)
    replace_with(folder / name, kind)
    with pytest.raises(CheckpointError, match=f"{name} is a {kind}, not a regular file; nothing was read"):
        verify_checkpoint(folder)
    if name != MANIFEST:
        for is_verified in (True, False):
            with pytest.raises(CheckpointError, match="not a regular file"):
                read_state(folder, found, is_verified)
        empty = replace(found, files={**found.files, name: replace(found.files[name], num_bytes=0)})
        with pytest.raises(CheckpointError, match="not a regular file"):  # 0 is the length of a device
            verify_checkpoint(folder, empty)


def test_folder_whose_manifest_is_a_pipe_is_not_a_checkpoint(tmp_path):
    save(tmp_path)
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / MANIFEST)
    assert list_checkpoint_names(tmp_path) == ["checkpoint_1"]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="is a pipe"):
        accelerator.load_state(tmp_path / "odd")
    assert torch.equal(model.weight, before)


def build_chunked_manifest(count, cuts=1):
    """Return the manifest of one tensor of `count` values, split along `cuts` axes into chunks of one value."""
    side = round(count ** (1 / cuts))
    shape = (side,) * cuts
    places = [tuple(number // side**axis % side for axis in range(cuts)) for number in range(side**cuts)]
    chunks = tuple(Chunk(place, (1,) * cuts, "f", str(number)) for number, place in enumerate(places))
    return Manifest({"a": TensorEntry(shape, "uint8", chunks)}, {"f": WrittenFile("f", 2 * count, ("0" * 32,))})


@pytest.mark.parametrize("cuts", [1, 2])
def test_decoding_many_chunks_is_not_quadratic(cuts):
    """With quadratic work, decoding took more than 120 s for one axis."""
    assert len(Manifest.decode(build_chunked_manifest(20_000, cuts).encode()).tensors["a"].chunks) > 19_000


@pytest.mark.parametrize("move", [(0, (5, 5)), (1, (0, 0)), (7, (4, 5))])
def test_overlapping_chunks_are_detected(move):
    number, place = move
    good = build_chunked_manifest(36, 2)
    chunks = list(good.tensors["a"].chunks)
    assert chunks[number].offsets != place
    chunks[number] = replace(chunks[number], offsets=place)
    bad = replace(good, tensors={"a": replace(good.tensors["a"], chunks=tuple(chunks))})
    with pytest.raises(CheckpointError, match="do not make up its shape"):
        Manifest.decode(bad.encode())


def test_chunks_that_form_no_grid_are_read(tmp_path):
    """Read five chunks around each other, which no straight line separates."""
    whole = torch.arange(9.0).reshape(3, 3)
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    parts = {str(i): whole[y : y + h, x : x + w] for i, ((y, x), (h, w)) in enumerate(boxes)}
    [written] = write_shards(tmp_path, {"f": list(parts.items())})
    chunks = tuple(Chunk(place, shape, "f", str(i)) for i, (place, shape) in enumerate(boxes))
    found = Manifest.decode(Manifest({"a": TensorEntry((3, 3), "float32", chunks)}, {"f": written}).encode())
    assert torch.equal(dict(read_tensors(tmp_path, found))["a"], whole)


def test_chunks_must_not_share_bytes():
    entry = TensorEntry((1000,), "float32", (Chunk((0,), (1000,), "f", "a"),))
    files = {"f": WrittenFile("f", 4100, ("0" * 32,))}
    Manifest.decode(Manifest({"a": entry}, files).encode())
    with pytest.raises(CheckpointError, match="for two tensors"):
        Manifest.decode(Manifest({f"a{number}": entry for number in range(300)}, files).encode())
    other = {str(n): TensorEntry((1000,), "float32", (Chunk((0,), (1000,), "f", str(n)),)) for n in range(2)}
    with pytest.raises(CheckpointError, match="places more in 'f' than its 4,100 bytes hold"):
        Manifest.decode(Manifest(other, files).encode())


def encode_content(content):
    """Return a manifest with this content and a matching SHA-256, as text."""
    return json.dumps(
        {"format": "headway checkpoint", "version": 3, "sha256": _compute_digest(content), "content": content}
    )


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0, 2**63], [1] * 65, [10**300, 0]])
def test_impossible_shapes_are_refused(shape):
    chunk = {"offsets": [0] * len(shape), "shape": shape, "file": "f", "key": "a"}
    content = {"tensors": {"a": {"shape": shape, "dtype": "uint8", "chunks": [chunk]}}, "aliases": {}, "state": {},
               "about": {}, "files": {"f": {"bytes": 9, "xxh3_128": ["0"]}}}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"cannot be|whole number"):
        Manifest.decode(encode_content(content).encode())


def test_manifest_that_is_too_long_is_neither_read_nor_written(tmp_path, monkeypatch):
    save(tmp_path)
    size = (tmp_path / "checkpoint_1" / MANIFEST).stat().st_size
    monkeypatch.setattr(manifest, "MAX_BYTES", size - 1)
    with pytest.raises(CheckpointError, match="is too long"):
        read_manifest(tmp_path / "checkpoint_1")
    with pytest.raises(CheckpointError, match=r"let state_dict\(\) return long lists of numbers as tensors"):
        save(tmp_path, nonce="1" * 16)
    monkeypatch.undo()
    verify_checkpoint(tmp_path / "checkpoint_1")  # the earlier checkpoint is intact


def test_manifest_that_a_load_would_refuse_is_not_committed(tmp_path):
    save(tmp_path)
    odd = make_job(tmp_path, nonce="2" * 16)
    odd.staging.mkdir()
    with pytest.raises(CheckpointError, match="unknown dtype"):
        folders.commit_checkpoint(odd.staging, odd.final, Manifest({"a": TensorEntry((), "complex33", ())}, {}))
    verify_checkpoint(tmp_path / "checkpoint_1")


def test_state_nested_too_deeply_is_refused():
    deep = []
    for _ in range(200_000):  # Python 3.13 encodes 5,000
        deep = [deep]
    with pytest.raises(CheckpointError, match="RecursionError"):
        Manifest({}, {}, state={"x": deep}).encode()


@pytest.mark.parametrize("change", [
    {"data_offsets": [0.0, 48.0]}, {"data_offsets": "ab"}, {"data_offsets": [float("inf"), 0]}, {"shape": {}},
    {"data_offsets": [-48, 0]}, {"data_offsets": [True, 48]},
])  # fmt: skip
@pytest.mark.parametrize("is_verified", [True, False])
def test_invalid_header_with_fitting_hashes_is_refused(tmp_path, change, is_verified):
    save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    path = folder / "optimizer-00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["optimizer/0/a/exp_avg"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    found = read_manifest(folder)
    fitting = replace(found, files={**found.files, path.name: hash_file(path, path.name)})
    with pytest.raises(CheckpointError, match="optimizer-00000"):
        read_state(folder, fitting, is_verified)


def test_path_that_is_too_long_is_reported_as_missing(tmp_path):
    long = tmp_path / ("n" * 5000)
    assert explain_path(long).startswith(f"{long} does not exist")
    assert list_checkpoint_names(long) == []
    assert find_foreign_checkpoint(long) is None
    for look in (read_manifest, lambda path: folders.find_store(path).find_folder()):
        with pytest.raises(CheckpointError, match="does not exist"):
            look(long)


def test_impossible_file_names_are_refused():
    content = json.loads(Manifest({}, {"f": WrittenFile("f", 1, ("0" * 32,))}).encode())["content"]
    for name in ("\ud800", "a\0b", "/a", "a/../b", ""):
        with pytest.raises(CheckpointError):
            Manifest.decode(encode_content({**content, "files": {name: content["files"]["f"]}}).encode())


def test_saved_checkpoint_is_still_read(tmp_path):
    save(tmp_path)
    assert (
        read_state(tmp_path / "checkpoint_1", verify_checkpoint(tmp_path / "checkpoint_1"), True)[0].keys()
        == TENSORS.keys()
    )
