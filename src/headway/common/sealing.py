"""What shows that a line or a value is of this run: an HMAC with the run's secret before it, checked before it is read."""

import hmac
import struct
from collections.abc import Callable
from pathlib import Path

from headway.common import env
from headway.common.untrusted import printable, read_regular
from headway.errors import CheckpointError, ConfigError

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
        return (
            f"{self.num_dropped} lines, values and connections of others were dropped in all"
            if self.num_dropped > 1
            else ""
        )

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
        return hmac.digest(self._secret, salt.encode(), "sha256").hex()

    def close(self, place: str, content: bytes) -> bytes:
        """The content with its proof; it opens at the same place only."""
        return self._proof(place, content) + content

    def open(self, place: str, sealed: bytes) -> bytes | None:
        """What was closed at this place; None for anything else, which whoever asks has to note."""
        content = sealed[SIZE:]
        return content if hmac.compare_digest(sealed[:SIZE], self._proof(place, content)) else None

    def _proof(self, place: str, content: bytes) -> bytes:
        name = place.encode()
        return (
            hmac.digest(self._secret, struct.pack("<H", len(name)) + name + content, "sha256")[: SIZE // 2]
            .hex()
            .encode()
        )
