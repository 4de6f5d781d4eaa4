"""What may be anybody's, from files, variables and lines: read without a hang or an end of the stack, shown as plain text."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from headway.common.object_path import ObjectPath
from headway.errors import CheckpointError, HeadwayError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""What may come of making something of a value that may be anything."""
_LONGEST = 100
"""Characters of a value that an error shows."""


def open_regular(path: Path, refusal: type[HeadwayError] = CheckpointError) -> BinaryIO:
    """Open a file for reading, unbuffered; a pipe or a device, which might never end, is not even opened.

    Args:
        path: the file, or a link to it.
        refusal: the kind of error.

    Raises:
        CheckpointError: it is not a regular file (nor a link to one), or cannot be opened.
    """
    if isinstance(path, ObjectPath):
        try:
            return path.open()  # type: ignore[no-any-return]
        except FileNotFoundError as error:
            raise refusal(f"{path} cannot be read: the object does not exist") from error
    try:
        _check_kind(path, os.stat(path).st_mode, refusal)
        # Should it become a pipe in this moment, opening does not wait for who writes into it.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise refusal(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    file = os.fdopen(handle, "rb", buffering=0)
    try:
        _check_kind(path, os.fstat(handle).st_mode, refusal)
    except HeadwayError:
        file.close()
        raise
    return file


def read_regular(path: Path, most: int, refusal: type[HeadwayError] = CheckpointError) -> bytes:
    """All of a regular file of at most `most` bytes; else as `open_regular`.

    Raises:
        CheckpointError: it is not one, cannot be read, or is longer.
    """
    with open_regular(path, refusal) as file:
        try:
            # Some files of /proc have no end to go to; objects have no descriptor.
            size = path.client.size(path.key) or 0 if isinstance(path, ObjectPath) else os.fstat(file.fileno()).st_size
            parts, left = [], most + 1
            while size <= most and left and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise refusal(f"{path} cannot be read: {error.strerror or error}") from error
    if size > most or not left:
        raise refusal(f"{path} is too long: {max(size, most + 1):,} bytes, where {most:,} are the most")
    return b"".join(parts)


def _check_kind(path: Path, mode: int, refusal: type[HeadwayError]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise refusal(f"{path} is {kind}, not a regular file; nothing was read from it")


def parse_json(text: str | bytes) -> Any:
    """What the JSON says.

    Raises:
        JSONDecodeError: it is none, or is nested so deep that Python's stack would end.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deep", "", 0) from None


def whole_number(text: str) -> int | None:
    """The number that the digits make; None for anything else, and for more digits than any count has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def shown(value: object) -> str:
    """A value as it came in, for an error: cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, by itself or within
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value too large to print"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def printable(text: object) -> str:
    """Text for a terminal: what would move its cursor, change its colours or turn the writing is shown by its number."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def plain(value: Any) -> Any:
    """What came from outside as JSON: every text in it printable, but for its line breaks and tabs."""
    if isinstance(value, str):
        return (
            value
            if value.isprintable()
            else "\n".join("\t".join(map(printable, line.split("\t"))) for line in value.split("\n"))
        )
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value
