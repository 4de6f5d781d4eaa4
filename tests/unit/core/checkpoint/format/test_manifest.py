"""Test the manifest of a checkpoint: its bytes, and how `decode` refuses damaged, unknown and incomplete ones."""

import contextlib
import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headway.core.checkpoint.format.chunks import ChunkGrid
from headway.core.checkpoint.format.chunks import TensorChunk as Chunk
from headway.core.checkpoint.format.entries import ALGORITHM, ITEM_BYTES, PIECE, TensorEntry, WrittenFile
from headway.core.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    Manifest,
    _compute_digest,
    read_manifest,
)
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES


def build_manifest():
    """Return a manifest with a scalar, a tensor in two chunks, a grid over two files, a tied tensor, and a state."""
    two_chunks = (Chunk((0, 0), (2, 3), "model-00000.safetensors", "w0"), Chunk((2, 0), (1, 3), "extra/b", "w1"))
    grid = ChunkGrid("model/0/grid", [[(2, 2)]], "model-*.safetensors", [(0, 1, 2)])
    tensors = {
        "model/0/scale": TensorEntry((), "bfloat16", (Chunk((), (), "model-00000.safetensors", "scale"),)),
        "model/0/weight": TensorEntry((3, 3), "float32", two_chunks),
        "model/0/grid": TensorEntry((4,), "int64", grid),
    }
    files = {
        "model-00000.safetensors": WrittenFile("model-00000.safetensors", PIECE + 1, ("0" * 32, "1" * 32)),
        "model-00001.safetensors": WrittenFile("model-00001.safetensors", 400, ("2" * 32,)),
        "extra/b": WrittenFile("extra/b", 100, ("3" * 32, "4" * 32), piece=64),
    }
    return Manifest(
        tensors, files, {"model/0/tied": "model/0/weight"}, {"rng": [1, "é"]}, {"num_updates": 7, "world_size": 2}
    )


def encode_content(content, **header):
    """Return the bytes of a manifest with this content and a matching SHA-256.

    Args:
        content: Content of the manifest, as JSON values.
        header: Values that replace or extend those beside the content.
    """
    whole = {"format": FORMAT, "version": VERSION, "sha256": _compute_digest(content), "content": content} | header
    return json.dumps(whole).encode()


def decode_content():
    return json.loads(build_manifest().encode())["content"]


# -------------------------------------------------------------------- round trip


def test_decoding_the_encoded_bytes_returns_an_equal_manifest():
    manifest = build_manifest()
    decoded = Manifest.decode(manifest.encode())
    assert decoded == manifest
    assert decoded.encode() == manifest.encode()
    assert decoded.tensors["model/0/grid"].chunks[1] == Chunk((2,), (2,), "model-00001.safetensors", "model/0/grid")
    assert manifest.does_round_trip()


def test_encoded_manifest_has_the_documented_layout():
    data = build_manifest().encode()
    whole = json.loads(data)
    content = whole.pop("content")
    assert data.endswith(b"}\n")
    assert whole == {"format": "headway checkpoint", "version": 3, "sha256": _compute_digest(content)}
    assert content["tensors"]["model/0/scale"] == {
        "shape": [],
        "dtype": "bfloat16",
        "chunks": [{"offsets": [], "shape": [], "file": "model-00000.safetensors", "key": "scale"}],
    }
    assert content["tensors"]["model/0/grid"] == {
        "shape": [4],
        "dtype": "int64",
        "grid": {"sizes": [[[2, 2]]], "file": "model-*.safetensors", "parts": [[0, 1, 2]]},
    }
    assert content["files"]["model-00001.safetensors"] == {"bytes": 400, ALGORITHM: ["2" * 32]}
    assert content["files"]["extra/b"] == {"bytes": 100, ALGORITHM: ["3" * 32, "4" * 32], "piece": 64}
    assert content["aliases"] == {"model/0/tied": "model/0/weight"}
    assert (content["state"], content["about"]) == ({"rng": [1, "é"]}, {"num_updates": 7, "world_size": 2})


def test_manifest_without_tensors_and_files_round_trips():
    assert Manifest.decode(Manifest({}, {}).encode()) == Manifest({}, {})


