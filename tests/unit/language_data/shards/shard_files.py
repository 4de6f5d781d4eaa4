"""Writers of shards in every format for tests, each by the format's own library or by hand."""

import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

FORMATS = ("jsonl", "parquet", "arrow", "feather", "tar", "mds")
COMPRESSIONS = ("gz", "bz2", "xz", "zst", "lz4")


def make_records(count: int, first: int = 0, size: int = 20) -> list[dict[str, Any]]:
    """Return records with an increasing number and a text of varying length."""
    return [
        {"id": number, "text": f"é{number}:" + "x" * (number * 7919 % size)} for number in range(first, first + count)
    ]


def write_shard(path: Path, records: list[dict[str, Any]], rows_per_block: int = 10) -> None:
    """Write records to a file in the format, and with the compression, of its suffixes."""
    suffixes = path.name.split(".")[1:]
    raw = _WRITERS[suffixes[0]](records, rows_per_block)
    path.write_bytes(raw if len(suffixes) == 1 else compress(raw, suffixes[1]))


def compress(raw: bytes, suffix: str) -> bytes:
    """Compress the bytes as the suffix says."""
    if suffix in ("zst", "lz4"):
        target = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(target, {"zst": "zstd"}.get(suffix, suffix)) as file:
            file.write(raw)
        return bytes(target.getvalue())
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix](raw)


def read_record(record: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the record of `make_records` from a record that a reader of this format returned."""
    if form != "tar":
        return dict(record)
    assert set(record) == {"__key__", "id", "text"}
    assert record["__key__"] == f"sample{int(record['id']):06d}"
    return {"id": int(record["id"]), "text": record["text"].decode()}


def _write_jsonl(records: list[dict[str, Any]], rows: int) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _write_parquet(records: list[dict[str, Any]], rows: int) -> bytes:
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), target, row_group_size=rows)
    return target.getvalue()


def _write_arrow(records: list[dict[str, Any]], rows: int, open_writer: Any = pyarrow.ipc.new_stream) -> bytes:
    table = pyarrow.Table.from_pylist(records)
    target = io.BytesIO()
    with open_writer(target, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return target.getvalue()


def _write_tar(records: list[dict[str, Any]], rows: int) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for record in records:
            for name in ("id", "text"):
                data = str(record[name]).encode()
                member = tarfile.TarInfo(f"sample{record['id']:06d}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


def _write_mds(records: list[dict[str, Any]], rows: int) -> bytes:
    config = {
        "version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": None,
        "column_names": ["id", "text"], "column_encodings": ["int", "str"], "column_sizes": [8, None],
    }  # fmt: skip
    head = json.dumps(config, sort_keys=True).encode()
    samples = []
    for record in records:
        text = record["text"].encode()
        samples.append(struct.pack("<I", len(text)) + struct.pack("<q", record["id"]) + text)
    offsets = [4 * (len(samples) + 2) + len(head)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + head + b"".join(samples)


_WRITERS = {
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "feather": lambda records, rows: _write_arrow(records, rows, pyarrow.ipc.new_file),
    "tar": _write_tar,
    "mds": _write_mds,
}
