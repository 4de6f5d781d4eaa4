"""Test files of several objects: reading, replacing and removing them. A part has 1,000 bytes here."""

import pytest
import torch

from headway.common.object_path import to_path
from headway.common.untrusted import read_regular_file
from headway.core.weights.export import save_weights


def write(path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def read(path) -> bytes:
    with path.open() as file:
        return b"".join(iter(lambda: file.read(700), b""))


def keys(bucket) -> list[str]:
    return sorted(each.key for each in bucket.list(""))


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 2000, 2500])
def test_all_parts_of_a_file_are_read(bucket, length: int) -> None:
    path, content = to_path("s3://bucket/run/log"), bytes(number % 251 for number in range(length))
    write(path, content)
    assert path.read_bytes() == read(path) == content
    assert read_regular_file(path, 10_000) == content


@pytest.mark.parametrize("length", [10, 1000, 1500])
def test_a_shorter_file_replaces_all_parts_of_a_longer_one(bucket, length: int) -> None:
    path = to_path("s3://bucket/run/log")
    write(path, b"a" * 3500)
    write(path, b"b" * length)
    assert path.read_bytes() == read(path) == b"b" * length
    assert len(keys(bucket)) == -(-length // 1000)


def test_an_object_replaces_a_file_of_several_parts(bucket) -> None:
    path = to_path("s3://bucket/run/log")
    for length in (10, 1000, 1500):  # one object each, although the last is longer than a part
        write(path, b"a" * 2500)
        path.write_bytes(b"b" * length)
        assert path.read_bytes() == read(path) == b"b" * length


def test_all_parts_of_a_file_are_removed_and_moved(bucket) -> None:
    path = to_path("s3://bucket/run/log")
    write(to_path("s3://bucket/run/log2"), b"c" * 2500)
    write(path, b"a" * 2500)
    moved = path.replace(to_path("s3://bucket/run/moved"))
    assert moved.read_bytes() == b"a" * 2500
    write(path, b"a" * 2500)
    path.unlink()
    assert keys(bucket) == ["run/log2", "run/log2.part-00001", "run/log2.part-00002", "run/moved"]


def test_a_smaller_model_replaces_a_larger_one(bucket) -> None:
    place = to_path("s3://bucket/weights")
    save_weights([("weight", torch.ones(1000))], place, "2KB")
    save_weights([("weight", torch.ones(1000)), ("bias", torch.ones(1000))], place, "4KB")
    [file] = save_weights([("weight", torch.zeros(10))], place, "4KB")
    assert len(read(file)) < 1000
    assert keys(bucket) == ["weights/model.safetensors"]
