"""Text that JSON cannot hold: lone surrogates, which other readers refuse and two of which come back as one character."""

import base64
import re

_SURROGATE = re.compile("[\ud800-\udfff]")
_ODD = re.compile(r"[\ud800-\udfff\x00]|\\(?=u[0-9a-f]{4})")


def is_plain(text: str) -> bool:
    """Does JSON hold it?"""
    return _SURROGATE.search(text) is None


def to_base64(text: str) -> str:
    """Any text as ASCII."""
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def from_base64(text: str) -> str:
    """The text that `to_base64` was given.

    Raises:
        ValueError: it is not what that wrote.
    """
    return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")


def logical(name: str) -> str:
    r"""A name under which a tensor is kept: itself, but for lone surrogates and NUL, which are written as \\uXXXX.

    Names that differ stay different: a backslash that could be taken for such an escape is written as one.
    """
    return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", name)
