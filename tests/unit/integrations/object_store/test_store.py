"""Test paths in object stores, files in parts, and checkpoints as objects, on a store in memory."""

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from headway.common import object_path
from headway.common.object_client import ObjectClient
from headway.common.object_path import THREADS, ObjectPath, to_path
from headway.core.checkpoint import folders
from headway.core.checkpoint.format import tensors as tensors_of_checkpoints
from headway.core.checkpoint.format.chunks import ChunkGrid, TensorChunk
from headway.core.checkpoint.format.entries import TensorEntry
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.format.tensors import PieceHashes, write_shards
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.core.weights import file_sinks
from headway.core.weights.export import save_weights
from headway.errors import CheckpointError, ConfigError, ObjectStoreError
from headway.integrations.object_store import store as object_store
from headway.integrations.object_store.lock import ObjectLock
from headway.integrations.object_store.log_mirror import MirroredFolder, fetch_log
from headway.integrations.object_store.store import FetchedCheckpoint, ObjectStore


def test_urls_are_distinguished_from_folders():
    path = to_path("s3://bucket/run/a")
    assert isinstance(path, ObjectPath)
    assert (str(path), path.name, str(path.parent), path.key) == ("s3://bucket/run/a", "a", "s3://bucket/run", "run/a")
    assert str(path.parent / "b" / "c") == "s3://bucket/run/b/c"
    assert str(path.with_name("a.lock")) == "s3://bucket/run/a.lock"
    assert to_path(path) is path
    assert path.absolute() == path == to_path("s3://bucket/run/a")
    assert {path: 1}[to_path("s3://bucket/run/a")] == 1
    assert to_path("gs://b/x").key == to_path("az://b/x").key == "x"
    for text in ("runs/a", "/s3/a", "s3:/a/b", "file://a", "C:/x"):
        assert type(to_path(text)) is type(Path()), text
    for wrong in (Path("s3://bucket/run"), "s3://"):
        with pytest.raises(ConfigError):
            to_path(wrong)
    with pytest.raises(TypeError, match="object store"):
        Path(path, "x").exists() or open(path).close()


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 5005])
def test_file_is_stored_in_parts(bucket, size):
    data, path = random.Random(size).randbytes(size), to_path("s3://bucket/a/file")
    with path.open("wb") as file:
        for start in range(0, size, 700):
            assert file.write(data[start : start + 700]) == len(data[start : start + 700])
        assert file.tell() == size
    parts = {each.key: each.num_bytes for each in bucket.list("a")}
    assert len(parts) == max(1, -(-size // 1000))
    assert parts["a/file"] == min(size, 1000)
    assert all(name == "a/file" or name.startswith("a/file.part-") for name in parts)
    with path.open() as file:
        assert file.read() == data
        assert file.seek(0, 2) == size
    for begin, end in ((0, size), (size // 3, size), (998, 1003)):
        if begin < end <= size:
            assert b"".join(path.read_range(begin, end)) == data[begin:end]
    with pytest.raises(FileNotFoundError):
        to_path("s3://bucket/a/fil").open()


def test_failed_part_is_an_error(bucket, monkeypatch):
    def fail_to_put(self, key, data, replaces="any"):
        raise ObjectStoreError("no room")

    monkeypatch.setattr(ObjectClient, "put", fail_to_put)
    with pytest.raises(ObjectStoreError, match="no room"), to_path("s3://bucket/a").open("wb") as file:
        file.write(bytes(10_000))


def test_conditional_writes(bucket):
    first = bucket.put("x", b"1", None)
    assert first is not None
    assert bucket.put("x", b"2", None) is None
    assert bucket.put("x", b"1", None) is not None, "the client's own write, whose answer was lost"
    second = bucket.put("x", b"2", first)
    assert second is not None
    assert bucket.put("x", b"3", first) is None
    assert bucket.get("x")[0] == b"2"
    assert bucket.get("y") is None
    assert bucket.get_size("x") == 1
    bucket.delete(["x", "y"])
    assert bucket.get_size("x") is None


def write_checkpoint(url, value=1.0, nonce="0123456789abcdef"):
    """Commit a checkpoint with one tensor in two files and another one in a single file. Return its folder."""
    final = to_path(url)
    staging = folders.find_store(final).get_staging(nonce)
    content = {
        f"model-{part:05d}.safetensors": [("model/0/w", torch.full((300, 4), value + part))] for part in range(2)
    }
    files = write_shards(
        staging, content | {"optimizer-00000.safetensors": [("optimizer/0/m", torch.full((10,), value))]}
    )
    tensors = {
        "model/0/w": TensorEntry(
            (600, 4), "float32", ChunkGrid("model/0/w", [[(300, 2)], [(4, 1)]], "model-*.safetensors", [(0, 1, 2)])
        ),
        "optimizer/0/m": TensorEntry((10,), "float32", (TensorChunk((0,), (10,), "optimizer-00000.safetensors", "optimizer/0/m"),)),
    }  # fmt: skip
    manifest = Manifest(tensors, {each.name: each for each in files}, {}, {}, {"name": final.name, "run": "r"})
    folders.commit_checkpoint(staging, final, manifest)
    return final


def test_checkpoint_is_written_read_and_replaced(bucket):
    final = write_checkpoint("s3://bucket/checkpoint_1")
    manifest = verify_checkpoint(final)
    assert set(manifest.files) == {f"data-0123456789abcdef/{name}" for name in
                                   ("model-00000.safetensors", "model-00001.safetensors", "optimizer-00000.safetensors")}  # fmt: skip
    tensors, _ = read_state(final, manifest, True)
    assert torch.equal(tensors["model/0/w"], torch.cat([torch.full((300, 4), 1.0), torch.full((300, 4), 2.0)]))
    write_checkpoint("s3://bucket/checkpoint_1", 5.0, "f" * 16)
    assert read_state(final, read_manifest(final), True)[0]["optimizer/0/m"][0] == 5
    assert all("f" * 16 in name or name == "manifest.json" for name, _ in final.list_objects())
    assert [path.name for path in folders.list_committed(final.parent)] == ["checkpoint_1"]


def test_commit_needs_all_parts(bucket):
    final = write_checkpoint("s3://bucket/checkpoint_1")
    manifest = read_manifest(final)
    key = (final / "data-0123456789abcdef" / "model-00001.safetensors").make_part_key(1)
    for spoil in (lambda: bucket.put(key, b"short"), lambda: bucket.delete([key])):
        spoil()
        assert key in (ObjectStore(final).find_absent(manifest) or "")
    staging = to_path("s3://bucket/checkpoint_2/data-0123456789abcdef")
    bare = Manifest({}, {"x": PieceHashes().make_entry("x")}, {}, {}, {})
    with pytest.raises(CheckpointError, match="is not there"):
        folders.commit_checkpoint(staging, staging.parent, bare)
    assert not (staging.parent / "manifest.json").exists()


def test_oldest_checkpoint_is_removed_with_its_manifest_first(bucket):
    for number in range(3):
        write_checkpoint(f"s3://bucket/checkpoint_{number}")
    place = to_path("s3://bucket")
    bucket.put("checkpoint_0/notes.txt", b"mine")
    removed = folders.remove_old_checkpoints(place, 1, [place / "checkpoint_1"])
    assert [path.name for path in removed] == ["checkpoint_0"]
    assert [each.key for each in bucket.list("checkpoint_0")] == ["checkpoint_0/notes.txt"]
    assert [path.name for path in folders.list_committed(place)] == ["checkpoint_2", "checkpoint_1"]


def test_ranges_are_fetched_once_and_compared(bucket, monkeypatch):
    final = write_checkpoint("s3://bucket/checkpoint_1")
    manifest = read_manifest(final)
    name = "data-0123456789abcdef/model-00000.safetensors"
    asked = []
    plain = ObjectClient.get_range
    monkeypatch.setattr(
        ObjectClient,
        "get_range",
        lambda self, key, start, end: asked.append(end - start) or plain(self, key, start, end),
    )
    some = FetchedCheckpoint(final, manifest)
    some.download_ranges({name: [(0, 10)]})
    total = sum(asked)
    some.download_ranges({name: [(3, 9)]})
    assert sum(asked) == total <= 16384
    local = some.folder / name
    assert local.stat().st_size == manifest.files[name].num_bytes
    bucket.put((final / name).make_part_key(2), bytes(1000))
    with pytest.raises(CheckpointError, match="is damaged: its bytes"):
        FetchedCheckpoint(final, manifest).download_ranges({name: [(0, manifest.files[name].num_bytes)]})
    folder = some.folder
    del some
    assert not folder.exists()


def test_pieces_are_small_in_an_object_store_only(bucket, tmp_path):
    tensors = [("x", torch.zeros(200_000))]
    [local] = write_shards(tmp_path, {"a.safetensors": tensors})
    [there] = write_shards(to_path("s3://bucket"), {"a.safetensors": tensors})
    [most] = write_shards(to_path("s3://bucket"), {"b.safetensors": tensors}, 2**16)
    assert [len(each.digests) for each in (local, there, most)] == [1, 49, 1]
    assert [each.piece for each in (local, there, most)] == [2**24, 2**14, 2**24]
    back = Manifest.decode(Manifest({}, {"a": there, "b": local}).encode()).files
    assert back["a"].pieces()[-1][0] == 48 * 2**14
    assert "piece" not in back["b"].encode()


def test_log_continues_where_it_ended(bucket):
    mirror = MirroredFolder(to_path("s3://bucket/run/digits"))
    (mirror.folder / "log.jsonl").write_text("one\n" * 500)
    (mirror.folder / "pictures").mkdir()
    (mirror.folder / "pictures" / "a.png").write_bytes(b"x")
    mirror.send()
    asked = len(bucket.list("run"))
    assert asked == 3, "the log in two parts, and a picture"
    again = MirroredFolder(to_path("s3://bucket/run/digits"))
    assert (again.folder / "log.jsonl").read_text() == "one\n" * 500
    found = fetch_log(to_path("s3://bucket/run"))
    assert found is not None
    assert (found.parent.name, found.read_text()) == ("digits", "one\n" * 500)
    assert fetch_log(to_path("s3://bucket/elsewhere")) is None
    for each in (mirror, again):
        each._send_and_remove()
        assert not each.folder.exists()


def test_files_that_cannot_be_read_do_not_stop_the_mirror(bucket, monkeypatch, caplog):
    mirror = MirroredFolder(to_path("s3://bucket/run/digits"))
    for name in ("a", "b", "c"):
        (mirror.folder / name).write_text(name)
    failures = {"a": FileNotFoundError(), "b": PermissionError("not readable")}
    plain = MirroredFolder._send_changed

    def send_changed(self, path):
        if path.name in failures:
            raise failures[path.name]
        plain(self, path)

    monkeypatch.setattr(MirroredFolder, "_send_changed", send_changed)
    mirror.send()
    assert "b could not be sent to the object store: not readable" in caplog.text
    del failures["b"]
    mirror.send()
    assert sorted(each.key for each in bucket.list("run")) == ["run/digits/b", "run/digits/c"]
    mirror._send_and_remove()


def test_lock_recognizes_its_own_unanswered_writes(bucket, monkeypatch):
    held = ObjectLock(to_path("s3://bucket/checkpoints"), "run", "1")
    plain = ObjectClient.put

    def put_without_answer(self, key, data, replaces="any"):
        plain(self, key, data, replaces)
        raise ObjectStoreError("no answer")

    monkeypatch.setattr(ObjectClient, "put", put_without_answer)
    with pytest.raises(ObjectStoreError):
        held.check()
    monkeypatch.setattr(ObjectClient, "put", plain)
    held.check()
    bucket.put("checkpoints.lock", b"{}")
    with pytest.raises(CheckpointError, match="was taken"):
        held.check()
    held.release()
    assert bucket.get("checkpoints.lock")[0] == b"{}"


@pytest.mark.parametrize("has_come_through", [True, False])
def test_unanswered_commit_keeps_its_files(bucket, monkeypatch, has_come_through):
    write_checkpoint("s3://bucket/checkpoint_1")
    plain = ObjectClient.put

    def put_without_answer(self, key, data, replaces="any"):
        if not key.endswith("manifest.json"):
            return plain(self, key, data, replaces)
        if has_come_through:
            plain(self, key, data, replaces)
        raise ObjectStoreError("no answer")

    monkeypatch.setattr(ObjectClient, "put", put_without_answer)
    with pytest.raises(ObjectStoreError):
        write_checkpoint("s3://bucket/checkpoint_2")
    monkeypatch.setattr(ObjectClient, "put", plain)
    final = to_path("s3://bucket/checkpoint_2")
    folders.find_store(final / "data-0123456789abcdef").remove_staging()
    if has_come_through:
        verify_checkpoint(final)
    else:
        assert not final.list_objects()


@pytest.mark.parametrize("has_former", [True, False])
@pytest.mark.parametrize("is_removed", [True, False])
def test_overtaken_commit_is_undone_if_it_lost_files(bucket, is_removed, has_former):
    final = write_checkpoint("s3://bucket/checkpoint_1")
    manifest = read_manifest(final)
    calls = []

    def check_lock():
        calls.append(1)
        if len(calls) == 2:
            if is_removed:
                bucket.delete([each.key for name, each in final.list_objects() if name.startswith("data-" + "a" * 16)])
            raise CheckpointError("was taken by another one")

    staging = final / ("data-" + "a" * 16)
    for name, each in final.list_objects():
        if "/" in name:
            bucket.put(f"{staging.key}/{name.split('/')[1]}", bucket.get(each.key)[0])
    files = {name.split("/")[1]: replace(each, name=name.split("/")[1]) for name, each in manifest.files.items()}
    bare = Manifest({}, files, {}, {}, {})
    former = bucket.get(f"{final.key}/manifest.json")[0]
    if not has_former:
        (final / "manifest.json").unlink()
    if is_removed:
        with pytest.raises(CheckpointError, match="taken"):
            ObjectStore(final).commit(staging, bare, check_lock)
        if has_former:  # the previous checkpoint is still there
            assert bucket.get(f"{final.key}/manifest.json")[0] == former
            verify_checkpoint(final)
        else:
            assert not (final / "manifest.json").exists()
    else:
        ObjectStore(final).commit(staging, bare, check_lock)
        verify_checkpoint(final)


@pytest.mark.parametrize("part", [1000, 2**14, 2**18])
def test_several_threads_send_the_same_bytes_as_one(bucket, monkeypatch, part):
    for module in (object_path, file_sinks):
        monkeypatch.setattr(module, "PART", part)
    torch.manual_seed(0)
    files = {
        "a.safetensors": [("x", torch.randn(900_000)), ("y", torch.randn(30, 40).t()), ("z", torch.randn(0, 3))],
        "b.safetensors": [(f"small {number}", torch.randn(number)) for number in range(200)],
    }
    several = write_shards(to_path("s3://bucket/several"), files, 3)
    monkeypatch.setattr(tensors_of_checkpoints, "THREADS", 0)
    one = write_shards(to_path("s3://bucket/one"), files, 3)
    assert several == one
    assert len(one[0].digests) > 3
    for written in one:
        paths = [to_path(f"s3://bucket/{folder}") / written.name for folder in ("one", "several")]
        expected, found = (b"".join(path.read_range(0, written.num_bytes)) for path in paths)
        assert found == expected


def test_part_that_a_thread_cannot_send_is_an_error(bucket, monkeypatch):
    def fail_to_put(self, key, data, replaces="any"):
        raise ObjectStoreError(f"no room for {key}")

    monkeypatch.setattr(ObjectClient, "put", fail_to_put)
    with pytest.raises(ObjectStoreError, match="no room for several/a"):
        write_shards(to_path("s3://bucket/several"), {"a": [("x", torch.ones(3))], "b": [("x", torch.ones(3))]})


class Crowd:
    """Lets each call of a function wait until four calls are in it at once, for at most ten seconds."""

    def __init__(self, real):
        self._real, self._num_inside, self._lock, self.has_met = real, 0, threading.Lock(), threading.Event()

    def __call__(self, *args):
        with self._lock:
            self._num_inside += 1
            if self._num_inside == THREADS:
                self.has_met.set()
        self.has_met.wait(10)
        try:
            return self._real(*args)
        finally:
            with self._lock:
                self._num_inside -= 1


def test_four_parts_are_sent_and_received_at_once(bucket, monkeypatch):
    part = 2**14
    for module in (object_path, file_sinks, object_store):
        monkeypatch.setattr(module, "PART", part)
    tensors = [("x", torch.arange(2.0 * part))]  # eight parts

    def meet_in(method, act):
        crowd = Crowd(getattr(ObjectClient, method))
        with monkeypatch.context() as patch:
            patch.setattr(ObjectClient, method, lambda *args: crowd(*args))
            made = act()
        assert crowd.has_met.is_set(), act
        return made

    staging = to_path("s3://bucket/run/data-0123456789abcdef")
    files = meet_in("put", lambda: write_shards(staging, {"model-00000.safetensors": tensors}))
    entry = TensorEntry((2 * part,), "float32", (TensorChunk((0,), (2 * part,), "model-00000.safetensors", "x"),))
    folders.commit_checkpoint(staging, staging.parent, Manifest({"x": entry}, {files[0].name: files[0]}, {}, {}, {}))
    meet_in("get_range", lambda: verify_checkpoint(staging.parent))
    manifest = read_manifest(staging.parent)
    name, written = next(iter(manifest.files.items()))
    meet_in(
        "get_range",
        lambda: FetchedCheckpoint(staging.parent, manifest).download_ranges({name: [(0, written.num_bytes)]}),
    )
    # save_model() writes a temporary file, and sends its parts.
    meet_in("put", lambda: save_weights(tensors, "s3://bucket/weights", "1GB"))
    with to_path("s3://bucket/weights/model.safetensors").open() as file:
        assert torch.equal(safetensors.torch.load(file.read())["x"], tensors[0][1])
