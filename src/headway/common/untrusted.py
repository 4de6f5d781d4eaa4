"""Untrusted input: bounded reads of files and JSON, and text made safe to print.

Files, variables and lines from the network can contain anything. Reading them must not hang or overflow the stack.
"""

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

PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""Exceptions that code can raise when it parses a value of unknown type or structure."""

_MAX_SHOWN = 100
"""Maximum number of characters of a value in an error message."""


def open_regular_file(path: Path, error_class: type[HeadwayError] = CheckpointError) -> BinaryIO:
    """Open a regular file for unbuffered reading.

    Pipes and devices, which might never end, are refused without being opened.

    Args:
        path: The file, or a link to it.
        error_class: Class of the error to raise. Default: CheckpointError.

    Raises:
        CheckpointError (or `error_class`): If the path is not a regular file or cannot be opened.
    """
    if isinstance(path, ObjectPath):
        try:
            return path.open()  # type: ignore[no-any-return]
        except FileNotFoundError as error:
            raise error_class(f"{path} cannot be read: the object does not exist") from error
    try:
        _check_kind(path, os.stat(path).st_mode, error_class)
        # If the path becomes a pipe at this moment, O_NONBLOCK keeps `open` from waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise error_class(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    file = os.fdopen(handle, "rb", buffering=0)
    try:
        _check_kind(path, os.fstat(handle).st_mode, error_class)
    except HeadwayError:
        file.close()
        raise
    return file


def read_regular_file(path: Path, max_bytes: int, error_class: type[HeadwayError] = CheckpointError) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes` bytes.

    Args:
        path: The file, or a link to it.
        max_bytes: Maximum size of the file in bytes.
        error_class: Class of the error to raise. Default: CheckpointError.

    Raises:
        CheckpointError (or `error_class`): If the path is not a regular file, cannot be read, or is larger than `max_bytes`
            bytes.
    """
    with open_regular_file(path, error_class) as file:
        try:
            if isinstance(path, ObjectPath):
                size = path.client.get_size(path.key) or 0
            else:
                size = os.fstat(file.fileno()).st_size
            # Files of /proc report a size of 0, so count the bytes while reading. One byte more shows that it is too long.
            parts: list[bytes] = []
            remaining = max_bytes + 1
            while size <= max_bytes and remaining > 0:
                part = file.read(remaining)
                if not part:
                    break
                parts.append(part)
                remaining -= len(part)
        except OSError as error:
            raise error_class(f"{path} cannot be read: {error.strerror or error}") from error
    if size > max_bytes or remaining == 0:
        raise error_class(f"{path} is too long: {max(size, max_bytes + 1):,} bytes, where {max_bytes:,} are the most")
    return b"".join(parts)


def _check_kind(path: Path, mode: int, error_class: type[HeadwayError]) -> None:
    """Raise `error_class` if a path is not that of a regular file.

    Args:
        path: Path, for the message.
        mode: Mode of the file from `os.stat`.
        error_class: Class of the error.
    """
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise error_class(f"{path} is {kind}, not a regular file; nothing was read from it")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text that may come from an untrusted source.

    Raises:
        JSONDecodeError: If the text is not JSON, or is nested too deeply for Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deep", "", 0) from None


def parse_whole_number(text: str) -> int | None:
    """Parse a non-negative integer of at most 18 digits. Return None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def shorten_repr(value: object) -> str:
    """Return the `repr` of a value for an error message, truncated to 100 characters.

    A value that Python cannot convert to text is described instead.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int, or a container of one, with more digits than Python converts
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value too large to print"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def escape_text(text: object) -> str:
    """Escape characters in a text that would move the cursor, change colors, or change the writing direction.

    The result is safe to print on a terminal.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def escape_json(value: Any) -> Any:
    """Return a copy of a JSON value in which all strings are safe to print. Line breaks and tabs are kept."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "\n".join("\t".join(map(escape_text, line.split("\t"))) for line in value.split("\n"))
    if isinstance(value, dict):
        return {escape_json(key): escape_json(each) for key, each in value.items()}
    return [escape_json(each) for each in value] if isinstance(value, list) else value
