"""HMACs that prove that a message was sent by a process of this run, and the secret with which they are computed.

Messages from the network can contain anything. The HMAC is checked before the message is parsed.
"""

import struct
from collections.abc import Callable
from pathlib import Path

from headway.common import env
from headway.common.untrusted import escape_text, read_regular_file
from headway.errors import CheckpointError, ConfigError

SHORTEST_SECRET, LONGEST_SECRET = 16, 4096
"""Minimum length of a secret, and maximum length of a file that contains one, in bytes."""

MAC_SIZE = 32
"""Length of an HMAC in characters. An HMAC has 128 bits, written in hexadecimal so that it fits into a line of text."""


def read_secret(file: str | None = None) -> bytes:
    """Return the secret that the user set for the run, or b"" if there is none.

    Args:
        file: Path given by `--secret`. Default: None, the variable HEADWAY_SECRET is read.

    Raises:
        ConfigError: If the file cannot be read or is longer than `LONGEST_SECRET` bytes, or if the secret is shorter
            than `SHORTEST_SECRET` bytes.
    """
    if file is None:
        origin, secret = env.SECRET, (env.get(env.SECRET) or "").strip().encode()
    else:
        origin = f"--secret {escape_text(file)}"
        try:
            secret = read_regular_file(Path(file).expanduser(), LONGEST_SECRET).strip()
        except CheckpointError as error:
            raise ConfigError(f"--secret: {error}") from error
    if (secret or file is not None) and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the secret of {origin} has {len(secret)} bytes and must have at least {SHORTEST_SECRET}, such as `openssl "
            "rand -hex 16` prints"
        )
    return secret


class UnsealedCounter:
    """Counter of messages that were dropped because they had no valid HMAC of this run. The first one is reported.

    Args:
        report: Function that prints a sentence. It is called for the first dropped message only.

    Attributes:
        num_dropped: Number of dropped messages. A message can be a line, a value in a store, or a connection.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.num_dropped = 0

    def describe_total(self) -> str:
        """Return a sentence with the total number of dropped messages, or "" if at most one was dropped."""
        if self.num_dropped <= 1:
            return ""
        return f"{self.num_dropped} lines, values and connections of others were dropped in all"

    def count_message(self, description: str) -> None:
        """Count one dropped message.

        Args:
            description: Description of the message, such as "a line from 10.0.0.9".
        """
        self.num_dropped += 1
        if self.num_dropped == 1:
            self._report(
                f"{escape_text(description)} was not sent by a process of this run, so it is dropped, as all others like it will be "
                "(docs/security.md)"
            )


class Seal:
    """Authenticator that computes HMACs for messages of this run, and rejects received messages without a valid one.

    Args:
        secret: The run's secret. If empty, HMACs detect messages of other programs, but not an attacker.
        unsealed_counter: Counter for messages without a valid HMAC.
    """

    def __init__(self, secret: bytes, unsealed_counter: UnsealedCounter) -> None:
        self._secret = secret
        self.unsealed_counter = unsealed_counter

    def derive_secret(self, salt: str) -> str:
        """Return a secret derived from the run's secret and `salt`, in hexadecimal."""
        import hmac  # imported here because it loads OpenSSL, which most commands do not need

        return hmac.digest(self._secret, salt.encode(), "sha256").hex()

    def seal_message(self, context: str, content: bytes) -> bytes:
        """Return the content prefixed with its HMAC, which is valid for `context` only.

        Args:
            context: Name of the store key or connection that the message is for. The HMAC covers it, so that a message
                cannot be replayed under another name.
            content: Message to authenticate.
        """
        return self._compute_mac(context, content) + content

    def open_message(self, context: str, sealed: bytes) -> bytes | None:
        """Return the content of a message if its HMAC is valid for `context`, else None.

        This method does not count invalid messages. The caller counts them.

        Args:
            context: Name of the store key or connection that the message is for. The HMAC covers it, so that a message
                cannot be replayed under another name.
            sealed: Message as `seal_message` returned it.
        """
        import hmac

        content = sealed[MAC_SIZE:]
        return content if hmac.compare_digest(sealed[:MAC_SIZE], self._compute_mac(context, content)) else None

    def _compute_mac(self, context: str, content: bytes) -> bytes:
        """Return the truncated HMAC of a message as hexadecimal ASCII characters (`MAC_SIZE` bytes).

        Args:
            context: Text that the message belongs to, such as its key. A message is not valid in another context.
            content: Bytes of the message.
        """
        import hmac

        name = context.encode()
        mac = hmac.digest(self._secret, struct.pack("<H", len(name)) + name + content, "sha256")
        return mac[: MAC_SIZE // 2].hex().encode()
