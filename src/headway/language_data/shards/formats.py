"""Formats and compressions of shards, chosen by the suffixes of file names."""

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from headway.common.optional import require
from headway.errors import ConfigError, DataError
from headway.language_data.shards.blocks import ShardFormat
from headway.language_data.shards.jsonl import JsonLines
from headway.language_data.shards.mds import MDS
from headway.language_data.shards.tables import Arrow, Parquet
from headway.language_data.shards.tar import WebDatasetTar

_FORMATS: dict[str, tuple[str, ...]] = {
    "jsonl": ("jsonl", "ndjson", "json"),
    "parquet": ("parquet", "pq"),
    "arrow": ("arrow", "feather", "ipc"),
    "tar": ("tar",),
    "mds": ("mds",),
}
_COMPRESSIONS = {
    "gz": "gzip", "tgz": "gzip", "bz2": "bz2", "xz": "xz", "zst": "zstd", "zstd": "zstd", "lz4": "lz4",
}  # fmt: skip

FORMATS = tuple(_FORMATS)
"""Names of the supported formats."""

DECOMPRESSION_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors that the decompressors raise for damaged files."""


def choose_format(url: str, name: str | None) -> str:
    """Return the name of a file's format.

    Args:
        url: Path or URL of the file.
        name: Format that the user chose, which is returned unchanged. None to choose by suffix.

    Raises:
        DataError: If the suffix belongs to no format.
    """
    if name is not None:
        return name
    suffixes = list_suffixes(url)
    if suffixes[-1:] == ["tgz"]:
        return "tar"
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    matching = [
        format_name for format_name, known_suffixes in _FORMATS.items() if suffixes and suffixes[-1] in known_suffixes
    ]
    if not matching:
        raise DataError(
            f"the format of {url} is not clear from its suffix; give format= as one of {', '.join(FORMATS)}"
        )
    return matching[0]


def choose_compression(url: str) -> str | None:
    """Return the compression that a file's last suffix denotes, such as "gzip", or None if it is not compressed."""
    return _COMPRESSIONS.get((list_suffixes(url) or [""])[-1])


def require_decompressor(url: str) -> None:
    """Import the package that is needed to decompress a file, if any.

    Call this before worker threads start, because pyarrow fails if two threads import it at the same time.

    Raises:
        OptionalDependencyMissing: If the package is not installed.
    """
    if choose_compression(url) in ("zstd", "lz4"):
        require("pyarrow", f"{url} is compressed, and decompressing it needs", "pyarrow")


def list_suffixes(url: str) -> list[str]:
    """Return the suffixes of a file's name in lower case, without dots. A URL's query is ignored."""
    path = url.partition("?")[0] if "://" in url else url
    return [suffix[1:].lower() for suffix in PurePosixPath(path).suffixes]


def build_format(name: str, columns: Sequence[str] | None) -> ShardFormat:
    """Create the object that reads files of a format.

    Args:
        name: Name of the format.
        columns: Names of the columns to read, for formats that have columns; None for all.

    Raises:
        ConfigError: If the format is unknown, or `columns` is given for a format without columns.
        OptionalDependencyMissing: If the format needs pyarrow, and it is not installed.
    """
    if name not in _FORMATS:
        raise ConfigError(f"format={name!r} is unknown; choose one of {', '.join(FORMATS)}")
    if name in ("parquet", "arrow"):
        return Parquet(columns) if name == "parquet" else Arrow(columns)
    if columns is not None:
        raise ConfigError(f"columns= chooses columns of parquet and arrow shards, but these are {name}; leave it out")
    format_classes: dict[str, Callable[[], ShardFormat]] = {"jsonl": JsonLines, "tar": WebDatasetTar, "mds": MDS}
    return format_classes[name]()


def open_decompressed(file: Any, compression: str) -> Any:
    """Return a file object that reads the decompressed content of `file`.

    Args:
        file: Binary file object.
        compression: "gzip", "bz2", "xz", "zstd" or "lz4". The last two need pyarrow (see `require_decompressor`).
    """
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "bz2":
        return bz2.BZ2File(file)
    if compression == "xz":
        return lzma.LZMAFile(file)
    arrow: Any = importlib.import_module("pyarrow")
    return arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), compression)
