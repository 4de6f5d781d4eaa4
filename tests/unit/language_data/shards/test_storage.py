"""Test remote shards: HTTP with errors, object stores and fsspec, and the local copies of their blocks."""

import glob
import time
import urllib.error
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from headway.common.object_client import ObjectInfo
from headway.errors import DataError
from headway.language_data.shards import retry, storage
from headway.language_data.shards.dataset import ShardedDataset
from tests.distributed.slow_server import Fault, SlowServer, break_off, make_delay_fault, make_status_fault
from tests.stores import server as object_server
from tests.unit.language_data.shards.shard_files import make_records, read_record, write_shard

SUFFIXES = ["jsonl", "parquet", "arrow", "tar.gz", "mds"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SlowServer]:
    """Server of the folder `data`, which can be made to fail."""
    (tmp_path / "data").mkdir()
    with SlowServer(tmp_path / "data") as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "has_ranges"),
    [
        pytest.param(None, True, id="none"),
        pytest.param(None, False, id="no ranges"),
        pytest.param(make_status_fault(429, {"Retry-After": "0"}), True, id="429"),
        pytest.param(make_status_fault(503), True, id="503"),
        pytest.param(break_off, True, id="breaks off"),
        pytest.param(make_delay_fault(1.0), True, id="hangs"),
    ],
)
def test_http_shards_are_read_in_spite_of_errors(
    server: SlowServer, tmp_path: Path, fault: Fault | None, has_ranges: bool
) -> None:
    urls, expected = [], make_records(50)
    for number, suffix in enumerate(SUFFIXES):
        write_shard(server.folder / f"{number}.{suffix}", expected[number * 10 : number * 10 + 10])
        urls.append(f"{server.url}/{number}.{suffix}")
    server.has_ranges = has_ranges
    server.fault = fault or server.fault
    dataset = ShardedDataset(urls, cache_dir=tmp_path / "cache", attempt_timeout=0.5, stall_limit=30)
    found = [read_record(dataset[i], SUFFIXES[i // 10].split(".")[0]) for i in range(50)]
    assert found == expected
    assert dataset.stall_limit == 30
    num_requests = server.num_requests
    again = ShardedDataset(urls, cache_dir=tmp_path / "cache", attempt_timeout=0.5)
    assert len(again) == 50
    again[5]
    assert server.num_requests - num_requests <= 2 * len(urls) + 2, (
        "indexes and blocks should be read from the cache folder"
    )


def test_server_that_fails_for_longer_than_the_limit_is_an_error(server: SlowServer, tmp_path: Path) -> None:
    write_shard(server.folder / "a.jsonl", make_records(10))
    dataset = ShardedDataset(f"{server.url}/a.jsonl", cache_dir=tmp_path / "cache", stall_limit=1.0)
    server.fault = lambda handler, number: handler.answer(503) is None
    with pytest.raises(
        DataError, match=rf"shard {server.url}/a\.jsonl failed \d+ times in \d s, .*HTTP 503.*stall_limit=1 sec"
    ):
        dataset[0]
    assert server.num_requests > 4
    server.fault = lambda handler, number: False
    assert dataset[0] == make_records(1)[0]


def test_refused_and_missing_shards_are_errors_at_once(server: SlowServer, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"a\.jsonl failed: HTTP 404"):
        ShardedDataset(f"{server.url}/a.jsonl", cache_dir=tmp_path / "cache")
    server.fault = lambda handler, number: handler.answer(403) is None
    with pytest.raises(DataError, match=r"a\.jsonl failed: HTTP 403"):
        ShardedDataset(f"{server.url}/a.jsonl", cache_dir=tmp_path / "cache")
    assert server.num_requests == 2
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), (None, None)]
)
def test_retry_after_is_read_as_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    headers = Message()
    if text is not None:
        headers["Retry-After"] = text
    error = urllib.error.HTTPError("http://127.0.0.1/a", 429, "Too Many Requests", headers, None)
    assert retry.read_retry_after(error) == seconds
    assert retry.is_transient(error)


def test_copies_of_blocks_stay_within_their_limit(server: SlowServer, tmp_path: Path) -> None:
    urls, expected = [], make_records(80, size=400)
    for number in range(8):
        write_shard(server.folder / f"{number}.jsonl.gz", expected[number * 10 : number * 10 + 10])
        urls.append(f"{server.url}/{number}.jsonl.gz")
    dataset = ShardedDataset(urls, cache_dir=tmp_path / "cache", copy_bytes=10_000, memory_bytes=1)
    for _ in range(2):
        assert list(dataset) == expected
        sizes = [path.stat().st_size for path in (tmp_path / "cache").rglob("*.copy")]
        assert sum(sizes) <= 10_000
        assert sizes


