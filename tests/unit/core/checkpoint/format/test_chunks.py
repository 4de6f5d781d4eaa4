"""Test chunk grids: compared with lists of chunks, in manifests, written by several ranks, and hostile ones."""

import itertools
import json
import random
from dataclasses import replace
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headway.core.checkpoint.format.chunks import ChunkGrid, TensorChunk, intersect_box, iterate_overlapping
from headway.core.checkpoint.format.entries import TensorEntry, WrittenFile
from headway.core.checkpoint.format.manifest import Manifest, _compute_digest
from headway.core.checkpoint.loading.chunked import CheckpointFiles, ChunkedTensor
from headway.core.checkpoint.loading.files import open_tensors, read_state, verify_checkpoint
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.file_plan import make_sharded_entries, plan_own_boxes
from headway.core.checkpoint.saving.job import DiskShare, SaveJob, SavePolicy
from headway.core.checkpoint.state import CollectedState
from headway.core.weights.export import save_weights
from headway.core.weights.files import open_checkpoint
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit
from headway.errors import CheckpointError
from tests.sweep.fuzz import mutate
from tests.unit.core.checkpoint.amount import EXAMPLES
from tests.unit.core.checkpoint.reading import read_tensors

SPLITS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=0, max_size=3)


def iterate_chunks(sizes, writers):
    """Yield the chunks of a regular split one by one, in row-major order."""
    along = [list(zip(itertools.accumulate([0, *dim]), dim)) for dim in sizes]
    for place, rank in zip(itertools.product(*along), writers):
        yield TensorChunk(
            tuple(s for s, _ in place), tuple(n for _, n in place), f"model-{rank:05d}.safetensors", "model/0/a"
        )


def draw_split(sizes, draw, spare=3):
    """Return a split whose chunks are written by random ranks, of which `spare` write nothing."""
    count = prod(map(len, sizes))
    return TensorSplit(tuple(map(tuple, sizes)), tuple(draw.sample(range(count + spare), count)))


def build_grid(split):
    return ChunkGrid("model/0/a", split.size_runs, "model-*.safetensors", split.writer_progressions)


@settings(max_examples=EXAMPLES, deadline=None)
@given(SPLITS, st.randoms(use_true_random=False))
def test_grid_equals_its_chunks(sizes, draw):
    split = draw_split(sizes, draw)
    grid, boxes = build_grid(split), list(iterate_chunks(sizes, split.writers))
    assert list(grid) == boxes == [grid[number] for number in range(len(grid))] == grid[:]
    assert grid[-1] == boxes[-1]
    shape = grid.shape
    assert shape == tuple(map(sum, sizes))
    for _ in range(5):
        offsets = [draw.randrange(size) for size in shape]
        box = [draw.randint(0, size - start) for start, size in zip(offsets, shape)]
        expected = [chunk for chunk in boxes if prod(intersect_box(chunk, offsets, box)[1])]
        assert (
            list(iterate_overlapping(grid, offsets, box)) == list(iterate_overlapping(boxes, offsets, box)) == expected
        )


@settings(max_examples=EXAMPLES, deadline=None)
@given(SPLITS, st.randoms(use_true_random=False))
def test_manifest_round_trips_a_grid(sizes, draw):
    split = draw_split(sizes, draw)
    found = build_manifest(split, num_files=max(split.writers) + 1)
    data = found.encode()
    assert Manifest.decode(data) == found
    assert Manifest.decode(data).encode() == data


def build_manifest(split, num_files):
    grid = build_grid(split)
    files = {
        f"model-{n:05d}.safetensors": WrittenFile(f"model-{n:05d}.safetensors", 10**6, ("0" * 32,))
        for n in range(num_files)
    }
    return Manifest({"model/0/a": TensorEntry(grid.shape, "float32", grid)}, files)


@pytest.mark.parametrize("is_grid", [True, False])
def test_decoding_16384_chunks_is_not_quadratic(is_grid):
    """With quadratic work, this test would take minutes."""
    split = TensorSplit(((4,) * 16_384, (8,)), tuple(range(16_384)))
    found = build_manifest(split, 16_384)
    if not is_grid:
        entry = found.tensors["model/0/a"]
        found = replace(found, tensors={"model/0/a": replace(entry, chunks=tuple(entry.chunks))})
    data = found.encode()
    assert len(Manifest.decode(data).tensors["model/0/a"].chunks) == 16_384
    if is_grid:
        assert len(json.dumps(found.tensors["model/0/a"].encode())) < 200


