"""Shards of JSON lines: one JSON value per line. Empty lines are not records."""

import json
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
from headway.language_data.shards.storage import RangeReader

_READ_BYTES = 8 * 2**20
_LINE_OVERHEAD = 50
"""Approximate memory of a `bytes` object and its place in a list, in bytes, in addition to its content."""


class JsonLines:
    """File format with one JSON value per line. It finds the blocks of such files and opens them."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the blocks of a shard, reading the complete file.

        Each block consists of whole lines with at least `BLOCK_BYTES` bytes in total, except the last. See
        `ShardFormat.scan` for the arguments.
        """
        table = BlockTable()
        pending = b""  # bytes that were read but belong to no block yet
        pending_start = 0  # their byte offset in the file
        for offset in range(0, num_bytes, _READ_BYTES):
            pending += reader.read_range(offset, _READ_BYTES)
            is_end = offset + _READ_BYTES >= num_bytes
            begin = 0
            while len(pending) - begin >= BLOCK_BYTES or (is_end and begin < len(pending)):
                # The block ends with the first line that ends at or after BLOCK_BYTES.
                end = pending.find(b"\n", min(begin + BLOCK_BYTES, len(pending)) - 1) + 1
                if not end and not is_end:
                    break
                end = end or len(pending)
                count = sum(1 for line in pending[begin:end].split(b"\n") if line.strip())
                if count:
                    table.add_block(pending_start + begin, end - begin, count)
                begin = end
            pending_start += begin
            pending = pending[begin:]
        return ShardScan(table)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenJsonLines":
        """Open a shard, and return an object that decodes its blocks. Only the argument `name` is used."""
        return OpenJsonLines(name)


class OpenJsonLines:
    """Shard of JSON lines whose blocks can be decoded from their bytes.

    Args:
        name: Name of the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def decode(self, data: memoryview, offset: int, count: int) -> LazyBlock:
        """Split a block into lines. Each line is parsed when it is read.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If the block does not have `count` records.
        """
        all_lines = bytes(data).split(b"\n")
        lines = [line for line in all_lines if line.strip()]
        check_count(len(lines), count, self._name, offset)
        name = self._name

        def parse_line(line: bytes) -> Any:
            try:
                return json.loads(line)
            except (ValueError, RecursionError) as error:
                # Offsets are needed only for this message. Lines can be equal, so find this one by identity.
                line_index = next(index for index, each in enumerate(all_lines) if each is line)
                line_offset = offset + sum(len(each) + 1 for each in all_lines[:line_index])
                raise DataError(describe_damage(name, line_offset, error)) from error

        return LazyBlock(lines, parse_line, len(data) + _LINE_OVERHEAD * len(lines))