def test_does_round_trip_is_false_if_decoding_changes_a_value():
    manifest = build_manifest()
    misnamed = {**manifest.files, "extra/b": replace(manifest.files["extra/b"], name="extra/c")}
    assert not replace(manifest, files=misnamed).does_round_trip()


def test_does_round_trip_raises_if_a_load_would_refuse_the_bytes():
    manifest = build_manifest()
    del (files := dict(manifest.files))["extra/b"]
    with pytest.raises(CheckpointError, match="in 'extra/b', which the manifest does not list"):
        replace(manifest, files=files).does_round_trip()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes", {(1, 2): 3}])
def test_state_that_json_cannot_hold_is_refused(value):
    with pytest.raises(CheckpointError, match="the state cannot be written as JSON"):
        replace(build_manifest(), state={"x": value}).encode()


def test_sha256_depends_on_the_content_and_not_on_its_order():
    manifest = build_manifest()
    reversed_tensors = dict(reversed(manifest.tensors.items()))
    assert replace(manifest, tensors=reversed_tensors).sha256 == manifest.sha256
    assert Manifest.decode(manifest.encode()).sha256 == manifest.sha256 == json.loads(manifest.encode())["sha256"]
    for change in ({"state": {}}, {"about": {"num_updates": 8}}, {"aliases": {}}):
        assert replace(manifest, **change).sha256 != manifest.sha256


# -------------------------------------------------------------------- damaged bytes


def test_changed_bit_in_any_byte_is_detected():
    manifest = replace(build_manifest(), state={})  # without "é": JSON accepts its escape in either case of the digits
    data = manifest.encode()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            Manifest.decode(bytes(damaged))


def test_every_truncated_manifest_is_refused():
    data = build_manifest().encode()
    for length in range(len(data) - 1):  # the last byte is a line break, which JSON does not need
        with pytest.raises(CheckpointError):
            Manifest.decode(data[:length], "/run/manifest.json")
    assert Manifest.decode(data[:-1]) == build_manifest()


def test_changed_content_is_reported_as_damage_with_the_path():
    whole = json.loads(build_manifest().encode())
    whole["content"]["about"]["num_updates"] = 8
    with pytest.raises(CheckpointError, match=r"^/run/manifest\.json is damaged: .*SHA-256 differs"):
        Manifest.decode(json.dumps(whole).encode(), "/run/manifest.json")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[" * 100_000])
def test_bytes_that_are_not_json_are_refused(data):
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        Manifest.decode(data)


# -------------------------------------------------------------------- format and version


@pytest.mark.parametrize("whole", [None, 3, [], "manifest", {}, {"format": "other"}, {"version": VERSION}])
def test_json_of_another_program_is_not_a_manifest(whole):
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest of a Headway checkpoint"):
        Manifest.decode(json.dumps(whole).encode())


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, str(VERSION), None, [VERSION]])
def test_unknown_version_is_named_with_the_supported_one(version):
    with pytest.raises(CheckpointError) as exc_info:
        Manifest.decode(encode_content(decode_content(), version=version))
    assert f"is of version {version!r} of the format; this Headway reads {VERSION}" in str(exc_info.value)


def test_unknown_version_is_reported_before_the_content_is_checked():
    with pytest.raises(CheckpointError, match="of version 4 of the format"):
        Manifest.decode(json.dumps({"format": FORMAT, "version": 4, "data": "of a later Headway"}).encode())


# -------------------------------------------------------------------- missing and invalid fields


@pytest.mark.parametrize("path", [
    "tensors", "files", "aliases", "state", "about", "tensors/model|0|weight/shape", "tensors/model|0|weight/dtype",
    "tensors/model|0|weight/chunks", "tensors/model|0|weight/chunks/0/offsets", "tensors/model|0|weight/chunks/0/shape",
    "tensors/model|0|weight/chunks/0/file", "tensors/model|0|weight/chunks/0/key", "tensors/model|0|grid/grid/sizes",
    "tensors/model|0|grid/grid/file", "tensors/model|0|grid/grid/parts", "files/extra|b/bytes", "files/extra|b/xxh3_128",
])  # fmt: skip
def test_missing_field_is_refused_and_named(path):
    content = parent = decode_content()
    *steps, name = [part.replace("|", "/") for part in path.split("/")]
    for step in steps:
        parent = parent[int(step) if isinstance(parent, list) else step]
    del parent[name]
    with pytest.raises(CheckpointError, match=f"cannot be read: KeyError: '{name}'"):
        Manifest.decode(encode_content(content))


