"""Griffe extension that turns plain-text docstrings into Markdown for the documentation site.

`::` before a block of code becomes `:`. Arguments that are described together (`rows, columns: ...`) get an entry each.
"""

import re
from typing import Any

import griffe

_LONE_COLONS = re.compile(r"^\s*::$\n", re.MULTILINE)
_CODE = re.compile(r"(?<=\w)::$", re.MULTILINE)
_COMBINED_ARGUMENTS = re.compile(r"^( {4,})(\w+(?:,\s+\w+)+): ", re.MULTILINE)


def _split_arguments(match: re.Match[str]) -> str:
    """Return an entry for each argument: the last one keeps the description, the others refer to it."""
    indent, names = match[1], re.split(r",\s+", match[2])
    return "".join(f"{indent}{name}: See `{names[-1]}`.\n" for name in names[:-1]) + f"{indent}{names[-1]}: "


class PlainText(griffe.Extension):
    """Rewrites the docstring of each object of the reference."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = _COMBINED_ARGUMENTS.sub(
                _split_arguments, _CODE.sub(":", _LONE_COLONS.sub("", obj.docstring.value))
            )
