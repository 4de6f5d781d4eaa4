"""Shards in columnar formats: Parquet files, and Arrow files in the stream or file format, read with pyarrow.

A record is a dict from column names to values. A block is a row group or a record batch.
"""

import io
from collections.abc import Sequence
from typing import Any

from headway.common.optional import require
from headway.errors import DataError
from headway.language_data.shards.blocks import BlockTable, ShardScan, check_count, describe_damage
from headway.language_data.shards.storage import RangeReader, ReaderFile

_FILE_MAGIC = b"ARROW1"
_FILE_HEADER = 8


class TableBlock:
    """Block of a table's rows in memory.

    Args:
        table: pyarrow table or record batch.
        name: Name of the file, for messages.
        offset: Byte offset of the block in the file.

    Attributes:
        num_bytes: Memory of the block in bytes.
    """

    def __init__(self, table: Any, name: str, offset: int) -> None:
        self.num_bytes = int(table.nbytes)
        self._table = table
        self._name = name
        self._offset = offset

    def read_records(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows with the given indices as dicts from column names to values.

        Raises:
            DataError: If a value is damaged, such as text that is not UTF-8.
        """
        try:
            rows: list[Any] = self._table.take(list(indices)).to_pylist()
        except (ValueError, OSError) as error:
            raise DataError(describe_damage(self._name, self._offset, error)) from error
        return rows

    def drop_records(self, indices: Sequence[int]) -> None:
        """Remove the rows with the given indices, so that later rows get smaller indices."""
        dropped = set(indices)
        self._table = self._table.take([index for index in range(self._table.num_rows) if index not in dropped])


class Parquet:
    """File format of Parquet. It finds the row groups of such files, and opens the files.

    Args:
        columns: Names of the columns to read; None for all.

    Raises:
        OptionalDependencyMissing: If pyarrow is not installed.
    """

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        # Import it here, because scans run in several threads, which must not import pyarrow at the same time.
        require("pyarrow.parquet", "Parquet shards need", "pyarrow")
        self._columns = None if columns is None else list(columns)

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the row groups of a shard, each of which is a block. Only the footer of the file is read.

        See `ShardFormat.scan` for the arguments.

        Raises:
            DataError: If the file has no Parquet footer, or lacks one of the columns.
        """
        metadata = read_footer(reader, num_bytes, name)
        self._check_columns(metadata, name)
        table = BlockTable()
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.num_rows:
                offset, size = find_extent(group)
                table.add_block(offset, size, group.num_rows)
        return ShardScan(table)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenParquet":
        """Open a shard, and return an object that decodes its row groups.

        See `ShardFormat.open` for the arguments.

        Raises:
            DataError: If the file has no Parquet footer.
        """
        return OpenParquet(read_footer(reader, num_bytes, name), num_bytes, name, self._columns)

    def _check_columns(self, metadata: Any, name: str) -> None:
        """Raise `DataError` if the file with this name lacks a column that the user has chosen."""
        names = metadata.schema.to_arrow_schema().names
        unknown = [column for column in self._columns or () if column not in names]
        if unknown:
            raise DataError(f"{name} has no column {unknown[0]!r}; columns= may contain {', '.join(map(repr, names))}")


def read_footer(reader: RangeReader, num_bytes: int, name: str) -> Any:
    """Return the metadata of a Parquet file.

    Args:
        reader: Reader of the file's bytes.
        num_bytes: Size of the file.
        name: Name of the file, for messages.

    Raises:
        DataError: If the file is damaged or has another format.
    """
    parquet: Any = require("pyarrow.parquet", "Parquet shards need", "pyarrow")
    try:
        return parquet.read_metadata(ReaderFile(reader, num_bytes))
    except (ValueError, OSError) as error:
        raise DataError(describe_damage(name, max(0, num_bytes - 8), f"no Parquet footer ({error})")) from error


def find_extent(group: Any) -> tuple[int, int]:
    """Return a pair of (byte offset of a row group in its file, its number of bytes).

    Args:
        group: Metadata of the row group, from pyarrow.
    """
    begins, ends = [], []
    for number in range(group.num_columns):
        column = group.column(number)
        begin = column.data_page_offset
        # The offset 0 means that the column has no dictionary page, because a file begins with magic bytes.
        if column.has_dictionary_page and column.dictionary_page_offset:
            begin = min(begin, column.dictionary_page_offset)
        begins.append(begin)
        ends.append(begin + column.total_compressed_size)
    return min(begins), max(ends) - min(begins)


class OpenParquet:
    """Parquet file whose row groups can be decoded from their bytes.

    Args:
        metadata: Metadata of the file.
        num_bytes: Size of the file.
        name: Name of the file, for messages.
        columns: Names of the columns to read; None for all.
    """

    def __init__(self, metadata: Any, num_bytes: int, name: str, columns: list[str] | None) -> None:
        self._metadata = metadata
        self._num_bytes = num_bytes
        self._name = name
        self._columns = columns
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._group_by_offset = {find_extent(group)[0]: number for number, group in enumerate(groups) if group.num_rows}

    def decode(self, data: memoryview, offset: int, count: int) -> TableBlock:
        """Decode the rows of the row group that begins at byte `offset` of the file.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If the row group is damaged, or does not have `count` rows.
        """
        parquet: Any = require("pyarrow.parquet", "Parquet shards need", "pyarrow")
        number = self._group_by_offset.get(offset)
        if number is None:
            check_count(0, count, self._name, offset)
            raise AssertionError("an indexed block has at least one record")
        source = ReaderFile(PartialFileReader(data, offset), self._num_bytes)
        try:
            opened = parquet.ParquetFile(source, metadata=self._metadata, pre_buffer=False)
            table = opened.read_row_group(number, columns=self._columns, use_threads=False).combine_chunks()
        except (ValueError, OSError) as error:
            raise DataError(describe_damage(self._name, offset, f"row group {number}: {error}")) from error
        check_count(table.num_rows, count, self._name, offset)
        return TableBlock(table, self._name, offset)


class PartialFileReader:
    """Reader of byte ranges of a file, of which one part is in memory. Only this part can be read.

    Args:
        data: Bytes of the part.
        offset: Byte offset of the part in the file.
    """

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data = data
        self._offset = offset

    def read_range(self, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` bytes of the file from `offset` on.

        Raises:
            DataError: If some of these bytes are not in the part that is in memory.
        """
        begin = offset - self._offset
        if begin < 0 or begin + num_bytes > len(self._data):
            raise DataError(f"bytes {offset} to {offset + num_bytes} are outside of the row group")
        return self._data[begin : begin + num_bytes]

    def close(self) -> None:
        """Do nothing, because no file is open."""


class Arrow:
    """File format of Arrow: the stream format, as `datasets` writes it, or the file format.

    It finds the record batches of such files, and opens the files.

    Args:
        columns: Names of the columns to return; None for all.

    Raises:
        OptionalDependencyMissing: If pyarrow is not installed.
    """

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        # Import it here, because scans run in several threads, which must not import pyarrow at the same time.
        require("pyarrow.ipc", "Arrow shards need", "pyarrow")
        self._columns = None if columns is None else list(columns)

    def scan(self, reader: RangeReader, num_bytes: int, name: str) -> ShardScan:
        """Find the record batches of a shard, each of which is a block. The complete file is read.

        The batches of a file with dictionaries form one block, because they depend on the dictionaries before them. The
        result describes the damage if a message after the schema cannot be read. See `ShardFormat.scan` for the
        arguments.

        Raises:
            DataError: If the file has no Arrow schema, or lacks one of the columns.
        """
        ipc: Any = require("pyarrow.ipc", "Arrow shards need", "pyarrow")
        file = _open_after_magic(reader, num_bytes)
        begin = file.tell()
        table = BlockTable()
        try:
            schema_message = ipc.read_message(file)
            schema = ipc.read_schema(schema_message)
            self._check_columns(schema, name)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(describe_damage(name, 0, f"no Arrow schema ({error})")) from error
        offset, has_dictionaries, damage = file.tell(), False, ""
        while True:
            try:
                message = ipc.read_message(file)
            except EOFError:
                break
            except (ValueError, OSError) as error:
                return ShardScan(table, describe_damage(name, offset, error))
            if message.type == "dictionary":
                has_dictionaries = True
            elif not has_dictionaries:
                try:
                    num_batch_rows = ipc.read_record_batch(message, schema).num_rows
                except (ValueError, OSError) as error:  # such as a damaged compressed buffer; the next batch is intact
                    damage = damage or describe_damage(name, offset, error)
                    num_batch_rows = 0
                if num_batch_rows:
                    table.add_block(offset, file.tell() - offset, num_batch_rows)
            offset = file.tell()
        if has_dictionaries:
            table = BlockTable()
            file.seek(begin)
            try:
                num_rows = sum(batch.num_rows for batch in ipc.open_stream(file))
            except (ValueError, OSError) as error:
                return ShardScan(table, describe_damage(name, begin, error))
            if num_rows:
                table.add_block(begin, num_bytes - begin, num_rows)
        return ShardScan(table, damage)

    def open(self, reader: RangeReader, num_bytes: int, name: str) -> "OpenArrow":
        """Open a shard, and return an object that decodes its record batches.

        See `ShardFormat.open` for the arguments.
        """
        ipc: Any = require("pyarrow.ipc", "Arrow shards need", "pyarrow")
        file = _open_after_magic(reader, num_bytes)
        begin = file.tell()
        return OpenArrow(ipc.read_schema(ipc.read_message(file)), begin, name, self._columns)

    def _check_columns(self, schema: Any, name: str) -> None:
        """Raise `DataError` if the file with this name lacks a column that the user has chosen."""
        unknown = [column for column in self._columns or () if column not in schema.names]
        if unknown:
            raise DataError(
                f"{name} has no column {unknown[0]!r}; columns= may contain {', '.join(map(repr, schema.names))}"
            )


def _open_after_magic(reader: RangeReader, num_bytes: int) -> io.BufferedReader:
    """Return a file object that starts at the schema of an Arrow file.

    The file format consists of a magic string, the stream format and a footer.
    """
    file: io.BufferedReader = io.BufferedReader(ReaderFile(reader, num_bytes), 2**20)
    if bytes(reader.read_range(0, len(_FILE_MAGIC))) == _FILE_MAGIC:
        file.seek(_FILE_HEADER)
    return file


class OpenArrow:
    """Arrow file whose record batches can be decoded from their bytes.

    Args:
        schema: Schema of the file.
        begin: Byte offset of the schema.
        name: Name of the file, for messages.
        columns: Names of the columns to return; None for all.
    """

    def __init__(self, schema: Any, begin: int, name: str, columns: list[str] | None) -> None:
        self._schema = schema
        self._begin = begin
        self._name = name
        self._columns = columns

    def decode(self, data: memoryview, offset: int, count: int) -> TableBlock:
        """Decode the rows of a record batch, or of the complete file if it has dictionaries.

        See `OpenShard.decode` for the arguments.

        Raises:
            DataError: If the data are damaged, or do not have `count` rows.
        """
        arrow: Any = require("pyarrow", "Arrow shards need", "pyarrow")
        try:
            if offset == self._begin:
                table = arrow.ipc.open_stream(arrow.py_buffer(data)).read_all().combine_chunks()
            else:
                table = arrow.ipc.read_record_batch(arrow.ipc.read_message(arrow.py_buffer(data)), self._schema)
            table.validate(full=True)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(describe_damage(self._name, offset, error)) from error
        check_count(table.num_rows, count, self._name, offset)
        return TableBlock(table if self._columns is None else table.select(self._columns), self._name, offset)
