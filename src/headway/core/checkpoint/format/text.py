"""Conversion of texts and tensor names to forms that JSON and safetensors headers can hold."""

import base64
import re

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Pattern of lone surrogates. Some JSON parsers refuse them, and decode two adjacent ones as one character."""
_ESCAPED = re.compile(r"[\ud800-\udfff\x00]|\\(?=u[0-9a-f]{4})")
"""Pattern of the characters in a name that need an escape, and of backslashes that look like the start of an escape."""


def is_plain(text: str) -> bool:
    """Whether every JSON parser restores a text unchanged, because it contains no lone surrogates."""
    return _SURROGATE.search(text) is None


def encode_base64(text: str) -> str:
    """Return the Base64 encoding of a string, which may contain lone surrogates."""
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def decode_base64(text: str) -> str:
    """Return the string that `encode_base64` has encoded. It may contain lone surrogates.

    Raises:
        ValueError: If `text` is not valid Base64, or the decoded bytes are not UTF-8.
    """
    return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")


def to_logical_name(name: str) -> str:
    r"""Return the name under which a tensor is saved. Lone surrogates and NUL are escaped as \uXXXX.

    Different names stay different, because a backslash that looks like the start of such an escape is escaped too.
    """
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", name)