def test_grids_of_many_ranks_take_little_space():
    """Encode 300 tensors that are split over 4,096 ranks (FSDP x TP) in less than 100 kB."""
    sizes = ((2,) * 4096, (16,))
    writers = tuple(shard * 8 + tp for tp in range(8) for shard in range(512))
    split = TensorSplit(sizes, writers)
    told = json.dumps(
        {f"model/0/{n}": TensorEntry((8192, 16), "float32", build_grid(split)).encode() for n in range(300)}
    )
    assert len(told) < 100_000


BAD = [
    ("sizes", [[[3, 2]], [[2, 1]]], "do not cover its shape"), ("sizes", [[[2, 2]]], "do not cover its shape"),
    ("sizes", [[[0, 5], [2, 2]], [[2, 1]]], "whole number, 1"), ("sizes", [[[2, 10**18]], [[2, 1]]], "do not cover its shape"),
    ("sizes", "ab", "cannot be read"), ("sizes", None, "cannot be read"), ("parts", [[0, 0, 2]], "whole number, 1"),
    ("parts", [[0, 1, 1], [0, 1, 1]], "two boxes of 'model/0/a' in one file"), ("parts", [[0, 1, 3]], "do not cover"),
    ("parts", [[1, 1, 2]], "does not list"), ("parts", [[0, 10**18, 2]], "does not list"), ("parts", [[0, True, 2]], "whole number"),
    ("file", "model.safetensors", "with one '\\*'"), ("file", "*-*", "with one '\\*'"), ("file", 3, "with one '\\*'"),
    ("file", "../*", "does not list"), ("sizes", [[[2, 2]], [[2.0, 1]]], "whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "told"), BAD)
def test_invalid_grid_is_refused(key, value, told):
    content = json.loads(build_manifest(TensorSplit(((2, 2), (2,)), (0, 1)), 2).encode())["content"]
    content["tensors"]["model/0/a"]["grid"][key] = value
    with pytest.raises(CheckpointError, match=told):
        Manifest.decode(seal_content(content))


def seal_content(content):
    """Return the bytes of a manifest with this content and a matching SHA-256."""
    return json.dumps(
        {"format": "headway checkpoint", "version": 3, "sha256": _compute_digest(content), "content": content}
    ).encode()


def test_grid_needs_enough_bytes_and_unique_keys():
    found = build_manifest(TensorSplit(((2, 2), (2,)), (0, 1)), 2)
    small = replace(found, files={name: replace(each, num_bytes=10) for name, each in found.files.items()})
    with pytest.raises(CheckpointError, match="places more"):
        Manifest.decode(small.encode())
    other = TensorEntry((1,), "float32", (TensorChunk((0,), (1,), "model-00000.safetensors", "model/0/a"),))
    with pytest.raises(CheckpointError, match="for two tensors"):
        Manifest.decode(replace(found, tensors={**found.tensors, "b": other}).encode())


# -------------------------------------------------------------------- files


def make_job(folder, part, num_parts, tensors):
    share = DiskShare(part, num_parts, part == 0)
    return SaveJob(folder / "checkpoint_1", "0" * 16, share, CollectedState(tensors), {}, SavePolicy())


def make_piece(whole, split, part):
    """Return the part of a tensor that one of several ranks has."""
    boxes = []
    for chunk, owner in zip(iterate_chunks(split.sizes, split.writers), split.writers):
        where = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape))
        boxes += [TensorBox(chunk.offsets, whole[where], True)] if owner == part else []
    return ShardPiece(tuple(whole.shape), whole.dtype, tuple(boxes), split=split)


WHOLE = torch.arange(60.0).reshape(10, 6)
REGULAR = TensorSplit(((4, 3, 3), (6,)), (2, 0, 1))
SEVERAL = TensorSplit(((3, 2, 3, 2), (6,)), (0, 1, 0, 1))
ODD = torch.arange(7).to(torch.complex64)


def make_state(part):
    return {
        "model/0/plain": torch.ones(3), "model/0/a": make_piece(WHOLE, REGULAR, part), "model/0/b": make_piece(WHOLE, SEVERAL, part),
        "model/0/b@0": torch.zeros(2), "optimizer/0/a/m": make_piece(-WHOLE, REGULAR, part),
        "model/0/odd": make_piece(ODD, TensorSplit(((3, 4),), (1, 2)), part),
        "model/0/none": make_piece(torch.empty(0, 4), TensorSplit(((), (4,)), ()), part),
        "model/0/foreign": replace(make_piece(WHOLE, SEVERAL, part), split=None),
    }  # fmt: skip


