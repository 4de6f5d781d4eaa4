"""Blocks of records, and the interface of a file format.

A shard consists of blocks: consecutive records that are read together, such as one megabyte of lines or one row group.
The block table of a shard contains each block's offset and number of records, so that any record can be reached
without reading those before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy

from headway.errors import DataError
from headway.language_data.shards.storage import RangeReader

BLOCK_BYTES = 2**20
"""Minimum bytes of consecutive records that form one block, in formats that do not define blocks."""


@dataclass
class BlockTable:
    """Table of one shard's blocks, in the order of the file.

    Attributes:
        offsets: Byte offset of each block in the file.
        sizes: Size of each block in bytes.
        counts: Number of records in each block, including those in `excluded`.
        excluded: Damaged records that are left out, as pairs of (index of the block, index of the record in the block).
        num_skipped: Number of damaged records that are left out, including those of blocks that are left out
            completely. Damage that ends a scan early counts as one record.
    """

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    excluded: list[tuple[int, int]] = field(default_factory=list)
    num_skipped: int = 0

    def add_block(self, offset: int, num_bytes: int, count: int) -> None:
        """Append a block of `count` records in `num_bytes` bytes, which starts at byte `offset` of the file."""
        self.offsets.append(offset)
        self.sizes.append(num_bytes)
        self.counts.append(count)

    def to_arrays(self) -> dict[str, numpy.ndarray[Any, Any]]:
        """Return the table as arrays that can be saved in a file.

        "blocks" holds the rows of offsets, sizes and counts. "excluded" has one row (block, record) per damaged record.
        "num_skipped" has no dimension.
        """
        blocks = numpy.array([self.offsets, self.sizes, self.counts], numpy.int64).reshape(3, -1)
        excluded = numpy.array(self.excluded, numpy.int64).reshape(-1, 2)
        return {"blocks": blocks, "excluded": excluded, "num_skipped": numpy.array(self.num_skipped)}

    @staticmethod
    def from_arrays(arrays: Any) -> "BlockTable":
        """Build the table from the arrays that `to_arrays` returned."""
        offsets, sizes, counts = arrays["blocks"].tolist()
        excluded = [(block, record) for block, record in arrays["excluded"].tolist()]
        return BlockTable(offsets, sizes, counts, excluded, int(arrays["num_skipped"]))


@dataclass
class ShardScan:
    """Result of a scan over a shard.

    Attributes:
        table: Blocks of the shard.
        damage: Reason and offset of the damage that ended the scan early; "" if the scan reached the end of the file.
    """

    table: BlockTable
    damage: str = ""


class RecordBlock(Protocol):
    """Interface of a block whose records are in memory.

    Attributes:
        num_bytes: Approximate memory of the block in bytes.
    """

    num_bytes: int

    def read_records(self, indices: Sequence[int]) -> list[Any]:
        """Return the records with the given indices in the block.

        Raises:
            DataError: If a record is damaged. The message names the file and the offset.
        """

    def drop_records(self, indices: Sequence[int]) -> None:
        """Remove the records with the given indices, so that later records get smaller indices."""


class OpenShard(Protocol):
    """Interface of an open shard, which decodes the bytes of its blocks."""

    def decode(self, data: memoryview, offset: int, count: int) -> RecordBlock:
        """Decode a block and return its records.

        Args:
            data: Bytes of the block.
            offset: Byte offset of the block in the file.
            count: Number of records in the block.

        Raises:
            DataError: If the block is damaged. The message names the file and the offset.
        """


class ShardFormat(Protocol):
    """Interface of a file format: finds the blocks of a shard and opens the shard."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the blocks of a shard, and return a `ShardScan` with their table.

        Args:
            reader: Reader of the file's bytes.
            num_bytes: Size of the file.
            name: Name of the file, for messages.

        Raises:
            DataError: If the file does not have this format.
        """

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> OpenShard:
        """Open a shard, and return an object that decodes its blocks.

        Args:
            reader: Reader of the file's bytes.
            num_bytes: Size of the file.
            name: Name of the file, for messages.

        Raises:
            DataError: If a part of the file that describes its records is damaged.
        """


class LazyBlock:
    """Block that decodes each record when it is read, from a slot such as the bytes of a line.

    Args:
        slots: Undecoded form of each record, which is passed to `decode`.
        decode: Function that decodes a slot and returns the record.
        num_bytes: Approximate memory of the block in bytes.
    """

    def __init__(self, slots: list[Any], decode: Callable[[Any], Any], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._slots = slots
        self._decode = decode

    def read_records(self, indices: Sequence[int]) -> list[Any]:
        """Return the records with the given indices in the block.

        Raises:
            DataError: If a record is damaged. It is raised by the function `decode`.
        """
        slots, decode = self._slots, self._decode
        return [decode(slots[index]) for index in indices]

    def drop_records(self, indices: Sequence[int]) -> None:
        """Remove the records with the given indices, so that later records get smaller indices."""
        for index in sorted(indices, reverse=True):
            del self._slots[index]


def describe_damage(name: str, offset: int, reason: object) -> str:
    """Return the error message for a damaged record or block.

    Args:
        name: Name of the file.
        offset: Byte offset of the record or block.
        reason: Error that the decoder raised, or a description of the damage.
    """
    return f"{name}: the record at byte {offset} is damaged: {' '.join(str(reason).split())[:300]}"


def check_count(num_records: int, num_expected: int, name: str, offset: int) -> None:
    """Raise `DataError` if a block does not have the number of records that the index states.

    Args:
        num_records: Number of records in the block.
        num_expected: Number of records in the index.
        name: Name of the file, for the message.
        offset: Byte offset of the block, for the message.
    """
    if num_records != num_expected:
        raise DataError(
            f"{name}: the block at byte {offset} has {num_records} records instead of {num_expected}, so the file has changed since "
            "it was indexed without a new size or modification time; delete its index from the cache folder, or restore the file"
        )
