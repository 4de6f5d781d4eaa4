"""Test hashes of weights files."""

import json
import tracemalloc

import xxhash

from headway.core.checkpoint.format.manifest import MANIFEST
from headway.core.checkpoint.format.tensors import hash_file
from tests.unit.core.checkpoint.saved import save


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


def test_hashing_reads_a_file_in_pieces(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(40_000_000))
    tracemalloc.start()
    hash_file(path, "large")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
