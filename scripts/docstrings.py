"""Makes docstrings Markdown for the site, as a griffe extension: here they are plain text.

`::` before a block of code becomes `:`, and arguments that are described together (`rows, columns: ...`) an entry each.
"""

import re
from typing import Any

import griffe

_ALONE = re.compile(r"^\s*::$\n", re.MULTILINE)
_CODE = re.compile(r"(?<=\w)::$", re.MULTILINE)
_TOGETHER = re.compile(r"^( {4,})(\w+(?:,\s+\w+)+): ", re.MULTILINE)


def _apart(found: re.Match[str]) -> str:
    indent, names = found[1], re.split(r",\s+", found[2])
    return "".join(f"{indent}{name}: As `{names[-1]}`.\n" for name in names[:-1]) + f"{indent}{names[-1]}: "


class PlainText(griffe.Extension):
    """Rewrites the docstring of each object that is collected."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one."""
        if obj.docstring:
            obj.docstring.value = _TOGETHER.sub(_apart, _CODE.sub(":", _ALONE.sub("", obj.docstring.value)))