def test_other_storage_is_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    expected = make_records(30)
    memory = fsspec.filesystem("memory")
    for number, suffix in enumerate(("jsonl", "parquet", "tar")):
        path = tmp_path / f"{number}.{suffix}"
        write_shard(path, expected[number * 10 : number * 10 + 10])
        memory.pipe_file(f"/shards/{path.name}", path.read_bytes())
    dataset = ShardedDataset("memory://shards/*", cache_dir=tmp_path / "cache")
    found = [read_record(dataset[i], "tar" if i >= 20 else "jsonl") for i in range(30)]
    assert found == expected
    with pytest.raises(DataError, match="nothing://"):
        ShardedDataset("nothing://shards/a.jsonl", cache_dir=tmp_path / "cache")


class ListingClient:
    """Client of an object store that only lists keys."""

    KEYS = ("a/0.jsonl", "a/1.jsonl", "a/b/2.jsonl", "a/b/c/3.jsonl", "a/b/c/3.txt", "a2/4.jsonl")
    # Empty objects "a/" and "a/b/", with which AWS's console creates folders. obstore lists them without the slash.
    FOLDERS = ("a", "a/b")

    def __init__(self, root: str, retry_seconds: float) -> None:
        self.root = root

    def list(self, folder: str) -> "list[ObjectInfo]":
        sizes = dict.fromkeys(self.KEYS, 1) | dict.fromkeys(self.FOLDERS, 0)
        return [ObjectInfo(key, size, "1") for key, size in sizes.items() if key.startswith(folder)]


@pytest.mark.parametrize(
    "pattern", ["a/*", "a/*.jsonl", "a/[0]*", "a/?.jsonl", "*/*.jsonl", "a/**/*.jsonl", "**/c/*", "a*/**", "a/b*", "**"]
)
def test_patterns_match_the_same_files_in_buckets_and_folders(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ObjectClient", ListingClient)
    for key in ListingClient.KEYS:
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    names = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    expected = sorted(f"s3://bucket/{name}" for name in names if (tmp_path / name).is_file())
    policy = retry.RetryPolicy()
    assert [file.url for file in storage.expand_pattern(f"s3://bucket/{pattern}", policy)] == expected


@pytest.mark.parametrize("url", ["s3://buck*/a/0.jsonl", "s3://buck*/a/*.jsonl", "gs://b?"])
def test_pattern_as_the_name_of_a_bucket_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ObjectClient", ListingClient)
    with pytest.raises(DataError, match="wildcard in the name of the bucket"):
        storage.expand_pattern(url, retry.RetryPolicy())


@pytest.mark.slow
def test_object_stores_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    expected = make_records(40)
    with object_server.running() as port:
        for name, value in object_server.environment(port).items():
            monkeypatch.setenv(name, value)
        client = object_server.s3(port)
        for number, suffix in enumerate(("jsonl", "parquet", "jsonl.zst", "mds")):
            path = tmp_path / f"{number}.{suffix}"
            write_shard(path, expected[number * 10 : number * 10 + 10])
            client.put_object(Bucket=object_server.BUCKET, Key=f"data/{path.name}", Body=path.read_bytes())
        for key in (
            "data/",
            "data/folder/",
            "data/folder/other.txt",
        ):  # the first two are as AWS's console makes folders
            client.put_object(Bucket=object_server.BUCKET, Key=key, Body=b"")
        dataset = ShardedDataset(f"s3://{object_server.BUCKET}/data/*", cache_dir=tmp_path / "cache", stall_limit=20)
        assert list(dataset) == expected
        assert (
            ShardedDataset(f"s3://{object_server.BUCKET}/data/1.parquet", cache_dir=tmp_path / "cache")[3]
            == expected[13]
        )
        with pytest.raises(DataError, match="no file matches"):
            ShardedDataset(f"s3://{object_server.BUCKET}/other/*", cache_dir=tmp_path / "cache")
        for name in ("*", "1.parquet"):
            with pytest.raises(DataError, match="s3://missing"):
                ShardedDataset(f"s3://missing/data/{name}", cache_dir=tmp_path / "cache")