WANTED = {"model/0/a": WHOLE, "model/0/b": WHOLE, "optimizer/0/a/m": -WHOLE, "model/0/odd": ODD, "model/0/foreign": WHOLE,
          "model/0/plain": torch.ones(3), "model/0/b@0": torch.zeros(2), "model/0/none": torch.empty(0, 4)}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """Save a checkpoint from three ranks, and return its folder and manifest."""
    writer.create_staging(make_job(tmp_path, 0, 3, make_state(0)))
    for part in range(3):
        writer.mark_as_writing(make_job(tmp_path, part, 3, make_state(part)))
    for part in (1, 2, 0):
        found = writer.write_checkpoint(make_job(tmp_path, part, 3, make_state(part)))
    return tmp_path / "checkpoint_1", found


def test_chunks_written_by_three_ranks_are_read_by_one(saved):
    folder, manifest = saved
    assert verify_checkpoint(folder) == manifest
    assert isinstance(manifest.tensors["model/0/a"].chunks, ChunkGrid)
    assert [chunk.key for chunk in manifest.tensors["model/0/b"].chunks] == [
        "model/0/b@0@",
        *(f"model/0/b@{n}" for n in (1, 2, 3)),
    ]
    for is_verified in (True, False):
        found, owned = read_state(folder, manifest, is_verified)
        assert found.keys() == WANTED.keys()
        for name, tensor in WANTED.items():
            assert torch.equal(found[name], tensor), name
        assert owned == {"optimizer/0/a/m"}
    assert dict(read_tensors(folder, manifest)).keys() == WANTED.keys()


def test_any_box_is_assembled_from_chunks(saved):
    folder, manifest = saved
    for name in ("model/0/a", "model/0/b", "model/0/foreign"):
        mosaic = ChunkedTensor(manifest.tensors[name], CheckpointFiles(folder, manifest))
        for top, left in itertools.product(range(9), range(5)):
            box = torch.full((10 - top, 3 if left < 3 else 1), -1.0)
            mosaic.fill(box, (top, left))
            assert torch.equal(box, WHOLE[top:, left : left + box.shape[1]])


def test_chunked_weights_are_exported(saved, tmp_path):
    folder, manifest = saved
    named = [(name.removeprefix("model/0/"), each) for name, each in open_tensors(folder, manifest, "model/")]
    assert sum(isinstance(each, ChunkedTensor) for _, each in named) == 5
    save_weights(named, tmp_path / "out", "200B")
    found = open_checkpoint(tmp_path / "out").tensors
    for name, tensor in WANTED.items():
        if name.startswith("model/"):
            assert torch.equal(found[name.removeprefix("model/0/")].tensor(), tensor), name


def test_ranks_with_different_splits_are_refused(tmp_path):
    summaries = [plan_own_boxes(make_state(part), part).summary for part in range(3)]
    assert len({each["grids"] for each in summaries}) == 1
    other = {**make_state(1), "model/0/a": make_piece(WHOLE, TensorSplit(((5, 2, 3), (6,)), (2, 0, 1)), 1)}
    with pytest.raises(CheckpointError, match="rank 1 has different sharded tensors"):
        make_sharded_entries(make_state(0), [summaries[0], plan_own_boxes(other, 1).summary, summaries[2]])
    with pytest.raises(CheckpointError, match="differently from its placements"):
        plan_own_boxes({"model/0/a": make_piece(WHOLE, REGULAR, 0)}, 1)


def test_mutated_manifest_with_grids_is_read_or_refused(saved):
    """Any other error than `CheckpointError` fails the test."""
    folder, _ = saved
    path = folder / "manifest.json"
    content = json.loads(path.read_text())["content"]
    for number in range(EXAMPLES):
        draw = random.Random(f"grids {number}")
        part = {name: value for name, value in content.items() if name == draw.choice(["tensors", "files"])}
        path.write_bytes(seal_content({**content, **mutate(draw, part)} if part else mutate(draw, content)))
        try:
            for tensor in read_state(folder, Manifest.decode(path.read_bytes()), draw.random() < 0.5)[0].values():
                tensor.clone()
        except CheckpointError:
            continue
