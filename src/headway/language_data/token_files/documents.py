"""Find the documents in token files that have no index, by the token that ends or begins each document.

A scan reads a file once and stores the end of each document in a cache folder. All processes on a machine share one
scan.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from headway.common.atomic import open_replacement
from headway.errors import DataError
from headway.language_data.shards.copies import lock_file
from headway.language_data.token_files.files import TokenFile
from headway.log import get_logger

log = get_logger(__name__)

_VERSION = 1
_CHUNK = 2**24
_SCAN_LIMIT = 86_400.0
"""Maximum seconds that a process waits while another one scans a file."""

Integers = numpy.ndarray[Any, Any]


class Separator(NamedTuple):
    """Token that separates documents.

    Attributes:
        token_id: ID of the token.
        is_first: Whether the token is the first one of each document. Otherwise it is the last one.
    """

    token_id: int
    is_first: bool


class CutDocuments:
    """Documents of a file that was cut at a separator.

    Args:
        ends: For each document, the position of the token after its last one.
    """

    def __init__(self, ends: Integers) -> None:
        self._ends = ends

    def find_document(self, number: int) -> tuple[int, int]:
        """Return the positions of a document's first token, and of the token after its last, in the file."""
        return int(self._ends[number - 1]) if number else 0, int(self._ends[number])

    def measure_documents(self) -> Integers:
        """Return the number of tokens of each document, as an int64 array."""
        return numpy.diff(self._ends, prepend=0)


def get_scan_path(folder: Path, file: TokenFile, separator: Separator) -> Path:
    """Return the path in `folder` at which the ends of a token file's documents are cached.

    The name is a hash of the file's path, size, version (its modification time) and dtype, and of the separator. The
    documents of a changed file are therefore found anew.
    """
    parts = (
        _VERSION,
        file.path,
        file.num_bytes,
        file.version,
        file.dtype.str,
        separator.token_id,
        separator.is_first,
    )
    return folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:40]}.npy"


def scan_documents(file: TokenFile, separator: Separator, path: Path) -> int:
    """Store the ends of a file's documents in `path`, unless a scan has done so, and return the number of documents.

    Raises:
        DataError: If another process has been scanning the file for a day.
    """
    if path.exists():
        return len(open_scan(path))
    with lock_file(path.with_suffix(".lock"), _SCAN_LIMIT, f"the documents of {file.path}"):
        if not path.exists():
            log.info("finding the documents of %s, once", file.path)
            ends = find_ends(file.map_tokens(), separator)
            with open_replacement(path, has_other_writers=True) as staged, staged.open("wb") as target:
                numpy.save(target, ends)
    return len(open_scan(path))


def open_scan(path: Path) -> Integers:
    """Return the ends of documents that a scan has stored, as a memory-mapped array.

    Raises:
        DataError: If the file was removed or is damaged.
    """
    try:
        return numpy.asarray(numpy.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}, the positions of documents, cannot be read ({error}); delete it and create the dataset again"
        ) from error


def find_ends(tokens: Integers, separator: Separator) -> Integers:
    """Return the end of each document: the position of the token after its last one, as an int64 array.

    Tokens before the first separator, or after the last one, are a document, too.
    """
    places = [
        begin + numpy.flatnonzero(tokens[begin : begin + _CHUNK] == separator.token_id)
        for begin in range(0, len(tokens), _CHUNK)
    ]
    ends = numpy.concatenate(places)
    if separator.is_first:
        ends = ends[ends > 0]
    else:
        ends += 1
    if not len(ends) or ends[-1] != len(tokens):
        ends = numpy.append(ends, len(tokens))
    return ends.astype(numpy.int64)
