"""What may be anybody's, from files, variables and lines: read without a hang or an end of the stack, shown as plain text.

What shows that a line or a value is of this run after all: an HMAC with the run's secret before it, checked before it is read.
"""

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from headway.common import env
from headway.common.object_path import ObjectPath
from headway.errors import CheckpointError, ConfigError, HeadwayError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""What may come of making something of a value that may be anything."""
_MOST_SHOWN = 100
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
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def printable(text: object) -> str:
    """Text for a terminal: what would move its cursor, change its colours or turn the writing is shown by its number."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def plain(value: Any) -> Any:
    """What came from outside as JSON: every text in it printable, but for its line breaks and tabs."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "\n".join("\t".join(map(printable, line.split("\t"))) for line in value.split("\n"))
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


SHORTEST, LONGEST = 16, 4096
"""Bytes of a secret."""

SIZE = 32
"""Characters of a proof: 128 bits in hexadecimal, so that it fits into a line of text."""


def users_secret(file: str | None = None) -> bytes:
    """The secret that the user gives a run: what the file holds, else HEADWAY_SECRET; empty where there is neither.

    Args:
        file: of `--secret`; None: not given.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short to be one.
    """
    if file is None:
        origin, secret = env.SECRET, (env.get(env.SECRET) or "").strip().encode()
    else:
        origin = f"--secret {printable(file)}"
        try:
            secret = read_regular(Path(file).expanduser(), LONGEST).strip()
        except CheckpointError as error:
            raise ConfigError(f"--secret: {error}") from error
    if (secret or file is not None) and len(secret) < SHORTEST:
        raise ConfigError(
            f"the secret of {origin} has {len(secret)} bytes and must have at least {SHORTEST}, such as `openssl rand -hex 16` prints"
        )
    return secret


class UnsealedCounter:
    """Counts what was not of this run and so was dropped, and says so once.

    Args:
        say: takes the sentence.

    Attributes:
        num_dropped: lines, values and connections so far.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.num_dropped = 0

    def total(self) -> str:
        """How many in a sentence; empty where the one that was said is all."""
        if self.num_dropped <= 1:
            return ""
        return f"{self.num_dropped} lines, values and connections of others were dropped in all"

    def note(self, what: str) -> None:
        """Count `what`, such as "a line from 10.0.0.9"."""
        self.num_dropped += 1
        if self.num_dropped == 1:
            self._say(
                f"{printable(what)} does not prove to be of this run: dropped, as all like it will be (docs/security.md)"
            )


class Seal:
    """Puts a proof before what this run says, and opens only what has one.

    Args:
        secret: of the run; with an empty one a proof keeps chance away, and nobody who means it.
        strangers: counts what has none.
    """

    def __init__(self, secret: bytes, strangers: UnsealedCounter) -> None:
        self._secret = secret
        self.strangers = strangers

    def derive(self, salt: str) -> str:
        """A secret of its own for each salt, in hexadecimal."""
        import hmac  # with OpenSSL, which most commands have no use for

        return hmac.digest(self._secret, salt.encode(), "sha256").hex()

    def close(self, place: str, content: bytes) -> bytes:
        """The content with its proof; it opens at the same place only."""
        return self._proof(place, content) + content

    def open(self, place: str, sealed: bytes) -> bytes | None:
        """What was closed at this place; None for anything else, which whoever asks has to note."""
        import hmac

        content = sealed[SIZE:]
        return content if hmac.compare_digest(sealed[:SIZE], self._proof(place, content)) else None

    def _proof(self, place: str, content: bytes) -> bytes:
        import hmac

        name = place.encode()
        proof = hmac.digest(self._secret, struct.pack("<H", len(name)) + name + content, "sha256")
        return proof[: SIZE // 2].hex().encode()
