"""Shards of JSON lines: one JSON value per line. Empty lines are not records."""

import json
from typing import Any

from headway.errors import DataError
from headway.language_data.shards.blocks import (
    BLOCK_BYTES,
    BlockTable,
    ShardScan,
    SlotBlock,
    check_count,
    describe_damage,
)
from headway.language_data.shards.storage import RangeReader

_READ_BYTES = 8 * 2**20
_LINE_OVERHEAD = 50


class JsonLines:
    """File format with one JSON value per line. It finds the blocks of such files and opens them."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the blocks of a shard, reading the complete file.

        Each block consists of whole lines with at least `BLOCK_BYTES` bytes in total, except the last. See
        `ShardFormat.scan` for the arguments.
        """
        table = BlockTable()
        begin = 0
        pending = b""
        for offset in range(0, num_bytes, _READ_BYTES):
            pending += reader.read_range(offset, _READ_BYTES)
            is_end = offset + _READ_BYTES >= num_bytes
            used = 0
            while len(pending) - used >= BLOCK_BYTES or (is_end and used < len(pending)):
                cut = pending.find(b"\n", min(used + BLOCK_BYTES, len(pending)) - 1) + 1
                if not cut and not is_end:
                    break
                cut = cut or len(pending)
                count = sum(1 for line in pending[used:cut].split(b"\n") if line.strip())
                if count:
                    table.add(begin + used, cut - used, count)
                used = cut
            begin += used
            pending = pending[used:]
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

    def decode(self, data: memoryview, offset: int, count: int) -> SlotBlock:
        """Split a block into lines. Each line is parsed when it is read.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If the block does not have `count` records.
        """
        everything = bytes(data).split(b"\n")
        lines = [line for line in everything if line.strip()]
        check_count(len(lines), count, self._name, offset)
        name = self._name

        def parse_line(line: bytes) -> Any:
            try:
                return json.loads(line)
            except (ValueError, RecursionError) as error:
                place = next(number for number, each in enumerate(everything) if each is line)
                begin = offset + sum(len(each) + 1 for each in everything[:place])
                raise DataError(describe_damage(name, begin, error)) from error

        return SlotBlock(lines, parse_line, len(data) + _LINE_OVERHEAD * len(lines))