@pytest.mark.parametrize("header", ["sha256", "content"])
def test_missing_hash_or_content_is_reported_as_damage(header):
    whole = json.loads(build_manifest().encode())
    del whole[header]
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.decode(json.dumps(whole).encode())


@pytest.mark.parametrize(("section", "name", "value", "message"), [
    ("tensors", "model/0/new", {"shape": [1], "dtype": "float33", "chunks": []}, "unknown dtype 'float33'"),
    ("tensors", "model/0/new", {"shape": [1], "dtype": "uint8", "chunks": []}, "do not make up its shape"),
    ("tensors", "model/0/new", {"shape": [-1], "dtype": "uint8", "chunks": []}, "-1 where a whole number"),
    ("tensors", "model/0/new", {"shape": [1.0], "dtype": "uint8", "chunks": []}, "1.0 where a whole number"),
    ("tensors", "model/0/new", {"shape": [True], "dtype": "uint8", "chunks": []}, "True where a whole number"),
    ("tensors", "model/0/new", {"shape": [1], "dtype": "uint8", "chunks": [
        {"offsets": [1], "shape": [1], "file": "extra/b", "key": "new"}]}, "is outside of"),
    ("tensors", "model/0/new", {"shape": [1], "dtype": "uint8", "chunks": [
        {"offsets": [0], "shape": [1], "file": 3, "key": "new"}]}, "3 where a name belongs"),
    ("aliases", "model/0/tied", "model/0/absent", "'model/0/absent', which is not a tensor of its own"),
    ("aliases", "model/0/scale", "model/0/weight", "the tied name 'model/0/scale' stands for"),
    ("files", "extra/b", {"bytes": 100, "xxh3_128": ["3", "4"]}, "2 hashes of 'extra/b', which has 1 block$"),
    ("files", "extra/b", {"bytes": 100, "xxh3_128": [3], "piece": 100}, "1 hashes of 'extra/b'"),
    ("files", "extra/b", {"bytes": 100, "xxh3_128": ["3", "4"], "piece": 0}, "0 where a whole number, 1 or more"),
    ("files", "../b", {"bytes": 1, "xxh3_128": ["3"]}, "which is not in its folder"),
    ("files", MANIFEST, {"bytes": 1, "xxh3_128": ["3"]}, "which is not in its folder"),
])  # fmt: skip
def test_invalid_entry_is_refused(section, name, value, message):
    content = decode_content()
    content[section][name] = value
    with pytest.raises(CheckpointError, match=message):
        Manifest.decode(encode_content(content))


@pytest.mark.parametrize("section", ["state", "about"])
def test_state_and_about_must_be_objects(section):
    with pytest.raises(CheckpointError, match="state and about must be objects"):
        Manifest.decode(encode_content({**decode_content(), section: [1]}))


# -------------------------------------------------------------------- sizes, pieces and subfolders


def test_sizes_are_computed_from_dtypes_and_files():
    manifest = build_manifest()
    assert {name: entry.num_bytes for name, entry in manifest.tensors.items()} == {
        "model/0/scale": 2, "model/0/weight": 36, "model/0/grid": 32,
    }  # fmt: skip
    assert manifest.num_bytes() == PIECE + 1 + 400 + 100


def test_every_item_size_is_that_of_torch():

    for name, size in ITEM_BYTES.items():
        if dtype := getattr(torch, name, None):  # some dtypes are newer than the oldest supported torch
            assert dtype.itemsize == size, name
    assert {"float32", "bfloat16", "float8_e4m3fn", "bool"} <= ITEM_BYTES.keys()


def test_pieces_cover_a_file_without_gaps():
    assert WrittenFile("f", 150, ("a", "b", "c"), piece=64).pieces() == [(0, 64, "a"), (64, 64, "b"), (128, 22, "c")]
    assert WrittenFile("f", 128, ("a", "b"), piece=64).pieces() == [(0, 64, "a"), (64, 64, "b")]
    assert WrittenFile("empty", 0, ("a",)).pieces() == [(0, 0, "a")]


