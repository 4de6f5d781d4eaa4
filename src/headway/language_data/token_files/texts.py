"""Text documents in data files: lists blocks of documents, and reads their texts in any order and process.

JSON lines, Parquet, Arrow, tar and MDS files are read by the formats of sharded data. In addition, a text file is one
document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import DataError
from headway.language_data.shards.blocks import (
    BlockTable,
    LazyBlock,
    OpenShard,
    ShardFormat,
    ShardScan,
)
from headway.language_data.shards.copies import LocalCopies
from headway.language_data.shards.formats import build_format, choose_compression, choose_format, list_suffixes
from headway.language_data.shards.index import ShardAccess, describe_content, load_tables
from headway.language_data.shards.retry import RetryPolicy
from headway.language_data.shards.storage import RangeReader, find_files, get_cache_folder

_TEXT_SUFFIXES = frozenset({"txt", "text"})
_HAS_COLUMNS = frozenset({"parquet", "arrow"})
_COPY_BYTES = 64 * 2**30
_POLICY = RetryPolicy(300.0, 30.0)
_MAX_SHOWN_COLUMNS = 10


@dataclass(frozen=True)
class TextBlock:
    """Consecutive documents of a file that are read together.

    Attributes:
        file: Index of the file.
        offset: Byte offset of the block in the file, or in its decompressed content.
        num_bytes: Size of the block.
        num_documents: Number of documents in the block.
    """

    file: int
    offset: int
    num_bytes: int
    num_documents: int


class PlainText:
    """File format in which a file is one document. Empty files have no document."""

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Return a table with the complete file as one block. See `ShardFormat.scan` for the arguments."""
        table = BlockTable()
        if num_bytes:
            table.add_block(0, num_bytes, 1)
        return ShardScan(table)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenPlainText":
        """Return an object that decodes the file. All arguments are ignored."""
        return OpenPlainText()


class OpenPlainText:
    """Text file whose content is one record."""

    def decode(self, data: memoryview, offset: int, count: int) -> LazyBlock:
        """Return the block with the bytes of the file as its record. See `OpenShard.decode` for the arguments."""
        return LazyBlock([data], bytes, len(data))


class TextFiles:
    """Data files that contain text documents. The object can be sent to other processes.

    Creating it finds the documents of all files. JSON lines are read completely for this, and compressed files are
    decompressed into the cache folder.

    Args:
        paths: Paths, patterns or URLs of the files.
        column: Name of the entry that contains the text of a document. Not used in text files.
        cache_dir: Folder for indexes and decompressed files. None: `~/.cache/headway/shards`.

    Attributes:
        blocks: Blocks of documents, in the order of the files.

    Raises:
        DataError: If there are no files or no documents, or a file is damaged or cannot be read.
        OptionalDependencyMissing: If a package that a format or storage needs is not installed.
    """

    def __init__(self, paths: Sequence[str], column: str, cache_dir: Path | None = None) -> None:
        folder = get_cache_folder(cache_dir)
        self._column = column
        self._files = find_files(paths, _POLICY)
        self._access = ShardAccess(LocalCopies(folder / "copies", _COPY_BYTES, _POLICY), _POLICY)
        formats = [_choose_text_format(file.url, column) for file in self._files]
        tables = load_tables(self._files, formats, self._access, folder / "index", skips_damage=False)
        self._formats = [text_format for _, text_format in formats]
        self.blocks = [
            TextBlock(number, offset, num_bytes, count)
            for number, table in enumerate(tables)
            for offset, num_bytes, count in zip(table.offsets, table.sizes, table.counts)
        ]
        self._open_file: tuple[int, RangeReader, OpenShard] | None = None  # with the index of the file
        if not self.blocks:
            raise DataError(f"{', '.join(paths)} has no documents; give files with at least one document")

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._files)

    @property
    def num_documents(self) -> int:
        """Number of documents in all files."""
        return sum(block.num_documents for block in self.blocks)

    def describe_files(self) -> list[list[Any]]:
        """Return the path, size and version of each file, and the name of the column with the text."""
        return [[self._column], *([file.url, file.num_bytes, file.version] for file in self._files)]

    def describe_block(self, block: TextBlock) -> str:
        """Return the name of a block for messages: its file and its offset."""
        return f"{describe_content(self._files[block.file])}, after byte {block.offset}"

    def read_texts(self, block: TextBlock, max_documents: int | None = None) -> list[str]:
        """Return the texts of a block's documents. A document without text gives "".

        Args:
            block: Block to read.
            max_documents: Number of documents after which to stop. None: all documents of the block.

        Raises:
            DataError: If a document is damaged, has no entry with the name of the column, or this is not text.
        """
        if self._open_file is None or self._open_file[0] != block.file:
            self._open_file = self._open(block.file)
        _, reader, shard = self._open_file
        records = shard.decode(reader.read_range(block.offset, block.num_bytes), block.offset, block.num_documents)
        count = block.num_documents if max_documents is None else min(max_documents, block.num_documents)
        return [self._get_text(record, block) for record in records.read_records(range(count))]

    def _open(self, number: int) -> tuple[int, RangeReader, OpenShard]:
        if self._open_file is not None:
            self._open_file[1].close()
        file = self._files[number]
        reader, num_bytes = self._access.open_content(file, caches_ranges=False)
        return number, reader, self._formats[number].open(reader, num_bytes, describe_content(file))

    def _get_text(self, record: Any, block: TextBlock) -> str:
        """Return the text of a record.

        Raises:
            DataError: If the record has no entry with the name of the column, or this is not text.
        """
        name = self.describe_block(block)
        value = record
        if isinstance(record, dict):
            if self._column not in record:
                known = ", ".join(map(repr, list(record)[:_MAX_SHOWN_COLUMNS]))
                raise DataError(f"{name}: a document has no {self._column!r}, only {known}; give --text_column")
            value = record[self._column]
        if isinstance(value, bytes):
            try:
                return value.decode("utf-8-sig")  # without the byte order mark that editors on Windows write
            except UnicodeDecodeError as error:
                raise DataError(f"{name}: a text is not UTF-8 ({error}); convert the file to UTF-8") from error
        if value is None or isinstance(value, str):
            return value or ""
        if value is record:
            raise DataError(
                f"{name}: a record is a {type(record).__name__} instead of an object; write one object with the entry "
                f"{self._column!r} per line"
            )
        raise DataError(
            f"{name}: a document has a {type(value).__name__} in {self._column!r} instead of text; give --text_column with the name "
            "of the text"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the open file."""
        return {**self.__dict__, "_open_file": None}


def _choose_text_format(url: str, column: str) -> tuple[str, ShardFormat]:
    """Return the name of a file's format, and the object that reads it.

    Raises:
        DataError: If the suffix belongs to no format.
        OptionalDependencyMissing: If the format needs a package that is not installed.
    """
    suffixes = list_suffixes(url)
    if suffixes and choose_compression(url) is not None:
        suffixes.pop()
    if suffixes and suffixes[-1] in _TEXT_SUFFIXES:
        return "text", PlainText()
    try:
        name = choose_format(url, None)
    except DataError as error:
        raise DataError(
            f"the format of {url} is not clear from its suffix; rename it, for example to .jsonl, .parquet or .txt"
        ) from error
    return name, build_format(name, [column] if name in _HAS_COLUMNS else None)
