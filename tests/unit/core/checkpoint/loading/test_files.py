import contextlib
import json
import tracemalloc
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given, settings
from safetensors.torch import load_file, safe_open

from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import MANIFEST, Chunk, Manifest, TensorEntry, WrittenFile, read_manifest
from headway.core.checkpoint.format.tensors import hash_file, write_shards
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.state import CollectedState
from headway.core.checkpoint.stores import disk
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES
from tests.unit.core.checkpoint.reading import read_tensors

TENSORS = {
    "model/0/a": torch.arange(12.0).reshape(3, 4), "model/0/b": torch.randn(5).to(torch.bfloat16), "model/0/empty": torch.zeros(0, 3),
    "model/0/scalar": torch.tensor(3), "optimizer/0/a/exp_avg": torch.ones(4, 3).t(), "custom/0/c": torch.tensor([1 + 2j]),
    "model/0/bool": torch.tensor([True, False]), "model/0/f8": torch.ones(3).to(torch.float8_e5m2fnuz),
}  # fmt: skip


def job(folder, nonce="0" * 16, **more):
    share = writer.DiskShare(**{name: more.pop(name) for name in ("part", "num_parts", "leads") if name in more})
    content = {"tensors": TENSORS, "aliases": {"model/0/tied": "model/0/a"}, "state": {"clock": [1]}}
    content = CollectedState(**{name: more.pop(name, value) for name, value in content.items()})
    given = {"final": folder / "checkpoint_1", "nonce": nonce, "share": share, "policy": writer.SavePolicy(), "content": content,
             "about": {"num_updates": 7}}  # fmt: skip
    return writer.SaveJob(**{**given, **more})


def save(folder, **more):
    made = job(folder, **more)
    writer.begin(made)
    writer.announce(made)
    return writer.write(made)


@pytest.mark.parametrize(("about", "run"), [({"run": "abc"}, "abc"), ({}, None), ({"run": None}, None)])
def test_a_checkpoint_names_its_run_or_none(tmp_path, about, run):
    save(tmp_path, about=about)
    assert folders.read_run_id(tmp_path / "checkpoint_1") == run
    assert folders.read_run_id(tmp_path / "missing") is None


def test_what_was_saved_is_read(tmp_path):
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