def test_moved_manifest_refers_to_files_in_the_subfolder():
    manifest = build_manifest()
    moved = manifest.with_files_in("part")
    assert set(moved.files) == {f"part/{name}" for name in manifest.files}
    assert all(name == written.name for name, written in moved.files.items())
    for name, entry in manifest.tensors.items():
        expected = [replace(chunk, file=f"part/{chunk.file}") for chunk in entry.chunks]
        assert list(moved.tensors[name].chunks) == expected
    assert (moved.aliases, moved.state, moved.about) == (manifest.aliases, manifest.state, manifest.about)
    assert Manifest.decode(moved.encode()) == moved
    assert moved.sha256 != manifest.sha256


# -------------------------------------------------------------------- reading a folder


def test_read_manifest_opens_no_other_file(tmp_path):
    (tmp_path / MANIFEST).write_bytes(build_manifest().encode())
    assert read_manifest(tmp_path) == build_manifest()  # none of the listed files exists


def test_read_manifest_names_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a committed checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)


def test_read_manifest_names_the_path_of_a_damaged_file(tmp_path):
    (tmp_path / MANIFEST).write_bytes(build_manifest().encode()[:-40])
    with pytest.raises(CheckpointError) as exc_info:
        read_manifest(tmp_path)
    assert str(exc_info.value).startswith(f"{tmp_path / MANIFEST} cannot be read: JSONDecodeError")


SMALL = Manifest({"a": TensorEntry((4, 2), "float32", (Chunk((0, 0), (2, 2), "f", "a"), Chunk((2, 0), (2, 2), "f", "b")))},
                 {"f": WrittenFile("f", 40, ("0" * 32,))}, {"t": "a"}, {"x": [1]}, {"y": 2})  # fmt: skip


@pytest.mark.parametrize("change", [
    lambda c: c["tensors"]["a"]["chunks"].pop(), lambda c: c["tensors"]["a"]["chunks"][1].update(offsets=[1, 0]),
    lambda c: c["tensors"]["a"]["chunks"][1].update(offsets=[3, 0]), lambda c: c["tensors"]["a"].update(dtype="load"),
    lambda c: c["tensors"]["a"].update(shape=[-4, 2]), lambda c: c["tensors"]["a"]["chunks"][0].update(file="g"),
    lambda c: c["files"].update({"../up": {"bytes": 1, "xxh3_128": [""]}}), lambda c: c["aliases"].update(z="none"),
    lambda c: c["files"]["f"].update(xxh3_128=[]), lambda c: c["files"]["f"].update(xxh3_128=["", ""]),
    lambda c: c["files"]["f"].update(xxh3_128="0"), lambda c: c["files"]["f"].update(xxh3_128=[1]),
    lambda c: c["files"]["f"].update(bytes=True), lambda c: c.pop("state"), lambda c: c.update(tensors=[]),
])  # fmt: skip
def test_contradictory_manifest_is_refused(change):
    whole = json.loads(SMALL.encode())
    change(whole["content"])
    whole["sha256"] = _compute_digest(whole["content"])
    with pytest.raises(CheckpointError):
        Manifest.decode(json.dumps(whole).encode())


def test_unknown_version_other_json_and_damage_are_distinguished():
    whole = json.loads(SMALL.encode())
    for version in (1, 2, 4, None, True, [3]):
        with pytest.raises(CheckpointError, match=r"of version .* of the format; this Headway reads 3"):
            Manifest.decode(json.dumps({**whole, "version": version}).encode())
    with pytest.raises(CheckpointError, match="not a manifest"):
        Manifest.decode(b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.decode(SMALL.encode().replace(b'"y":2', b'"y":3'))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_mutated_manifest_is_refused_or_decodes_to_an_equal_one(data):
    raw = bytearray(SMALL.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set":
            raw[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[place : place + data.draw(st.integers(1, 40))]
        else:
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        if not raw:
            raw = bytearray(b" ")
    with contextlib.suppress(CheckpointError):
        assert Manifest.decode(bytes(raw)) == SMALL  # only white space can differ
