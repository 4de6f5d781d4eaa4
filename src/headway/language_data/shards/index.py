"""Index of shards: a table of each file's blocks, which is built once by a scan and kept in a cache folder.

The name of an index file is a hash of the shard's URL, size and modification time or ETag, and of the options that
affect the index. A changed file therefore gets a new index. The first process of a machine builds the index under a
lock, while the others wait.
"""

import contextlib
import hashlib
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from headway.common.atomic import open_replacement
from headway.errors import DataError
from headway.language_data.shards.blocks import BlockTable, OpenShard, RecordBlock, ShardFormat
from headway.language_data.shards.copies import CachedRanges, LocalCopies, copy_stream, lock_file
from headway.language_data.shards.formats import (
    DECOMPRESSION_ERRORS,
    choose_compression,
    open_decompressed,
    require_decompressor,
)
from headway.language_data.shards.retry import RetryPolicy
from headway.language_data.shards.storage import RangeReader, ReaderFile, ShardFile, open_ranges
from headway.log import get_logger

log = get_logger(__name__)

_VERSION = 1
_NUM_THREADS = 8
_INDEX_LIMIT = 86_400.0
"""Maximum seconds that a process waits while another one builds an index."""


@dataclass(frozen=True)
class ShardAccess:
    """Settings for opening the content of shards: the cache of local copies and the retry policy.

    Attributes:
        copies: Folder of local copies.
        policy: Retry policy of remote reads, with its time limits.
    """

    copies: LocalCopies
    policy: RetryPolicy

    def open_content(self, file: ShardFile, *, caches_ranges: bool) -> tuple[RangeReader, int]:
        """Open a file, and return a pair of (reader of the content, size of the content in bytes).

        A compressed file is first decompressed into a local copy, unless the copy exists.

        Args:
            file: File to read.
            caches_ranges: Whether each byte range that is read from an uncompressed remote file is kept as a local copy.

        Raises:
            DataError: If a compressed file cannot be read or decompressed, or another process takes too long to do so.
            OSError: If a local file cannot be opened.
        """
        compression = choose_compression(file.url)
        if compression is not None:
            local_file = self.copies.open(file.key, lambda target: self._decompress_to(file, compression, target))
            return local_file, local_file.num_bytes
        reader = open_ranges(file, self.policy)
        if caches_ranges and not file.is_local:
            reader = CachedRanges(reader, self.copies, file.key)
        return reader, file.num_bytes

    def _decompress_to(self, file: ShardFile, compression: str, target: Any) -> None:
        """Write the decompressed content of a file to a binary file object.

        Raises:
            DataError: If the compressed data are damaged or cannot be read.
        """
        source = io.BufferedReader(ReaderFile(open_ranges(file, self.policy), file.num_bytes), 2**22)
        try:
            copy_stream(open_decompressed(source, compression), target)
        except DECOMPRESSION_ERRORS as error:
            raise DataError(
                f"{file.url}: the {compression} data are damaged after byte {target.tell()} of the decompressed content: {error}. "
                "Restore the file; records of a damaged compressed file cannot be skipped"
            ) from error


def describe_content(file: ShardFile) -> str:
    """Return the file's URL for error messages, marked "(decompressed)" if the file is compressed.

    Byte offsets in these messages refer to the decompressed content.
    """
    return f"{file.url} (decompressed)" if choose_compression(file.url) else file.url


