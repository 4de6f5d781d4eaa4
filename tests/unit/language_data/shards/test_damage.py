"""Test damaged and missing shards: an error with file and offset, or counted omissions, but never a silent loss."""

from pathlib import Path

import pytest

from headway.errors import ConfigError, DataError
from headway.language_data.shards.dataset import ShardedDataset
from headway.language_data.shards.mds import find_decoder
from tests.unit.language_data.shards.shard_files import make_records, read_record, write_shard


def open_shards(path: Path, **options: object) -> ShardedDataset:
    """Open shards, with a cache folder beside them."""
    return ShardedDataset(path, cache_dir=path.parent / "cache", **options)  # type: ignore[arg-type]


def test_damaged_line_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'{"id": 0}\n', b'{"id": \n', b'{"id": 2}\n', b'"\xff"\n', b'{"id": 4}']
    path.write_bytes(b"".join(lines))
    dataset = open_shards(path)
    assert len(dataset) == 5
    for number, offset in ((1, 10), (3, 28)):
        with pytest.raises(DataError, match=rf"a\.jsonl: the record at byte {offset} is damaged"):
            dataset[number]
    for seed in (0, 1):
        kept = open_shards(path, on_damage="skip", shuffle=True, seed=seed)
        assert kept.num_skipped == 2
        assert sorted(record["id"] for record in kept) == [0, 2, 4]


def test_damaged_mds_sample_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.mds"
    records = make_records(30)
    write_shard(path, records)
    raw = bytearray(path.read_bytes())
    begin = raw.index("é7:".encode())
    raw[begin : begin + 2] = b"\xff\xff"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"a\.mds: the record at byte {begin - 12} is damaged.*utf-8"):
        open_shards(path)[7]
    kept = open_shards(path, on_damage="skip")
    assert kept.num_skipped == 1
    assert list(kept) == records[:7] + records[8:]


@pytest.mark.parametrize("suffix", ["tar", "mds", "arrow"])
def test_truncated_shard_is_an_error_or_loses_only_its_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    records = make_records(30)
    write_shard(path, records)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 2 // 3])
    with pytest.raises(DataError, match=rf'a\.{suffix}: the record at byte \d+ is damaged.*on_damage="skip"'):
        open_shards(path)
    kept = open_shards(path, on_damage="skip")
    assert kept.num_skipped == 1
    found = [read_record(record, suffix) for record in kept if suffix != "tar" or "text" in record]
    assert 10 <= len(found) < 30
    assert found == records[: len(found)]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damaged_block_is_named_or_left_out_and_its_records_counted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    records = make_records(30)
    write_shard(path, records)
    dataset = open_shards(path)
    offset, size = int(dataset._blocks.offsets[1]), int(dataset._blocks.sizes[1])
    raw = bytearray(path.read_bytes())
    raw[offset + 8 : offset + size] = b"\xff" * (size - 8)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"a\.{suffix}: the record at byte \d+ is damaged"):
        open_shards(path)[15]
    if suffix == "parquet":
        kept = open_shards(path, on_damage="skip")
        assert kept.num_skipped == 10
        assert list(kept) == records[:10] + records[20:]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst", "lz4"])
@pytest.mark.parametrize("on_damage", ["error", "skip"])
def test_truncated_compressed_shard_is_an_error(tmp_path: Path, suffix: str, on_damage: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    write_shard(path, make_records(2000))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - 20])
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}: the \w+ data are damaged after byte \d+"):
        open_shards(path, on_damage=on_damage)
    assert not list((tmp_path / "cache").rglob("*.copy"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "tar", "mds"])
@pytest.mark.parametrize("content", [b"", b"this is something else entirely, of some length" * 20])
def test_file_of_another_format_is_an_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.{suffix}|no records"):
        open_shards(path, on_damage="skip")


def test_no_file_no_record_and_a_file_given_twice_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    write_shard(tmp_path / "full.jsonl", make_records(3))
    with pytest.raises(DataError, match=r"no file matches .*\*\.parquet"):
        open_shards(tmp_path / "*.parquet")
    with pytest.raises(DataError, match="has no records"):
        open_shards(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="is empty"):
        ShardedDataset([], cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="named twice"):
        ShardedDataset([tmp_path / "full.jsonl", tmp_path / "*.jsonl"], cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="give a pattern"):
        open_shards(tmp_path)
    with pytest.raises(DataError, match="is not clear from its suffix"):
        open_shards(Path(__file__))
    assert len(open_shards(tmp_path / "*.jsonl")) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "csv"}, "format='csv'.*jsonl"),
        ({"on_damage": "ignore"}, "on_damage='ignore'"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5"),
        ({"stall_limit": -1}, "stall_limit=-1"),
    ],
)
def test_arguments_out_of_range_are_errors(tmp_path: Path, options: dict[str, object], words: str) -> None:
    write_shard(tmp_path / "a.jsonl", make_records(3))
    with pytest.raises(ConfigError, match=words):
        open_shards(tmp_path / "a.jsonl", **options)


def test_changed_file_gets_a_new_index_and_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_shard(path, make_records(5))
    before = open_shards(path)
    state = before.state_dict()
    before.load_state_dict(state)
    write_shard(path, make_records(7))
    after = open_shards(path)
    assert len(after) == 7
    with pytest.raises(DataError, match="would lose some samples"):
        after.load_state_dict(state)


def test_unnoticed_change_of_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    dataset = open_shards(path)
    path.write_bytes(b"1\n222\n")
    with pytest.raises(DataError, match=r"a\.jsonl: the block at byte 0 has 2 records instead of 3"):
        dataset[0]


def test_damaged_compressed_batch_of_arrow_is_an_error_or_left_out(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.arrow"
    options = pyarrow.ipc.IpcWriteOptions(compression="lz4")
    schema = pyarrow.schema([("id", pyarrow.int64())])
    ends = []
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema, options=options) as writer:
        for begin in (0, 1000, 2000):
            writer.write_batch(
                pyarrow.record_batch({"id": [number % 7 for number in range(begin, begin + 1000)]}, schema)
            )
            file.flush()
            ends.append(file.tell())
    raw = bytearray(path.read_bytes())
    middle = ends[1] - 100  # in the values of the second batch
    raw[middle : middle + 60] = bytes(60)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r'a\.arrow: the record at byte \d+ is damaged.*on_damage="skip"'):
        open_shards(path)
    kept = open_shards(path, on_damage="skip")
    assert kept.num_skipped == 1
    assert [record["id"] for record in kept] == [number % 7 for number in (*range(1000), *range(2000, 3000))]


@pytest.mark.parametrize("encoding", ["ndarray:foo", "ndarray:int32:x"])
def test_unknown_array_of_mds_is_an_error(encoding: str) -> None:
    with pytest.raises(DataError, match=rf"column 'x' has the encoding '{encoding}', which is not an array"):
        find_decoder(encoding, "a.mds: column 'x'")
