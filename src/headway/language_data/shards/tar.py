"""Shards in the WebDataset format: tar files in which consecutive members with the same base name form a record.

A record is a dict with the base name as "__key__", and the bytes of each member by its extension, as `webdataset`
returns them before decoding.
"""

import io
import re
import tarfile
from typing import Any

from headway.errors import DataError
from headway.language_data.shards.blocks import (
    BLOCK_BYTES,
    BlockTable,
    LazyBlock,
    ShardScan,
    check_count,
    describe_damage,
)
from headway.language_data.shards.storage import RangeReader, ReaderFile

_MEMBER_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_META_NAME = re.compile(r"__[^/]*__($|/)")
_BUFFER_BYTES = 2**20
_RECORD_OVERHEAD = 500
"""Approximate memory of a record's dict and slices, in bytes."""


def split_name(name: str) -> tuple[str, str] | None:
    """Return a tar member's base name and its extension in lower case, or None if the member belongs to no record."""
    match = _MEMBER_NAME.fullmatch(name)
    if match is None or _META_NAME.match(name):  # no extension, or metadata such as "__info__.json"
        return None
    return match[1], match[2].lower()


class WebDatasetTar:
    """File format of WebDataset tar files. It finds the blocks of such files and opens them."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the blocks of a shard from the headers of the tar members.

        Each block consists of whole records with at least `BLOCK_BYTES` bytes in total, except the last. Reads are
        buffered, so the data of members smaller than 1 MiB are read too. The result describes the damage if the file
        ends early or has a damaged header. See `ShardFormat.scan` for the arguments.

        Raises:
            DataError: If the file is not a tar file.
        """
        table = BlockTable()
        begin, count = 0, 0  # byte offset and number of records of the current block
        record_start, record_end = 0, 0  # byte offsets of its last record
        key = None  # base name of its last record
        file = io.BufferedReader(ReaderFile(reader, num_bytes), _BUFFER_BYTES)
        damage = ""
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all headers in memory
                    parts = split_name(member.name) if member.isreg() else None
                    if parts is not None and parts[0] != key:
                        if member.offset - begin >= BLOCK_BYTES and count:
                            table.add_block(begin, member.offset - begin, count)
                            begin, count = member.offset, 0
                        count += 1
                        key, record_start = parts[0], member.offset
                    if member.offset_data + member.size > num_bytes:
                        raise tarfile.ReadError(f"the file ends inside of the member {member.name!r}")
                    padded_size = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    record_end = member.offset_data + padded_size
        except tarfile.TarError as error:
            if not record_end:
                raise DataError(describe_damage(name, 0, f"not a tar file ({error})")) from error
            # The record before the damage might lack members, so it counts as damaged.
            damage = describe_damage(name, record_start, error)
            count, record_end = count - 1, record_start
        if count:
            table.add_block(begin, min(record_end, num_bytes) - begin, count)
        return ShardScan(table, damage)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenTar":
        """Open a shard, and return an object that decodes its blocks. Only the argument `name` is used."""
        return OpenTar(name)


class OpenTar:
    """WebDataset tar file whose blocks can be decoded from their bytes.

    Args:
        name: Name of the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def decode(self, data: memoryview, offset: int, count: int) -> LazyBlock:
        """Split a block into records. The bytes of a record are copied when it is read.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If the block is damaged, or does not have `count` records.
        """
        records: list[dict[str, Any]] = []
        padding = bytes(-len(data) % tarfile.BLOCKSIZE)  # the end of a file may lack it
        try:
            with tarfile.open(fileobj=io.BytesIO(bytes(data) + padding), mode="r:") as archive:
                for member in archive:
                    parts = split_name(member.name) if member.isreg() else None
                    if parts is None:
                        continue
                    base_name, extension = parts
                    if not records or records[-1]["__key__"] != base_name:
                        records.append({"__key__": base_name})
                    if extension in records[-1]:
                        raise tarfile.ReadError(f"record {base_name!r} has two members {extension!r}")
                    records[-1][extension] = slice(member.offset_data, member.offset_data + member.size)
        except tarfile.TarError as error:
            raise DataError(describe_damage(self._name, offset, error)) from error
        check_count(len(records), count, self._name, offset)

        def extract_record(record: dict[str, Any]) -> dict[str, Any]:
            return {name: bytes(data[value]) if isinstance(value, slice) else value for name, value in record.items()}

        return LazyBlock(records, extract_record, len(data) + _RECORD_OVERHEAD * len(records))
