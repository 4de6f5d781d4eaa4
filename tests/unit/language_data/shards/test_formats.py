"""Test formats and compressions of shards: every record is read, in the order of the files or in any other order."""

import json
import pickle
import random
from pathlib import Path

import pyarrow
import pytest

from headway.errors import ConfigError, DataError
from headway.language_data.shards import blocks, jsonl, mds, tar
from headway.language_data.shards.dataset import ShardedDataset
from tests.unit.language_data.shards.shard_files import COMPRESSIONS, FORMATS, make_records, read_record, write_shard


def write_three(folder: Path, suffix: str) -> list[dict[str, object]]:
    """Write three shards of different lengths, and return their records."""
    records = make_records(73)
    for number, (begin, end) in enumerate([(0, 25), (25, 26), (26, 73)]):
        write_shard(folder / f"shard-{number}.{suffix}", records[begin:end])
    return records


@pytest.mark.parametrize(
    "suffix", [*FORMATS, *[f"jsonl.{each}" for each in COMPRESSIONS], "tar.gz", "mds.zst", "parquet.gz"]
)
def test_all_records_are_read_in_any_order(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, jsonl, mds, tar):
        monkeypatch.setattr(module, "BLOCK_BYTES", 200)
    expected = write_three(tmp_path, suffix)
    dataset = ShardedDataset(f"{tmp_path}/*.{suffix}", cache_dir=tmp_path / "cache", memory_bytes=3000)
    assert len(dataset) == len(expected)
    form = suffix.split(".")[0]
    assert [read_record(record, form) for record in dataset] == expected
    order = random.Random(0).choices(range(-73, 73), k=200)
    assert [read_record(record, form) for record in dataset.__getitems__(order)] == [expected[i] for i in order]
    with pytest.raises(IndexError, match="73 records"):
        dataset[73]
    again = ShardedDataset(
        f"{tmp_path}/*.{suffix}", cache_dir=tmp_path / "cache", shuffle=True, seed=3, shuffle_buffer=16
    )
    shuffled = [read_record(record, form)["id"] for record in again]
    assert sorted(shuffled) == list(range(73))
    assert shuffled != list(range(73))


def test_records_equal_those_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="compares with the webdataset package, which is optional")
    write_three(tmp_path, "tar")
    names = sorted(str(path) for path in tmp_path.glob("*.tar"))
    expected = [
        {name: value for name, value in record.items() if name not in ("__url__", "__local_path__")}
        for record in webdataset.WebDataset(names, shardshuffle=False)
    ]
    assert list(ShardedDataset(names, cache_dir=tmp_path / "cache")) == expected


def test_arrow_files_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = make_records(50)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    assert list(ShardedDataset(f"{tmp_path}/saved/*.arrow", cache_dir=tmp_path / "cache")) == records


def test_arrow_dictionaries_form_one_block(tmp_path: Path) -> None:
    words = pyarrow.array(["a", "b", "a", "c"]).dictionary_encode()
    table = pyarrow.table({"word": words, "id": [0, 1, 2, 3]})
    for name, open_writer in (("a.arrow", pyarrow.ipc.new_stream), ("b.arrow", pyarrow.ipc.new_file)):
        with open_writer(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    dataset = ShardedDataset(f"{tmp_path}/*.arrow", cache_dir=tmp_path / "cache")
    assert list(dataset) == table.to_pylist() * 2


def test_columns_are_chosen_in_tables_only(tmp_path: Path) -> None:
    for suffix in ("parquet", "arrow", "jsonl"):
        write_shard(tmp_path / f"a.{suffix}", make_records(12))
    for suffix in ("parquet", "arrow"):
        dataset = ShardedDataset(tmp_path / f"a.{suffix}", columns=["id"], cache_dir=tmp_path / "cache")
        assert list(dataset) == [{"id": number} for number in range(12)]
        with pytest.raises(DataError, match=r"no column 'label'.*'id', 'text'"):
            ShardedDataset(tmp_path / f"a.{suffix}", columns=["label"], cache_dir=tmp_path / f"other-{suffix}")
    with pytest.raises(ConfigError, match="columns= chooses columns of parquet and arrow"):
        ShardedDataset(tmp_path / "a.jsonl", columns=["id"], cache_dir=tmp_path / "cache")


def test_mds_dataset_is_given_by_its_folder_or_index(tmp_path: Path) -> None:
    records = make_records(20)
    shards = []
    for number in range(2):
        write_shard(
            tmp_path / f"shard.0000{number}.mds".replace("shard.", "shard"), records[number * 10 : number * 10 + 10]
        )
        shards.append({"format": "mds", "raw_data": {"basename": f"shard0000{number}.mds"}, "zip_data": None})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    for place in (tmp_path, tmp_path / "index.json"):
        assert list(ShardedDataset(place, cache_dir=tmp_path / "cache")) == records


def test_lines_of_json_may_be_long_empty_or_unterminated(tmp_path: Path) -> None:
    values = ["x" * 3_000_000, 1, [2], "y" * 9_000_000, None, {"a": "b"}]
    text = "\n".join(json.dumps(value) for value in values).replace("\n1\n", "\n\n1\r\n  \n")
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    assert list(ShardedDataset(tmp_path / "a.jsonl", cache_dir=tmp_path / "cache")) == values


def test_pickled_dataset_reads_the_same_and_opens_its_files_again(tmp_path: Path) -> None:
    expected = write_three(tmp_path, "parquet")
    dataset = ShardedDataset(f"{tmp_path}/*.parquet", cache_dir=tmp_path / "cache")
    assert list(dataset) == expected
    assert list(pickle.loads(pickle.dumps(dataset))) == expected