def test_any_tool_reads_the_weights(tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "checkpoint_1" / "model-00000.safetensors")
    assert torch.equal(weights["model/0/a"], TENSORS["model/0/a"])
    with safe_open(tmp_path / "checkpoint_1" / "model-00000.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_two_parts_make_one_checkpoint(tmp_path):
    lead = job(tmp_path, num_parts=2)
    other = job(tmp_path, num_parts=2, part=1, leads=False)
    writer.begin(lead)
    writer.announce(lead)
    writer.announce(other)
    assert writer.write(other) is None
    writer.write(lead)
    found = verify_checkpoint(tmp_path / "checkpoint_1")
    assert len(found.files) > 2
    assert dict(read_tensors(tmp_path / "checkpoint_1", found)).keys() == TENSORS.keys()


def test_a_part_that_fails_ends_the_save(tmp_path):
    save(tmp_path)
    lead = job(tmp_path, nonce="1" * 16, num_parts=2)
    writer.begin(lead)
    writer.announce(lead)
    with pytest.raises(CheckpointError, match=r"part 1 of 2 .* could not be written"):
        writer.write(lead)
    writer.abandon(lead)
    verify_checkpoint(tmp_path / "checkpoint_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_saving_again_exchanges_the_checkpoint(tmp_path):
    save(tmp_path)
    save(tmp_path, nonce="1" * 16, about={"num_updates": 8})
    assert read_manifest(tmp_path / "checkpoint_1").about == {"num_updates": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_saving_again_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.sys, "platform", "other")
    save(tmp_path)
    save(tmp_path, nonce="1" * 16, about={"num_updates": 8})
    assert read_manifest(tmp_path / "checkpoint_1").about == {"num_updates": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_a_checkpoint_renamed_during_a_killed_commit_is_found_and_kept(tmp_path):
    save(tmp_path)
    (tmp_path / "checkpoint_1").rename(tmp_path / ".replaced-checkpoint_1")
    assert folders.find_store(tmp_path / "checkpoint_1").locate().name == ".replaced-checkpoint_1"
    folders.find_store(tmp_path).sweep()
    assert folders.find_store(tmp_path / "checkpoint_1").locate().name == ".replaced-checkpoint_1"
    save(tmp_path, nonce="1" * 16)
    folders.find_store(tmp_path).sweep()
    assert not (tmp_path / ".replaced-checkpoint_1").exists()


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="contains files, but no checkpoint"):
        save(tmp_path)
    assert (tmp_path / "checkpoint_1" / "thesis.tex").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        save(tmp_path, final=tmp_path / "file")


def test_rotation_goes_by_number_and_spares_the_protected(tmp_path):
    for number in (1, 2, 9, 10, 11):
        save(tmp_path, final=tmp_path / f"checkpoint_{number}", nonce=f"{number:016x}")
    (tmp_path / "notes").mkdir()
    folders.remove_old_checkpoints(tmp_path, 2, [tmp_path / "checkpoint_1"])
    assert [path.name for path in folders.list_committed(tmp_path)] == [
        "checkpoint_11",
        "checkpoint_10",
        "checkpoint_1",
    ]
    assert (tmp_path / "notes").exists()


def test_only_leftovers_are_swept(tmp_path):
    save(tmp_path)
    for name in (
        ".staging-checkpoint_1-0123456789abcdef",
        ".removing-checkpoint_0",
        ".staging-checkpoint_1-x-0123456789abcdef",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".hidden").mkdir()
    assert [path.name for path in folders.find_store(tmp_path).sweep("checkpoint_1")] == [
        ".staging-checkpoint_1-0123456789abcdef"
    ]
    folders.find_store(tmp_path).sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "checkpoint_1", "latest"]


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


def test_a_missing_manifest_is_no_checkpoint(tmp_path):
    save(tmp_path)
    (tmp_path / "checkpoint_1" / MANIFEST).unlink()
    assert folders.list_committed(tmp_path) == []
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        folders.find_store(tmp_path / "checkpoint_1").locate()


SMALL = Manifest({"a": TensorEntry((4, 2), "float32", (Chunk((0, 0), (2, 2), "f", "a"), Chunk((2, 0), (2, 2), "f", "b")))},
                 {"f": WrittenFile("f", 40, ("0" * 32,))}, {"t": "a"}, {"x": [1]}, {"y": 2})  # fmt: skip


def test_chunks_are_joined(tmp_path):
    whole = torch.arange(8.0).reshape(4, 2)
    [written] = write_shards(tmp_path, {"f": [("a", whole[:2]), ("b", whole[2:])]})
    found = replace(SMALL, files={"f": written})
    assert torch.equal(dict(read_tensors(tmp_path, found))["a"], whole)


@pytest.mark.parametrize("change", [
    lambda c: c["tensors"]["a"]["chunks"].pop(), lambda c: c["tensors"]["a"]["chunks"][1].update(offsets=[1, 0]),
    lambda c: c["tensors"]["a"]["chunks"][1].update(offsets=[3, 0]), lambda c: c["tensors"]["a"].update(dtype="load"),
    lambda c: c["tensors"]["a"].update(shape=[-4, 2]), lambda c: c["tensors"]["a"]["chunks"][0].update(file="g"),
    lambda c: c["files"].update({"../up": {"bytes": 1, "xxh3_128": [""]}}), lambda c: c["aliases"].update(z="none"),
    lambda c: c["files"]["f"].update(xxh3_128=[]), lambda c: c["files"]["f"].update(xxh3_128=["", ""]),
    lambda c: c["files"]["f"].update(xxh3_128="0"), lambda c: c["files"]["f"].update(xxh3_128=[1]),
    lambda c: c["files"]["f"].update(bytes=True), lambda c: c.pop("state"), lambda c: c.update(tensors=[]),
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(change):
    whole = json.loads(SMALL.encode())
    change(whole["content"])
    from headway.core.checkpoint.format.manifest import _digest

    whole["sha256"] = _digest(whole["content"])
    with pytest.raises(CheckpointError):
        Manifest.decode(json.dumps(whole).encode())


def test_another_version_or_file_is_named():
    whole = json.loads(SMALL.encode())
    for version in (1, 2, 4, None, True, [3]):
        with pytest.raises(CheckpointError, match=r"of version .* of the format; this Headway reads 3"):
            Manifest.decode(json.dumps({**whole, "version": version}).encode())
    with pytest.raises(CheckpointError, match="not a manifest"):
        Manifest.decode(b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.decode(SMALL.encode().replace(b'"y":2', b'"y":3'))


def test_files_are_hashed_with_xxh3(tmp_path):
    save(tmp_path)
    folder = tmp_path / "checkpoint_1"
    whole = json.loads((folder / MANIFEST).read_text())
    assert whole["version"] == 3
    for name, entry in whole["content"]["files"].items():
        assert entry == {
            "bytes": (folder / name).stat().st_size,
            "xxh3_128": [xxhash.xxh3_128_hexdigest((folder / name).read_bytes())],
        }


def test_reading_takes_little_memory(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(40_000_000))
    tracemalloc.start()
    hash_file(path, "large")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_a_fuzzed_manifest_is_an_error_or_decodes_equally(data):
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
        assert Manifest.decode(bytes(raw)) == SMALL  # white space may differ


def test_a_fuzzed_shard_is_an_error_or_reads_equally(tmp_path):
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


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_parts_are_contiguous_and_balanced(sizes, num_parts):
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    parts = writer.partition(named, num_parts)
    assert [name for part in parts for name in part] == list(named)
    if sizes:
        heaviest = max(sum(named[name] for name in part) for part in parts)
        assert heaviest <= sum(sizes) / num_parts + max(sizes)


LARGE = {
    "model/0/w": torch.randn(3, 2_000_003), "optimizer/0/w/exp_avg": torch.randn(5_000_017), "optimizer/0/w/step": torch.tensor(3.0),
    "optimizer/0/w/flags": torch.randn(1001) > 0, "optimizer/0/w/odd": torch.randn(77).double(),
    "optimizer/0/w/none": torch.zeros(0, 4),
    "custom/0/c": torch.randn(9).to(torch.complex64), "custom/0/t": torch.arange(35.0).reshape(5, 7).t(),
}  # fmt: skip


@pytest.mark.parametrize("is_verified", [True, False])
def test_the_state_is_read_into_memory_of_its_own(tmp_path, is_verified):
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
        read[name].zero_()  # no view of a file, nor of one another
    assert torch.equal(read_state(folder, manifest, True)[0]["optimizer/0/w/exp_avg"], LARGE["optimizer/0/w/exp_avg"])


@pytest.mark.parametrize("place", [3, 200, 17_000_000, -1])
def test_a_flipped_byte_is_found_and_its_piece_named(tmp_path, place):
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


def test_a_fuzzed_header_is_an_error_or_reads_equally(tmp_path):
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
