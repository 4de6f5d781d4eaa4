"""Writes docs/reference.md from the public names' signatures and docstrings.

`python scripts/reference.py` prints the page; `--write` writes it.
"""

import dataclasses
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import headway
from headway import Accelerator, errors
from headway.data.loader import PreparedLoader
from headway.training.optimizer import PreparedOptimizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
_HEAD = """# Reference

Made by `python scripts/reference.py --write` from the docstrings; a test keeps it up to date.
Everything here is imported from `headway` itself.
"""
WIDTH = 100
_ORDER = ("Accelerator",)
_RETURNED = """What `prepare()` makes of a DataLoader and an optimizer. You do not build these; `isinstance(x, DataLoader)` and
`isinstance(x, Optimizer)` hold.
"""


def public_members(kind: type) -> list[str]:
    """Names of the public methods and properties that Headway defines on a class, in the order of the source."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("headway"):
            found.update({name: None for name, value in vars(base).items() if _is_public(name, value)})
    return list(found)


def _is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and (isinstance(value, property | staticmethod) or inspect.isfunction(value))


def signature(name: str, obj: Any) -> str:
    """`name(parameters)`, one parameter a line where they are many, without self and module names."""
    try:
        found = inspect.signature(obj)
    except (TypeError, ValueError):
        return name
    parts = []
    for parameter in found.parameters.values():
        if parameter.name != "self":
            mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            is_marked_off = parameter.kind == parameter.KEYWORD_ONLY and "*" not in "".join(parts)
            parts += ["*"] if is_marked_off else []
            parts.append(mark + parameter.name + _annotation(parameter.annotation) + _default(parameter.default))
    joined = f"{name}({', '.join(parts)})"
    if len(joined) > WIDTH:
        joined = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
    is_plain = found.return_annotation in (None, inspect.Signature.empty) or isinstance(obj, type)
    return joined if is_plain else f"{joined} -> {_short(found.return_annotation)}"


def _short(annotation: Any) -> str:
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation)).replace("'", "")


def _annotation(annotation: Any) -> str:
    return "" if annotation is inspect.Parameter.empty else f": {_short(annotation)}"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, Enum):
        return f" = {value.value!r}"
    return f" = {value!r}" if not repr(value).startswith("<") else " = ..."


def section(title: str, level: int, heading: str, docstring: str | None) -> str:
    """A heading, the signature, and the docstring as text."""
    body = inspect.cleandoc(docstring or "").strip()
    first, _, rest = body.partition("\n\n")
    out = f"{'#' * level} {title}\n\n```text\n{heading}\n```\n\n{first}\n"
    return out + (f"\n```text\n{rest.rstrip()}\n```\n" if rest.strip() else "")


def describe(name: str, obj: Any) -> list[str]:
    """The sections of one public name."""
    if isinstance(obj, type) and issubclass(obj, Enum):
        return [section(f"`{name}`", 2, f"{name}: {', '.join(repr(member.value) for member in obj)}", obj.__doc__)]
    parts = [section(f"`{name}`", 2, signature(name, obj), inspect.getdoc(obj))]
    if isinstance(obj, type) and not dataclasses.is_dataclass(obj):
        for member in public_members(obj):
            value = inspect.getattr_static(obj, member)
            is_property = isinstance(value, property)
            heading = f"{member}  (property)" if is_property else signature(member, getattr(obj, member))
            parts.append(section(f"`{name}.{member}`", 3, heading, inspect.getdoc(value)))
    return parts


def page() -> str:
    """The whole page."""
    names = [name for name in headway.__all__ if name not in ("__version__", "errors", *_ORDER)]
    parts = [_HEAD]
    for name in (*_ORDER, *sorted(names, key=str.lower)):
        parts += describe(name, Accelerator if name == "Accelerator" else getattr(headway, name))
    parts += ["## What prepare() returns\n", _RETURNED]
    for kind in (PreparedLoader, PreparedOptimizer):
        parts += ["#" + part for part in describe(kind.__name__, kind)]
    parts.append(section("`errors`", 2, "headway.errors", errors.__doc__))
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