def load_tables(
    files: list[ShardFile],
    formats: list[tuple[str, ShardFormat]],
    access: ShardAccess,
    folder: Path,
    *,
    skips_damage: bool,
) -> list[BlockTable]:
    """Return the block table of each file, from the cache folder or from a scan.

    Args:
        files: Shards.
        formats: Pairs of (name of the format, reader of the format), one per shard.
        access: Cache folder and retry policy with which the content of shards is opened.
        folder: Cache folder of the indexes.
        skips_damage: Whether to read all records during the scan and to leave out damaged ones.

    Raises:
        DataError: If a file cannot be read, or is damaged in a way that is not or cannot be skipped. Also if another
            process takes longer than a day to build the index of a file.
        OptionalDependencyMissing: If a package that is needed to decompress a file is not installed.
    """

    def load_table(number: int) -> BlockTable:
        """Return the block table of a shard from the index folder. If it is missing, scan the shard and write it."""
        file, (format_name, shard_format) = files[number], formats[number]
        path = _get_index_path(folder, file, format_name, skips_damage)
        table = _read_index(path)
        if table is not None:
            return table
        with lock_file(path.with_suffix(".lock"), _INDEX_LIMIT, f"the index of {file.url}"):
            table = _read_index(path)
            if table is None:
                table = scan_shard(file, shard_format, access, skips_damage)
                with open_replacement(path, has_other_writers=True) as staged, staged.open("wb") as target:
                    arrays = table.to_arrays()
                    numpy.savez(
                        target, blocks=arrays["blocks"], excluded=arrays["excluded"], num_skipped=arrays["num_skipped"]
                    )
        return table

    for file in files:
        require_decompressor(file.url)
    # Use several threads, because scans of remote files mostly wait for the network. Scans of local files gain less.
    with ThreadPoolExecutor(min(_NUM_THREADS, max(1, len(files)))) as pool:
        return list(pool.map(load_table, range(len(files))))


def _get_index_path(folder: Path, file: ShardFile, format_name: str, skips_damage: bool) -> Path:
    options = hashlib.sha256(f"{_VERSION} {format_name} {skips_damage}".encode()).hexdigest()[:8]
    return folder / f"{file.key}-{options}.npz"


def _read_index(path: Path) -> BlockTable | None:
    """Return the block table in an index file; None if the file does not exist or is damaged."""
    with (
        contextlib.suppress(FileNotFoundError, ValueError, KeyError, zipfile.BadZipFile, EOFError),
        numpy.load(path) as arrays,
    ):
        return BlockTable.from_arrays(arrays)
    return None


def scan_shard(file: ShardFile, shard_format: ShardFormat, access: ShardAccess, skips_damage: bool) -> BlockTable:
    """Scan a shard, and return a table of its blocks: where each one begins, and how many records it contains.

    Args:
        file: Shard to scan.
        shard_format: Reader of the shard's format.
        access: Cache folder and retry policy with which the content of the shard is opened.
        skips_damage: Whether to read all records and to leave out damaged ones.

    Raises:
        DataError: If the file cannot be read. Also if it is damaged, and `skips_damage` is False or the damage cannot
            be skipped.
    """
    name = describe_content(file)
    reader, num_bytes = access.open_content(file, caches_ranges=False)
    scan = shard_format.scan(reader, num_bytes, name)
    if not skips_damage:
        if scan.damage:
            raise DataError(f'{scan.damage}. Restore the file, or leave damaged records out by on_damage="skip"')
        return scan.table
    table = BlockTable()
    if scan.damage:
        table.num_skipped += 1
        log.warning("left out: %s", scan.damage)
    if scan.table.counts:
        shard = shard_format.open(reader, num_bytes, name)
        for offset, size, count in zip(scan.table.offsets, scan.table.sizes, scan.table.counts):
            _add_checked_block(table, shard, reader.read_range(offset, size), offset, size, count)
    return table


def _add_checked_block(
    table: BlockTable, shard: OpenShard, data: memoryview, offset: int, size: int, count: int
) -> None:
    """Append a block to a table, with its damaged records marked as excluded.

    If all of its records are damaged, they are only added to `num_skipped`.

    Args:
        table: Table to change.
        shard: Open shard that contains the block.
        data: Bytes of the block.
        offset: Byte offset of the block in the file.
        size: Size of the block in bytes.
        count: Number of records in the block.
    """
    try:
        block = shard.decode(data, offset, count)
    except DataError as error:
        log.warning("left out %d records: %s", count, error)
        table.num_skipped += count
        return
    damaged = _find_damaged(block, count)
    table.num_skipped += len(damaged)
    if len(damaged) < count:
        table.excluded += [(len(table.counts), index) for index in damaged]
        table.add_block(offset, size, count)


def _find_damaged(block: RecordBlock, count: int) -> list[int]:
    """Return the indices of a block's records that cannot be decoded."""
    damaged = []
    for index in range(count):
        try:
            block.read_records([index])
        except DataError as error:
            log.warning("left out: %s", error)
            damaged.append(index)
    return damaged
